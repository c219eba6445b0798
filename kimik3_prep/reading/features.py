"""What training and serving import: the features of a finished run as tensors, by id or by manifest row.

Uses nothing of the encode side, so no image library is involved, but for an index without features.

Exactness. A float32 shard holds the checkpoint's own values, and they come back bit for bit. A uint8 shard holds the
levels before normalisation; the table of the run's mean and std turns them into the same float32 bits. bfloat16 and
float16 shards hold those values rounded once and come back as they are stored. `dtype` adds one plain cast: from
float32 or uint8 shards to bfloat16 that is the one rounding a bfloat16 shard would hold; from bfloat16 to float32 it
widens, and does not bring back what the rounding took.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch

from kimik3_prep.checkpoint.levels import DTYPES, level_table
from kimik3_prep.errors import FailedItem, InputError, Problem
from kimik3_prep.pixels.tensors import to_tensor, torch_dtype
from kimik3_prep.reading.stored import Ints, Key, StoredRun
from kimik3_prep.remote import refuse


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """One item.

    pixel_values: `[L, 3, p, p]`, the caller's own copy. grid_thw: `(1, h, w)` with `h * w == L`.
    original_size: `(width, height)` of the image file; None for features made elsewhere whose row gave none.
    row: the item's index row, every column by name.
    """

    pixel_values: torch.Tensor
    grid_thw: tuple[int, int, int]
    num_tokens: int
    original_size: tuple[int, int] | None
    row: dict[str, Any]

    @property
    def id(self) -> str:
        """The item's id."""
        return str(self.row["id"])

    @property
    def extra(self) -> dict[str, Any]:
        """The manifest row's other fields: captions, questions, labels."""
        return dict(json.loads(self.row["extra"] or "{}"))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Items packed one after the other, as the vision tower takes them; nothing is padded.

    pixel_values: `[ΣL, 3, p, p]`. grid_thws: int64 `[n, 3]`. num_tokens: int64 `[n]`. ids: the n ids.
    """

    pixel_values: torch.Tensor
    grid_thws: torch.Tensor
    num_tokens: torch.Tensor
    ids: tuple[str, ...]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on `device`."""
        pixels = self.pixel_values.to(device, non_blocking=non_blocking)
        grids = self.grid_thws.to(device, non_blocking=non_blocking)
        return Batch(pixels, grids, self.num_tokens.to(device, non_blocking=non_blocking), self.ids)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; `DataLoader(pin_memory=True)` calls this."""
        return Batch(
            self.pixel_values.pin_memory(), self.grid_thws.pin_memory(), self.num_tokens.pin_memory(), self.ids
        )


class FeatureStore:
    """The features in an output folder of `kimik3-prep encode`.

        store = FeatureStore("features")
        store["landscape"].pixel_values, store[0].grid_thw, store.batch(["landscape", "sign"])

    `len(store)` counts manifest rows, and `store[i]` is manifest row i. Iteration and `ok` pass over failed items,
    which `failures` lists; asking for one by name or row raises FailedItem. An unknown id is a KeyError, a row out of
    range an IndexError, and a shard that is gone, damaged or of another run a StoreError.

    Shards are mapped into memory as they are needed; an item's values are copied out once, so that nobody can write
    into a shard or into somebody else's item. Pickling carries the path and the options, no data: workers of a
    DataLoader, forked or spawned, read the files themselves.

    dtype: cast floating point values to this, by name or as torch.dtype; None keeps the shards' own (float32 for uint8
    shards). device: where tensors end up; leave it out in DataLoader workers. raw: the uint8 levels before
    normalisation, of uint8 shards only.

    An index-only run has no shards: features are computed from the images when they are asked for, with the same bytes,
    and an image that is gone or changed raises FailedItem. images: the folder that relative paths start from, where
    they are no longer in the one the index was made with.

    Raises InputError for a folder that is no finished run, and for options that do not fit it.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        raw: bool = False,
        images: str | PathLike[str] | None = None,
    ) -> None:
        refuse(path)
        self.path = Path(path).absolute()  # a worker may stand in another folder
        self._images = None if images is None else Path(images).absolute()
        self._run = StoredRun(self.path, self._images)
        self._dtype, self._device, self._raw = _checked_dtype(dtype, raw, self._run.dtype), device, raw

    def __reduce__(self) -> tuple[Any, ...]:
        more: dict[str, Any] = {"dtype": self._dtype, "device": self._device, "raw": self._raw, "images": self._images}
        return partial(FeatureStore, **more), (self.path,)

    def __repr__(self) -> str:
        failed = len(self) - len(self.ok)
        return f"FeatureStore({str(self.path)!r}: {len(self):,} items, {failed:,} failed, {self._run.dtype})"

    # --- what there is ------------------------------------------------------------------------------------------

    @property
    def table(self) -> pa.Table:
        """The index, one row a manifest row."""
        return self._run.table

    @property
    def stored_dtype(self) -> str:
        """The shards' dtype: float32, bfloat16, float16 or uint8."""
        return self._run.dtype

    @property
    def num_tokens(self) -> Ints:
        """Tokens of every manifest row, int64 `[len(store)]`; -1 for failed items."""
        return self._run.num_tokens

    @property
    def ok(self) -> Ints:
        """Manifest rows that have features, int64, rising."""
        return self._run.ok

    @property
    def failures(self) -> list[FailedItem]:
        """The failed items in manifest order (id, line, code, message), each the error that asking for it raises."""
        return self._run.failed()

    def __len__(self) -> int:
        return len(self._run)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._run.find(name) is not None

    # --- items and batches --------------------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> Features:
        row = self._run.ready(key)
        values = self._run.values(row)
        return Features(
            pixel_values=self._pixels([row]),
            grid_thw=(1, values["grid_h"], values["grid_w"]),
            num_tokens=values["num_tokens"],
            original_size=None if values["width"] is None else (values["width"], values["height"]),
            row=values,
        )

    def __iter__(self) -> Iterator[Features]:
        return self.iterate()

    def iterate(self, order: Literal["manifest", "shard"] = "manifest") -> Iterator[Features]:
        """The items that are ok, in manifest order, or as the shards store them, which reads each file once through."""
        if order not in ("manifest", "shard"):
            raise InputError([Problem("order", f"it is {order!r}", '"manifest" or "shard"')])
        return (self[row] for row in (self.ok if order == "manifest" else self._run.by_shard()))

    def batch(self, ids: Iterable[Key]) -> Batch:
        """The named items (ids or manifest rows) packed in the given order; naming one twice packs it twice."""
        rows = self._ready(ids)
        grids = np.stack([np.ones(len(rows), np.int64), self._run.grid_h[rows], self._run.grid_w[rows]], 1)
        names = self.table["id"].take(pa.array(rows, pa.int64())).to_pylist()
        tokens = torch.from_numpy(self.num_tokens[rows])
        return Batch(self._pixels(rows), self._placed(torch.from_numpy(grids)), self._placed(tokens), tuple(names))

    # --- exports ------------------------------------------------------------------------------------------------

    def to_sglang(self, ids: Iterable[Key]) -> dict[str, Any]:
        """The images of one request as SGLang takes preprocessed ones: the one dict of its `image_data`.

        pixel_values `[ΣL, 3, p, p]`, image_grid_thw int64 `[n, 3]`. No `hash` or `pad_value`, which SGLang refuses. It
        casts the features to the tower's dtype without normalising, so raw levels are refused here (InputError).
        """
        if self._raw:
            raise InputError([Problem("raw", "SGLang takes normalised values", hint="open the store without raw=True")])
        batch = self.batch(ids)
        return {
            "format": "processor_output",
            "modality": "IMAGE",
            "pixel_values": batch.pixel_values,
            "image_grid_thw": batch.grid_thws,
        }

    def to_vllm(self, ids: Iterable[Key]) -> dict[str, torch.Tensor]:
        """The images of one request by the names of vLLM's processor: pixel_values `[ΣL, 3, p, p]`, grid_thws `[n, 3]`.

        Where vLLM normalises on the device it takes raw levels in the same layout: open the store with `raw=True`.
        """
        batch = self.batch(ids)
        return {"pixel_values": batch.pixel_values, "grid_thws": batch.grid_thws}

    def prompt(self, key: Key) -> str:
        """The text that stands for one image: the media framing with the original size, and a pad for each token.

        Raises InputError for features made elsewhere whose manifest row gave no width and height.
        """
        row = self._run.ready(key)
        width, height = (self.table[name][row].as_py() for name in ("width", "height"))
        if width is None or height is None:
            what = "its original size is unknown, and the prompt names it"
            raise InputError([Problem(self._run.label(row), what, hint="give width and height in its manifest row")])
        pads = "<|media_pad|>" * int(self.num_tokens[row])
        return f"<|media_begin|>image {width}x{height}<|media_content|>{pads}<|media_end|>"

    def content_hashes(self, ids: Iterable[Key]) -> list[str]:
        """`sha256:<hex>` of each item's encoded bytes, the identity SGLang caches by."""
        return [self._run.content_hash(row) for row in self._ready(ids)]

    # --- pixels -------------------------------------------------------------------------------------------------

    def _ready(self, ids: Iterable[Key]) -> list[int]:
        if isinstance(ids, str):
            raise TypeError(f"a list of ids is needed, not the one string {ids!r}")
        return [self._run.ready(key) for key in ids]

    def _pixels(self, rows: list[int]) -> torch.Tensor:
        """The patches of some rows, on their device and in their dtype."""
        stored = to_tensor(self._run.patches(rows), self._run.dtype)
        stored = self._placed(stored)  # first, so that of uint8 shards a quarter of the bytes travels
        if self._run.dtype == "uint8":
            return stored if self._raw else self._normalised(stored)
        return stored if self._dtype is None else stored.to(self._dtype)

    @cached_property
    def _table(self) -> torch.Tensor:
        """Values of the levels, `[3, 256]`, on the device and in the dtype that is given out."""
        values = torch.from_numpy(level_table(self._run.mean, self._run.std))
        return self._placed(values if self._dtype is None else values.to(self._dtype))

    def _normalised(self, levels: torch.Tensor) -> torch.Tensor:
        """Table entries of uint8 `[L, 3, p, p]`."""
        values = torch.empty(levels.shape, dtype=self._table.dtype, device=levels.device)
        for channel, entries in enumerate(self._table):
            plane = levels[:, channel]
            values[:, channel] = entries.index_select(0, plane.flatten().to(torch.int32)).view(plane.shape)
        return values

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None else tensor.to(self._device)


def _checked_dtype(dtype: torch.dtype | str | None, raw: bool, stored: str) -> torch.dtype | None:
    if raw and stored != "uint8":
        what = f"the shards hold {stored}, not the levels before normalisation"
        raise InputError([Problem("raw", what, hint="encode with --dtype uint8")])
    wanted = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype) if dtype in DTYPES else None
    if dtype is not None and (raw or wanted is None or not wanted.is_floating_point):
        what = "raw levels are not cast" if raw else f"{dtype!r} does not hold normalised values"
        raise InputError([Problem("dtype", what, "float32, bfloat16 or float16; raw=True alone gives levels")])
    return wanted
