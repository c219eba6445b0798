"""Which device the gpu backend runs on, decided before any work.

torch is imported only when it has to be asked: a machine without an accelerator answers without it.
"""

from __future__ import annotations

import os
import re
from typing import Literal

from kimik3_prep.errors import InputError, Problem

_ANYWHERE = "--device cpu runs the same kernels on the CPU, with the same bytes; --backend cpu does without them"


def auto_backend() -> Literal["cpu", "gpu"]:
    """`gpu` where a CUDA device can be used, else `cpu`. Both give the same bytes."""
    if not os.path.exists("/dev/nvidiactl"):  # importing torch to hear "no" costs seconds
        return "cpu"
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"


def find_devices(device: str | None, where: str, elsewhere: bool = False) -> tuple[str, ...]:
    """The torch devices that `--device` names: `cuda` is every visible one, a shard each.

    device: cuda, cuda:N, mps, cpu, or None for cuda. where: what asks for a device, for the problem's place.
    elsewhere: the work is done on other machines, and a CUDA device need not be here.
    Raises InputError when there is no such device, or when this Pillow resizes in another way than the kernels.
    """
    asked = device or "cuda"
    match = re.fullmatch(r"(cpu|mps|cuda)(?::(\d+))?", asked)
    if match is None or (match[2] and match[1] != "cuda"):
        hint = 'was "cuda" meant?' if asked.lower().startswith(("gpu", "cuda", "nvidia")) else ""
        raise InputError([Problem("--device", f"{asked!r} is no device", "cuda, cuda:N, mps or cpu", hint)])
    _check_pillow()
    import torch

    if match[1] == "cuda" and elsewhere:
        return ("cuda",)
    if match[1] == "cpu":
        return ("cpu",)
    if match[1] == "mps":
        if not torch.backends.mps.is_available():
            raise InputError([Problem(where, "no MPS device is available here", hint=_ANYWHERE)])
        return ("mps",)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        why = "this torch was built without CUDA" if torch.version.cuda is None else "CUDA finds no device"
        hint = f"install a CUDA build of torch and its driver; {_ANYWHERE}"
        raise InputError([Problem(where, f"the gpu backend is asked for, and {why}", hint=hint)])
    if match[2] is None:
        return tuple(f"cuda:{index}" for index in range(count))
    if int(match[2]) >= count:
        raise InputError([Problem("--device", f"{asked} does not exist", f"cuda:0 to cuda:{count - 1}")])
    return (asked,)


def _check_pillow() -> None:
    from PIL import __version__

    from kimik3_prep.pixels.device import resizes_like_pillow

    if not resizes_like_pillow():
        what = f"Pillow {__version__} resizes in another order of passes than the device kernels"
        raise InputError([Problem("--backend", what, "Pillow 13", "install pillow>=13, or use --backend cpu")])
