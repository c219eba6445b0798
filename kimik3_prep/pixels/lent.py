"""The memory of a Pillow image as a numpy array, without a copy.

Pillow lends its memory through Arrow's C data interface: a capsule with a pointer to a struct. Reading the two fields
that matter takes less time, and 40 MB less memory in every worker, than the Arrow library would.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


class _ArrowArray(ctypes.Structure):
    """`struct ArrowArray` of https://arrow.apache.org/docs/format/CDataInterface.html, up to its children."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
]

_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype, _pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Lent:
    """What numpy makes an array of. It holds the capsule, and the capsule holds the pixels."""

    def __init__(self, capsule: object, shape: tuple[int, int, int], address: int) -> None:
        self.capsule = capsule
        self.__array_interface__ = {"version": 3, "shape": shape, "typestr": "|u1", "data": (address, True)}


def lent_pixels(image: Image.Image) -> npt.NDArray[np.uint8] | None:
    """Return the pixels of a loaded image of four-byte pixels, such as RGB, uint8 `[h, w, 4]`, read-only.

    None where Pillow does not lend them: they lie in several blocks, which were allocated before `images.decode` asked
    for one.
    """
    lender: Any = image  # the interface is not among Pillow's type hints
    try:
        _, capsule = lender.__arrow_c_array__()
    except ValueError:
        return None
    array = _ArrowArray.from_address(_pointer_in(capsule, b"arrow_array"))
    if array.n_children != 1 or 4 * array.length != array.children[0].contents.length:
        return None  # pixels of another width
    pixels = array.children[0].contents  # a list of four bytes for each pixel, and of that list all the bytes
    if array.offset or pixels.offset or array.length != image.width * image.height:
        return None
    return np.asarray(_Lent(capsule, (image.height, image.width, 4), pixels.buffers[1]))
