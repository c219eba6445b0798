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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from kimik3_prep.checkpoint.levels import DTYPES, Normaliser, level_table, nearest_levels
from kimik3_prep.errors import FailedItem, InputError, Problem
from kimik3_prep.pixels.tensors import to_tensor, torch_dtype
from kimik3_prep.reading.engines import (
    Prompt,
    PromptImage,
    PromptLike,
    SGLangRequest,
    find_spans,
    read_prompt,
    sglang_request,
    vllm_inputs,
)
from kimik3_prep.reading.fetched import CACHE_SIZE, open_runs, temporary_cache
from kimik3_prep.reading.stored import Ints, Key
from kimik3_prep.remote import as_url

_FLOATS = "float32, bfloat16 or float16; raw=True alone gives levels"


class Scale(NamedTuple):
    """What turns levels into values: (level / 255 - mean) / std, a number for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """One item."""

    pixel_values: torch.Tensor
    """`[L, 3, p, p]`, the caller's own copy."""

    grid_thw: tuple[int, int, int]
    """`(1, h, w)` with `h * w == L`."""

    num_tokens: int

    original_size: tuple[int, int] | None
    """`(width, height)` of the image file; None for features made elsewhere whose row gave none."""

    row: dict[str, Any]
    """The item's index row, every column by name."""

    scale: Scale
    """For pixel values that are levels."""

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
    """Items packed one after the other, as the vision tower takes them; nothing is padded."""

    pixel_values: torch.Tensor
    """`[ΣL, 3, p, p]`."""

    grid_thws: torch.Tensor
    """int64 `[n, 3]`."""

    num_tokens: torch.Tensor
    """int64 `[n]`."""

    rows: tuple[dict[str, Any], ...]
    """The n index rows, every column by name."""

    scale: Scale
    """For pixel values that are levels."""

    @property
    def ids(self) -> tuple[str, ...]:
        """The n ids."""
        return tuple(str(row["id"]) for row in self.rows)

    @property
    def extra(self) -> tuple[dict[str, Any], ...]:
        """The other fields of the n manifest rows: captions, conversations."""
        return tuple(dict(json.loads(row["extra"] or "{}")) for row in self.rows)

    def normalised(self, dtype: torch.dtype = torch.float32) -> Batch:
        """The batch with values in `dtype`: levels are normalised on their device, values are cast.

        In float32 the bits are the checkpoint's on every device, so that a batch can travel as uint8 levels.
        """
        pixels = self.pixel_values
        values = normalised(pixels, self.scale, dtype) if pixels.dtype == torch.uint8 else pixels.to(dtype)
        return replace(self, pixel_values=values)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; `DataLoader(pin_memory=True)` calls this."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        pixels, grids, tokens = map(change, (self.pixel_values, self.grid_thws, self.num_tokens))
        return replace(self, pixel_values=pixels, grid_thws=grids, num_tokens=tokens)


class FeatureStore:
    """The features in an output folder of `kimik3-prep encode`, or in several that make one store.

        store = FeatureStore("features")
        store["landscape"].pixel_values, store[0].grid_thw, store.batch(["landscape", "sign"])

    `len(store)` counts manifest rows, and `store[i]` is manifest row i. Iteration and `ok` pass over failed items,
    which `failures` lists; asking for one by name or row raises FailedItem. An unknown id is a KeyError, a row out of
    range an IndexError, and a shard that is gone, damaged or of another run a StoreError.

    `FeatureStore(["features", "more"])`: rows go on from folder to folder. The recipes must be equal and every id be in
    one folder only, as `encode ALL --since features -o more` leaves it.

    `FeatureStore("s3://bucket/features", cache=DIR)`: items are brought as they are asked for, a batch's at the same
    time, and compared with their checksums. They stay in the folder `cache`, which processes may share, until its
    files take more than `cache_size` bytes; without it, in a temporary folder until the process ends.

    Shards are mapped into memory as they are needed; an item's values are copied out once, so that nobody can write
    into a shard or into somebody else's item. Pickling carries the paths and the options, no data: workers of a
    DataLoader, forked or spawned, read the files themselves.

    dtype: cast floating point values to this, by name or as torch.dtype; None keeps the shards' own (float32 for uint8
    shards). device: where tensors end up; leave it out in DataLoader workers. raw: the uint8 levels before
    normalisation, of uint8 shards only.

    An index-only run has no shards: features are computed from the images when they are asked for, with the same bytes,
    and an image that is gone or changed raises FailedItem. images: the folder that relative paths start from, where
    they are no longer in the one the index was made with.

    check: compare the checksum of each item on reading (StoreError), which reads its bytes once more. Without it,
    place, count and grid of an item must agree with its shard's own grids, and a changed pixel is not seen.

    Raises InputError for a folder that is no finished run, for folders that do not fit together, and for options that
    do not fit them.
    """

    def __init__(
        self,
        path: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        raw: bool = False,
        images: str | PathLike[str] | None = None,
        check: bool = False,
        cache: str | PathLike[str] | None = None,
        cache_size: int = CACHE_SIZE,
    ) -> None:
        folders = [path] if isinstance(path, str | PathLike) else list(path)
        if not folders:
            raise InputError([Problem("path", "no folder is named", "an output of `kimik3-prep encode`, or several")])
        # A worker may stand in another folder.
        self.paths = tuple(as_url(folder) or Path(folder).absolute() for folder in folders)
        self._images = None if images is None else Path(images).absolute()
        self._check, self._cache_size = check, cache_size
        self._cache = None if cache is None else Path(cache).absolute()
        if self._cache is None and any(isinstance(place, str) for place in self.paths):
            self._cache = temporary_cache()
        self._run = open_runs(self.paths, self._images, check, self._cache, cache_size)
        self._dtype, self._device, self._raw = _checked_dtype(dtype, raw, self._run.dtype), device, raw

    def __reduce__(self) -> tuple[Any, ...]:
        more: dict[str, Any] = {"dtype": self._dtype, "device": self._device, "raw": self._raw, "images": self._images}
        more |= {"check": self._check, "cache": self._cache, "cache_size": self._cache_size}
        return partial(FeatureStore, **more), (self.paths,)

    def __repr__(self) -> str:
        failed = len(self) - len(self.ok)
        return f"FeatureStore({self._run.name!r}: {len(self):,} items, {failed:,} failed, {self._run.dtype})"

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
    def scale(self) -> Scale:
        """What normalises the levels of this run."""
        return Scale(self._run.mean, self._run.std)

    @property
    def num_tokens(self) -> Ints:
        """Tokens of every manifest row, int64 `[len(store)]`; -1 for failed items."""
        return self._run.num_tokens

    @property
    def ok(self) -> Ints:
        """Manifest rows that have features, int64, rising."""
        return self._run.ok

    @property
    def lines(self) -> Ints:
        """Manifest line of every row, int64 `[len(store)]`; those of a further folder go on after the last one's."""
        return self._run.lines

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
        return self.items([key])[0]

    def items(self, ids: Iterable[Key]) -> list[Features]:
        """The named items (ids or manifest rows) in the given order. From a URL they come at the same time."""
        rows = self._ready(ids)
        return [self._features(row, span) for row, span in zip(rows, self._run.spans(rows), strict=True)]

    def _features(self, row: int, span: npt.NDArray[Any]) -> Features:
        values = self._run.values(row)
        return Features(
            pixel_values=self._values(span.copy()),
            grid_thw=(1, values["grid_h"], values["grid_w"]),
            num_tokens=values["num_tokens"],
            original_size=None if values["width"] is None else (values["width"], values["height"]),
            row=values,
            scale=self.scale,
        )

    def __iter__(self) -> Iterator[Features]:
        return self.iterate()

    def iterate(self, order: Literal["manifest", "shard"] = "manifest") -> Iterator[Features]:
        """The items that are ok, in manifest order, or as the shards store them, which reads each file once through."""
        if order not in ("manifest", "shard"):
            raise InputError([Problem("order", f"it is {order!r}", '"manifest" or "shard"')])
        rows = self.ok if order == "manifest" else self._run.by_shard()
        return (item for portion in self._run.portions(rows) for item in self.items(portion))

    def batch(self, ids: Iterable[Key]) -> Batch:
        """The named items (ids or manifest rows) packed in the given order; naming one twice packs it twice."""
        rows = self._ready(ids)
        values = self.table.take(pa.array(rows, pa.int64())).to_pylist()
        tokens = torch.from_numpy(self.num_tokens[rows])
        return Batch(self._pixels(rows), self._grids(rows), self._placed(tokens), tuple(values), self.scale)

    # --- requests to engines ------------------------------------------------------------------------------------

    def prompt(self, key: Key) -> str:
        """The text that stands for one image: the media framing with the original size, and a pad for each token.

        Raises InputError for features made elsewhere whose manifest row gave no width and height.
        """
        return self._prompt_image(self._run.ready(key)).text

    def prompt_ids(self, ids: Iterable[Key], prompt: PromptLike, tokenizer: Any, **template: Any) -> list[int]:
        """Token ids of a prompt with its images, a pad for each image token; see `sglang_request` for the prompt."""
        return self._read_prompt(self._ready(ids), prompt, tokenizer, template).ids

    def sglang_request(
        self,
        ids: Iterable[Key],
        prompt: PromptLike,
        tokenizer: Any,
        *,
        dtype: torch.dtype | str = "bfloat16",
        **template: Any,
    ) -> SGLangRequest:
        """Token ids and image data of one request to SGLang: `engine.generate(**request._asdict())`.

        ids: the images in the order of their places in the prompt.
        prompt: text with one `<|media_pad|>` or one `store.prompt(id)` for each image; or chat messages, which go
        through the tokenizer's chat template with the `template` options; or token ids of either.
        dtype: of the pixel values. SGLang casts them to its tower's, so bfloat16 saves half the way.

        Raises InputError where prompt and images do not pair up, and for a store of raw levels, which SGLang would not
        normalise.
        """
        if self._raw:
            raise InputError([Problem("raw", "SGLang takes normalised values", hint="open the store without raw=True")])
        rows = self._ready(ids)
        read = self._read_prompt(rows, prompt, tokenizer, template)
        return sglang_request(read, self._pixels(rows, _float_dtype(dtype)), self._grids(rows))

    def vllm_inputs(
        self, ids: Iterable[Key], prompt_ids: Sequence[int], *, pad_id: int | None = None, normalised: bool = False
    ) -> Any:
        """The input of one request to vLLM's engine: `LLMEngine.add_request(id, inputs, params)`.

        `multi_modal_data` takes no features of this model, in any form; this is what vLLM's own processor would hand on
        after it. The pixels are uint8 levels, which the engine normalises on its device: float values would come out
        as an even black picture. normalised: give bfloat16 values instead, for an engine that runs with
        `mm_device_do_normalize=False`.

        prompt_ids: ids with a pad for each image token, from `prompt_ids`. pad_id: the pad's id, where the lengths of
        the images do not tell.

        Raises InputError where ids and images do not pair up, an item holds values of its own that are no levels, or
        vLLM is not installed.
        """
        rows = self._ready(ids)
        spans = find_spans(prompt_ids, self.num_tokens[rows].tolist(), pad_id)
        pixels = self._pixels(rows, torch.bfloat16) if normalised else self._as_levels(rows)
        return vllm_inputs(prompt_ids, spans, pixels, self._grids(rows))

    def _prompt_image(self, row: int) -> PromptImage:
        width, height = (self.table[name][row].as_py() for name in ("width", "height"))
        size = None if width is None or height is None else (width, height)
        return PromptImage(self._run.label(row), size, int(self.num_tokens[row]))

    def _read_prompt(self, rows: list[int], prompt: PromptLike, tokenizer: Any, template: dict[str, Any]) -> Prompt:
        return read_prompt([self._prompt_image(row) for row in rows], prompt, tokenizer, **template)

    # --- pixels -------------------------------------------------------------------------------------------------

    def _ready(self, ids: Iterable[Key]) -> list[int]:
        if isinstance(ids, str):
            raise TypeError(f"a list of ids is needed, not the one string {ids!r}")
        return [self._run.ready(key) for key in ids]

    def _grids(self, rows: list[int]) -> torch.Tensor:
        """Grids of some rows, int64 `[n, 3]`."""
        grids = np.stack([np.ones(len(rows), np.int64), self._run.grid_h[rows], self._run.grid_w[rows]], 1)
        return self._placed(torch.from_numpy(grids))

    def _pixels(self, rows: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """The patches of some rows, on their device and in `dtype`, or the store's own."""
        return self._values(self._run.patches(rows), dtype)

    def _values(self, patches: npt.NDArray[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Stored patches, on their device and in `dtype`, or the store's own."""
        stored = to_tensor(patches, self._run.dtype)
        stored = self._placed(stored)  # first, so that of uint8 shards a quarter of the bytes travels
        wanted = dtype or self._dtype
        if self._run.dtype == "uint8":
            return stored if self._raw and dtype is None else self._normalised(stored, wanted)
        return stored if wanted is None else stored.to(wanted)

    def _normalised(self, levels: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return normalised(levels, self.scale, dtype or torch.float32)

    def _as_levels(self, rows: list[int]) -> torch.Tensor:
        """The uint8 levels of some rows. Raises InputError where the shards hold other values than those of levels."""
        stored, dtype = self._run.patches(rows), DTYPES[self._run.dtype]
        if dtype.holds_levels:
            return torch.from_numpy(stored)
        entries = dtype.widen(dtype.of_levels(level_table(self._run.mean, self._run.std)))
        levels, strays = nearest_levels(dtype.widen(stored), entries)
        if strays or any(len(np.unique(channel)) < 256 for channel in entries):
            what = f"its {dtype.name} shards do not hold levels, and {strays:,} of these values are none"
            raise InputError([Problem(self._run.name, what, hint="encode with --dtype uint8")])
        return torch.from_numpy(levels)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None else tensor.to(self._device)


def normalised(levels: torch.Tensor, scale: Scale, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of uint8 `levels` `[L, 3, p, p]` on their device, each rounded once from its float32 value.

    Every device reads them from the checkpoint's table of 256 values a channel, so the bits are the same on all.
    """
    if levels.device.type == "cpu":
        name = str(dtype).removeprefix("torch.")
        values = _normaliser(scale, name if name in DTYPES else "float32")(levels.contiguous().numpy())
        return to_tensor(values, name) if name in DTYPES else torch.from_numpy(values).to(dtype)
    table = torch.from_numpy(level_table(*scale)).to(dtype).to(levels.device)
    out = torch.empty(levels.shape, dtype=dtype, device=levels.device)
    for channel, entries in enumerate(table):
        plane = levels[:, channel]
        out[:, channel] = entries.index_select(0, plane.flatten().to(torch.int32)).view(plane.shape)
    return out


@lru_cache(8)
def _normaliser(scale: Scale, dtype: str) -> Normaliser:
    return Normaliser(level_table(*scale), DTYPES[dtype])


def _checked_dtype(dtype: torch.dtype | str | None, raw: bool, stored: str) -> torch.dtype | None:
    if raw and stored != "uint8":
        what = f"the shards hold {stored}, not the levels before normalisation"
        raise InputError([Problem("raw", what, hint="encode with --dtype uint8")])
    if raw and dtype is not None:
        raise InputError([Problem("dtype", "raw levels are not cast", _FLOATS)])
    return None if dtype is None else _float_dtype(dtype)


def _float_dtype(dtype: torch.dtype | str) -> torch.dtype:
    wanted = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype) if dtype in DTYPES else None
    if wanted is None or not wanted.is_floating_point:
        raise InputError([Problem("dtype", f"{dtype!r} does not hold normalised values", _FLOATS)])
    return wanted
