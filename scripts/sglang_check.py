"""Does SGLang's released code take what `FeatureStore.sglang_request` makes?

    python scripts/sglang_check.py FEATURES [ID ID] [--version 0.5.23] [--wheels DIR]

Fetches SGLang's wheel from the package registry and runs its own Kimi-K3 processor, padding and embedding code on
requests, with a vision tower that only keeps what it is given: no GPU, no weights, and no engine is started. One image,
several, and several turns of a chat must reach the tower as they are stored. Other ways to write a request are tried as
well, and the script says which of them fare otherwise than in 0.5.23, and which of the files it runs have changed.

Needs this package and, at the versions SGLang wants, what its files import when they are loaded: torch, transformers,
aiohttp, blake3, cachetools, dill, einops, fastapi, ipython, msgspec, openai, orjson, partial-json-parser, psutil,
pybase64, pydantic, pyzmq, requests, setproctitle, tiktoken, tqdm, uvloop. CI does not run it.
"""

from __future__ import annotations

import argparse
import array
import ast
import asyncio
import contextlib
import difflib
import functools
import importlib
import io
import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from stand_ins import stand_in, tiny_tokenizer, unpacked_wheel

from kimik3_prep import FeatureStore
from kimik3_prep.errors import PrepError

CHECKED = "0.5.23"

#: What a request goes through on its way to the tower.
FILES = [
    "managers/io_struct.py",
    "managers/mm_utils.py",
    "managers/schedule_batch.py",
    "models/kimi_k3.py",
    "multimodal/kimi_k3_image_processing.py",
    "multimodal/mm_utils.py",
    "multimodal/processors/base_processor.py",
    "multimodal/processors/kimi_common.py",
    "multimodal/processors/kimi_k3.py",
]

#: Installed or not, these are stood in for: they want a GPU, or are not on the way.
ABSENT = [
    *("triton", "sgl_kernel", "flashinfer", "torchao", "torch_memory_saver", "sglang.kernels", "sglang.srt.layers"),
    *("torchvision", "torchaudio", "torchcodec", "decord", "av", "soundfile", "librosa"),
    *("xgrammar", "llguidance", "outlines"),
    *("sglang.srt.models.kimi_k3", "sglang.srt.models.kimi_k25"),
]


class Request(NamedTuple):
    """A request to try, and how 0.5.23 took it: `as stored`, or the beginning of what it said."""

    name: str
    make: Callable[[], tuple[list[int], Any]]
    before: str
    ours: bool = False


class Tower:
    """In place of the vision tower: keeps its input."""

    device = torch.device("cpu")
    patch_size = 14
    patch_embed = SimpleNamespace(proj=SimpleNamespace(weight=torch.zeros(1, dtype=torch.bfloat16)))

    def __call__(self, pixel_values: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        self.pixel_values, self.grids = pixel_values, grids
        return pixel_values


class SGLang:
    """The engine's own functions on the way of a request, set up without its server."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        torch.compile = lambda function=None, **_: function if callable(function) else lambda inner: inner
        stand_in(ABSENT, folder)
        import pydantic
        import xgrammar

        xgrammar.StructuralTag = type("StructuralTag", (pydantic.BaseModel,), {})
        for name, model in (
            ("kimi_k3", "KimiK3ForConditionalGeneration"),
            ("kimi_k25", "KimiK25ForConditionalGeneration"),
        ):
            setattr(importlib.import_module(f"sglang.srt.models.{name}"), model, type(model, (), {}))
        of = importlib.import_module
        self._kimi = of("sglang.srt.multimodal.processors.kimi_k3")
        self._embed = of("sglang.srt.managers.mm_utils")
        self._cache = of("sglang.srt.managers.mm_schedule")
        self._batch = of("sglang.srt.managers.schedule_batch")
        self._structs = of("sglang.srt.managers.io_struct")
        self._set_up(of("sglang.srt.multimodal.processors.base_processor"), of("sglang.srt.multimodal.cache.identity"))
        self._image_feature = self._method_of_model()

    def _set_up(self, base: Any, identity: Any) -> None:
        """The settings that a server would have read from its command line."""
        media = SimpleNamespace(
            allowed_media_domains=None,
            media_url_max_file_size_mb=64,
            mm_feature_transport="cpu",
            image_processor_backend="auto",
            disable_fast_image_processor=False,
            mm_process_config={},
            mm_preprocess_cache_size_mb=None,
            trust_mm_content_hashes=False,
            mm_io_worker_num=1,
            mm_processor_worker_num=1,
            mm_enable_dp_encoder=False,
        )
        nothing = type("Nothing", (), {"__getattr__": lambda self, name: None})
        base.get_mm = lambda: media
        base.get_serving = lambda: SimpleNamespace(skip_tokenizer_init=False, tokenizer_worker_num=1)
        base.BaseMultimodalProcessor._create_cpu_executor = lambda self: None
        for name in ("get_model", "get_mm", "get_serving", "get_quant", "get_load"):
            if hasattr(identity, name):
                setattr(identity, name, (lambda: media) if name == "get_mm" else nothing)
        self._cache.get_schedule = lambda: SimpleNamespace(chunked_prefill_size=-1)

    def _method_of_model(self) -> Any:
        """`get_image_feature` out of the model's file, whose other contents need a GPU."""
        tree = ast.parse((self._folder / "sglang/srt/models/kimi_k3.py").read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        model = next(node for node in classes if node.name == "KimiK3ForConditionalGeneration")
        method = next(n for n in model.body if isinstance(n, ast.FunctionDef) and n.name == "get_image_feature")
        processing = importlib.import_module("sglang.srt.multimodal.kimi_k3_image_processing")
        transport = importlib.import_module("sglang.srt.multimodal.mm_utils")
        names = {name: value for name, value in vars(processing).items() if not name.startswith("__")}
        names |= {"torch": torch, "List": list, "MultimodalDataItem": object}
        names["materialize_multimodal_features"] = transport.materialize_multimodal_features
        exec(compile(ast.Module([method], []), "kimi_k3.py", "exec"), names)
        return names["get_image_feature"]

    def _processor(self) -> Any:
        config = {"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 65536, "patch_limit_on_one_side": 512}
        config |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fixed_output_tokens": None}

        class Checkpoint:
            """The checkpoint's processor, as far as SGLang asks it about images that are prepared already."""

            tokenizer = self._tokenizer
            image_processor = media_processor = SimpleNamespace(media_proc_cfg=config)

            def __call__(self, text: list[str], **_: Any) -> dict[str, torch.Tensor]:
                return {"input_ids": torch.tensor([self.tokenizer.encode(text[0])])}

        model = SimpleNamespace(
            media_placeholder_token_id=self._tokenizer.convert_tokens_to_ids("<|media_pad|>"),
            vision_config=SimpleNamespace(merge_kernel_size=(2, 2)),
            architectures=["KimiK3ForConditionalGeneration"],
            model_type="kimi_k3",
            to_dict=lambda: {},
        )
        server = SimpleNamespace(base_gpu_id=0, model_path="", revision=None)
        return self._kimi.KimiK3ImageProcessor(model, server, Checkpoint(), None)

    def run(self, input_ids: list[int], image_data: Any) -> tuple[Tower, list[int]]:
        """What reaches the tower, and the ids with the images' places overwritten. Raises what SGLang raises."""
        request = self._structs.GenerateReqInput(input_ids=input_ids, image_data=image_data, sampling_params={})
        request.normalize_batch_and_arguments()
        work = self._processor().process_mm_data_async(
            image_data=request.image_data if isinstance(request.image_data, list) else [request.image_data],
            audio_data=None,
            input_text=input_ids,
            request_obj=request,
            max_req_input_len=10**9,
        )
        output = asyncio.run(work)
        self._cache.init_mm_embedding_cache(1 << 28)
        model = SimpleNamespace(vision_tower=Tower(), use_data_parallel=False)
        model.mm_projector = lambda pixels: torch.zeros(len(pixels) // 4, 16, dtype=torch.bfloat16)
        model.get_image_feature = functools.partial(self._image_feature, model)
        items = self._batch.MultimodalInputs(mm_items=output.mm_items, im_token_id=output.im_token_id)
        padded = list(self._embed.pad_mm_tokens(array.array("q", output.input_ids), items))
        self._embed.embed_mm_inputs(
            [items],
            [0],
            [len(padded)],
            torch.tensor(padded, dtype=torch.int64),
            torch.nn.Embedding(1000, 16),
            multimodal_model=model,
            data_embedding_func_mapping={self._batch.Modality.IMAGE: model.get_image_feature},
        )
        return model.vision_tower, padded


# --- requests -----------------------------------------------------------------------------------------------------


def requests(store: FeatureStore, ids: list[str], tokenizer: Any) -> list[Request]:
    """What `sglang_request` makes, and other ways to write it."""
    text = "".join(store.prompt(name) for name in ids) + "What do they show?"
    chat = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, *[{"type": "image"}] * (len(ids) - 1)]},
    ]

    def ours(which: list[str], prompt: Any, dtype: str = "bfloat16") -> Callable[[], tuple[list[int], Any]]:
        return lambda: tuple(store.sglang_request(which, prompt, tokenizer, dtype=dtype))

    def whole() -> tuple[list[int], dict[str, Any]]:
        """Ids with all pads, and the images without their places."""
        images = dict(store.sglang_request(ids, text, tokenizer).image_data[0])
        images.pop("offsets")
        return store.prompt_ids(ids, text, tokenizer), images

    def one_pad_each() -> tuple[list[int], Any]:
        return tokenizer.encode("<|media_pad|>" * len(ids) + "What?"), [whole()[1]]

    def as_json() -> tuple[list[int], Any]:
        """As an HTTP body would carry it: JSON has no tensors."""
        input_ids, (images,) = store.sglang_request(ids, text, tokenizer)
        lists = {key: value.tolist() if torch.is_tensor(value) else value for key, value in images.items()}
        return input_ids, json.loads(json.dumps([lists]))

    placeholders = "ValueError: Kimi image placeholders must map one-to-one to image data"
    return [
        Request("one image", ours(ids[:1], "<|media_pad|>What is this?"), "as stored", True),
        Request("several images", ours(ids, text), "as stored", True),
        Request("several turns of a chat", ours(ids, chat), "as stored", True),
        Request("several images in float32", ours(ids, text, "float32"), "as stored", True),
        Request("a pad for each token, no offsets", lambda: (whole()[0], [whole()[1]]), placeholders),
        Request("one pad an image, one dict", one_pad_each, placeholders),
        Request("tensors as JSON lists", as_json, "TypeError: Unsupported media identity input: list"),
    ]


def outcome(sglang: SGLang, store: FeatureStore, ids: Sequence[str], request: Request, tokenizer: Any) -> str:
    """`as stored`, what differs, or what SGLang said."""
    input_ids, image_data = request.make()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            tower, padded = sglang.run(list(input_ids), image_data)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    items = [store[name] for name in ids]
    once = list(
        {(item.row["shard"], item.row["row"]): item for item in items}.values()
    )  # SGLang keeps what it has seen
    stored = torch.cat([item.pixel_values for item in once]).to(torch.bfloat16)
    if not torch.equal(tower.pixel_values, stored):
        return "the tower is given other values"
    if tower.grids.tolist() != [list(item.grid_thw) for item in once]:
        return "the tower is given other grids"
    known = len(tokenizer)
    if sum(number >= known for number in padded) != sum(item.num_tokens for item in items):
        return "the images have other places"
    frame = {tokenizer.convert_tokens_to_ids(word) for word in ("<|media_pad|>", "<|media_content|>")}
    if [n for n in padded if n < known and n not in frame] != [n for n in input_ids if n not in frame]:
        return "the text around the images is another"
    return "as stored"


def changed_files(old: Path, new: Path) -> list[str]:
    """Which of the files that a request passes differ between two versions, and by how many lines."""
    said = []
    for name in FILES:
        texts = [(folder / "sglang/srt" / name) for folder in (old, new)]
        lines = [path.read_text().splitlines() if path.is_file() else [] for path in texts]
        diff = [
            line for line in difflib.unified_diff(*lines, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))
        ]
        if diff:
            added = sum(line.startswith("+") for line in diff)
            said.append(f"{name}: {added} lines added, {len(diff) - added} removed")
    return said


def main() -> int:
    """Check, print a line for each request, and return 0 where all of ours reach the tower as stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features")
    parser.add_argument("ids", nargs="*", help="two or more; without them the first ones that are ok")
    parser.add_argument("--version", default=CHECKED)
    parser.add_argument("--wheels", type=Path, default=Path(tempfile.gettempdir()) / "kimik3-prep-wheels")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    store, tokenizer = FeatureStore(options.features), tiny_tokenizer()
    ids = options.ids or [str(store.table["id"][int(row)]) for row in store.ok[:3]]
    folder = unpacked_wheel("sglang", options.version, options.wheels)
    if options.version != CHECKED:
        for line in changed_files(unpacked_wheel("sglang", CHECKED, options.wheels), folder):
            print(f"changed since {CHECKED}: {line}")
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            sglang = SGLang(folder, tokenizer)
    except Exception:
        traceback.print_exc()
        print(f"SGLang {options.version} cannot be set up as {CHECKED} could: see the last line above")
        return 1
    failed = False
    print(f"SGLang {options.version}, {len(ids)} images of {options.features}")
    for request in requests(store, ids, tokenizer):
        which = ids[:1] if request.name == "one image" else ids
        now = outcome(sglang, store, which, request, tokenizer)
        print(f"{'ours' if request.ours else 'other'}: {request.name}: {now}")
        failed = failed or (request.ours and now != request.before)
        if not now.startswith(request.before):
            print(f"    changed since {CHECKED}, where it was: {request.before}")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PrepError, KeyError) as error:
        sys.exit(f"error: {error}")
