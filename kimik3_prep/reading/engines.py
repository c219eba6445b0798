"""Requests to inference engines: token ids with room for every image, and features in the form the engine takes.

What SGLang 0.5.23 takes is run by scripts/sglang_check.py, what vLLM 0.34.0 takes by scripts/vllm_check.py: on their
released code, without a GPU and without an engine.

A prompt becomes token ids in one way for all engines. Each image has one place in it, which is filled with

    <|media_begin|>image {width}x{height}<|media_content|> <|media_pad|> × tokens <|media_end|>

where width and height are those of the image file. A place is a single `<|media_pad|>`, which chat templates write, a
single `<|kimi_image_placeholder|>`, or this text itself with one pad or all of them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimik3_prep.errors import InputError, Problem

BEGIN, CONTENT, PAD, END = "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"
PLACEHOLDER = "<|kimi_image_placeholder|>"

#: A prompt as text, as chat messages for the tokenizer's template, or as token ids that have a place for each image.
PromptLike = str | Sequence[Mapping[str, Any]] | Sequence[int]

#: Where an image's pads stand among the ids: the first and the last of them.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image as the language model reads of it."""

    name: str
    """How a message names the item: `line 3, sunset`."""

    size: tuple[int, int] | None
    """Width and height of the image file; None where nobody knows them."""

    num_tokens: int

    @property
    def head(self) -> str:
        """What stands before the pads. Raises InputError where the size is unknown."""
        if self.size is None:
            what = "its original size is unknown, and the prompt names it"
            raise InputError([Problem(self.name, what, hint="give width and height in its manifest row")])
        width, height = self.size
        return f"{BEGIN}image {width}x{height}{CONTENT}"

    @property
    def text(self) -> str:
        """All that stands for the image in a prompt."""
        return self.head + PAD * self.num_tokens + END


# --- prompts ------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """Token ids of full length: each image has a pad for each of its tokens."""

    ids: list[int]

    spans: list[Span]
    """The pads of each image, in order."""

    pad: int
    content: int


def read_prompt(images: Sequence[PromptImage], prompt: PromptLike, tokenizer: Any, **template: Any) -> Prompt:
    """Turn a prompt and its images, in the order of their places, into token ids.

    Text is encoded with its control tokens. Messages go through `tokenizer.apply_chat_template`, with `template` and a
    generation prompt; their image parts are written as that template wants them, `{"type": "image"}` in most.

    Raises InputError where places and images do not pair up, a place is framed for another image, or the tokenizer does
    not know the control tokens.
    """
    words = _Words(tokenizer)
    ids = words.ids(prompt, len(images), template)
    places = list(words.places(ids))
    if len(places) != len(images):
        what = f"it has places for {len(places)} images, and {len(images)} ids are given"
        expected = f"one {PAD} or one text of `store.prompt(id)` for each id"
        raise InputError([Problem("prompt", what, expected)])
    filled: list[int] = []
    spans: list[Span] = []
    done = 0
    for number, ((begin, end), image) in enumerate(zip(places, images, strict=True), 1):
        head = words.head(image)
        if end - begin > 1:
            words.check_frame(ids[begin:end], head, image, number)
        filled += ids[done:begin] + head
        spans.append((len(filled), len(filled) + image.num_tokens - 1))
        filled += [words.pad] * image.num_tokens + [words.end]
        done = end
    return Prompt(filled + ids[done:], spans, words.pad, words.content)


class _Words:
    """The control tokens of a tokenizer, and what is made of them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = {token: self._id(token) for token in (BEGIN, CONTENT, PAD, END, PLACEHOLDER)}
        missing = [token for token in (BEGIN, CONTENT, PAD, END) if known[token] is None]
        if missing:
            what = f"it has no token {', '.join(missing)}"
            raise InputError([Problem("tokenizer", what, "the tokenizer of a Kimi-K3 checkpoint")])
        self.begin, self.content, self.pad, self.end = (int(known[t] or 0) for t in (BEGIN, CONTENT, PAD, END))
        self._single = {self.pad, known[PLACEHOLDER]}

    def _id(self, token: str) -> int | None:
        number = self._tokenizer.convert_tokens_to_ids(token)
        return number if number != getattr(self._tokenizer, "unk_token_id", None) else None

    def ids(self, prompt: PromptLike, images: int, template: dict[str, Any]) -> list[int]:
        """Token ids of the prompt as it stands."""
        if isinstance(prompt, str):
            return self._encode(prompt)
        if len(prompt) and all(isinstance(part, Mapping) for part in prompt):
            # The checkpoint's own renderer takes the text of each image's place; templates pass over the word.
            options = {"add_generation_prompt": True, "image_prompts": [PAD] * images, **template}
            chat = self._tokenizer.apply_chat_template(list(prompt), tokenize=True, return_dict=False, **options)
            return [int(number) for number in chat]
        try:
            return [operator.index(number) for number in prompt]  # type: ignore[arg-type]
        except TypeError:
            expected = "a text, a list of chat messages, or token ids"
            raise InputError([Problem("prompt", "it holds neither messages nor ids alone", expected)]) from None

    def _encode(self, text: str) -> list[int]:
        try:
            ids = self._tokenizer.encode(text, allowed_special="all")  # the checkpoint's splits control tokens without
        except TypeError:
            ids = self._tokenizer.encode(text)
        return [int(number) for number in ids]

    def head(self, image: PromptImage) -> list[int]:
        """Ids of what stands before the pads, without what a tokenizer adds in front of any text."""
        ids = self._encode(image.head)
        return ids[ids.index(self.begin) : ids.index(self.content) + 1]

    def places(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """Where images go: the begin and the end of a single pad or placeholder, or of a whole frame."""
        at = 0
        while at < len(ids):
            stop = at + 1
            if ids[at] == self.begin:
                stop = ids.index(self.end, at) + 1 if self.end in ids[at:] else len(ids)
                yield at, stop
            elif ids[at] in self._single:
                yield at, stop
            at = stop

    def check_frame(self, frame: list[int], head: list[int], image: PromptImage, number: int) -> None:
        """Raise InputError for a frame that is not this image's, with one pad or all of them."""
        if any(frame == [*head, *[self.pad] * pads, self.end] for pads in (1, image.num_tokens)):
            return
        inside = [token for token in frame if token != self.pad]
        what = f"image {number} stands there as {self._tokenizer.decode(inside)} with {frame.count(self.pad)} pads"
        expected = f"{image.head}{END} with {image.num_tokens} pads for {image.name}"
        raise InputError([Problem("prompt", what, expected)])


# --- SGLang -------------------------------------------------------------------------------------------------------


class SGLangRequest(NamedTuple):
    """What `sglang.Engine.generate` takes: `engine.generate(**request._asdict(), sampling_params=…)`."""

    input_ids: list[int]
    """Ids of full length with one real pad: SGLang counts pads against dicts, and overwrites the ids in `offsets`."""

    image_data: list[dict[str, Any]]
    """One dict for all images, none where there are none."""


def sglang_request(prompt: Prompt, pixel_values: Tensor, grids: Tensor) -> SGLangRequest:
    """The request for normalised `pixel_values` `[ΣL, 3, p, p]` and int64 `grids` `[n, 3]` of all images in order."""
    ids = list(prompt.ids)
    for first, last in prompt.spans:
        ids[first : last + 1] = [prompt.content] * (last + 1 - first)
    if not prompt.spans:
        return SGLangRequest(ids, [])
    ids[prompt.spans[0][0]] = prompt.pad
    images = {
        "format": "processor_output",
        "modality": "IMAGE",
        "pixel_values": pixel_values,
        "image_grid_thw": grids,
        "offsets": prompt.spans,
    }
    return SGLangRequest(ids, [images])


# --- vLLM ---------------------------------------------------------------------------------------------------------


def find_spans(ids: Sequence[int], counts: Sequence[int], pad: int | None) -> list[Span]:
    """Where the pads of each image stand in ids of full length; `counts` are the tokens of the images in order.

    Without `pad` it is the one id whose runs are exactly as long as the images. Raises InputError where the runs of the
    pad are others, or several ids have such runs.
    """
    runs: dict[int, list[Span]] = {}
    at = 0
    for token, group in groupby(ids):
        length = sum(1 for _ in group)
        runs.setdefault(token, []).append((at, at + length - 1))
        at += length
    fitting = [
        token
        for token in (runs if pad is None else [pad])
        if [last + 1 - first for first, last in runs.get(token, [])] == list(counts)
    ]
    if len(fitting) == 1:
        return runs[fitting[0]]
    if fitting:
        raise InputError([Problem("prompt_ids", "several ids could be the pad", hint="name it: pad_id=…")])
    what = "no id has runs as long as the images" if pad is None else f"the runs of id {pad} are of other lengths"
    expected = f"a pad for each token of each image: {', '.join(f'{count:,}' for count in counts)}"
    raise InputError([Problem("prompt_ids", what, expected, "`store.prompt_ids(ids, prompt, tokenizer)` makes them")])


def vllm_inputs(prompt_ids: Sequence[int], spans: Sequence[Span], pixel_values: Tensor, grids: Tensor) -> Any:
    """The engine input that vLLM's own processor would make, for `LLMEngine.add_request` and `AsyncLLM.generate`.

    `multi_modal_data` has no place for features of this model. pixel_values `[ΣL, 3, p, p]` are uint8 levels, or
    normalised values for an engine that does not normalise. vLLM caches an image's embeddings by a hash of these bytes.

    Raises InputError where vLLM is not installed.
    """
    try:
        from transformers import BatchFeature
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
    except ModuleNotFoundError as error:
        raise InputError([Problem("vllm", f"it is not installed: {error}", hint="pip install vllm")]) from error
    sizes = grids.prod(-1)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", sizes),
        "grid_thws": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    features = BatchFeature({"pixel_values": pixel_values, "grid_thws": grids})
    images = zip(torch.split(pixel_values, sizes.tolist()), grids.tolist(), strict=True)
    return mm_input(
        list(prompt_ids),
        MultiModalKwargsItems.from_hf_inputs(features, fields),
        {"image": [_identity(patches, grid) for patches, grid in images]},
        {"image": [PlaceholderRange(offset=first, length=last + 1 - first) for first, last in spans]},
    )


def _identity(patches: Tensor, grid: list[int]) -> str:
    """A hash of what the tower sees of an image: its patches, their type and their grid."""
    digest = hashlib.sha256(f"kimik3-prep {patches.dtype} {grid} ".encode())
    digest.update(patches.cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
