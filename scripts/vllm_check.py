"""Does vLLM's released code take what `FeatureStore.vllm_inputs` makes?

    python scripts/vllm_check.py FEATURES [ID ID] [--version 0.34.0] [--wheels DIR]

Fetches vLLM's wheel from the package registry, builds an engine input with its own classes, batches the images as its
worker does, and normalises them with the code that runs on the device, in its form for any device. The levels must
arrive as they are stored, the normalised values within a rounding of the checkpoint's. No engine is started and no
tower runs: whether an engine accepts the input is not shown here.

Needs this package and, at the versions vLLM wants, what these files import: torch, transformers, pydantic, msgspec,
cloudpickle, cachetools, blake3, cbor2, openai, regex … CI does not run it.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.utils.flop_counter
import transformers  # noqa: F401  (before the stand-ins, which it would take for the real things)
from stand_ins import stand_in, tiny_tokenizer, unpacked_wheel

from kimik3_prep import FeatureStore
from kimik3_prep.errors import PrepError

CHECKED = "0.34.0"


class CustomOp(torch.nn.Module):
    """In place of vLLM's base of operators, which wants to know the platform."""

    @staticmethod
    def register(name: str) -> Any:
        """Let the class be."""
        return lambda cls: cls


def set_up(folder: Path) -> None:
    """Let vLLM's files be imported without its compiled parts."""
    for name in ("tpu_inference", "libtpu"):
        sys.modules[name] = None  # type: ignore[assignment]  # a stand-in would pass for that platform
    stand_in(["triton", "vllm.model_executor.custom_op"], folder)
    operators = importlib.import_module("vllm.utils.torch_utils")
    operators.direct_register_custom_op = lambda *_, **__: None
    importlib.import_module("vllm.model_executor.custom_op").CustomOp = CustomOp


def main() -> int:
    """Check, print a line for each thing that was looked at, and return 0 where all are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features")
    parser.add_argument("ids", nargs="*", help="without them the first ones that are ok")
    parser.add_argument("--version", default=CHECKED)
    parser.add_argument("--wheels", type=Path, default=Path(tempfile.gettempdir()) / "kimik3-prep-wheels")
    options = parser.parse_args()
    store, tokenizer = FeatureStore(options.features), tiny_tokenizer()
    ids = options.ids or [str(store.table["id"][int(row)]) for row in store.ok[:3]]
    logging.disable(logging.WARNING)
    set_up(unpacked_wheel("vllm", options.version, options.wheels))
    batching = importlib.import_module("vllm.multimodal.utils")
    norm = importlib.import_module("vllm.model_executor.layers.fusion.mm_input_norm")

    prompt_ids = store.prompt_ids(ids, "<|media_pad|>" * len(ids) + "What do they show?", tokenizer)
    inputs = store.vllm_inputs(ids, prompt_ids)
    ((_, count, batch),) = batching.group_and_batch_mm_kwargs(
        [("image", item) for item in inputs["mm_kwargs"]["image"]]
    )
    values = torch.cat([store[name].pixel_values for name in ids]).float()
    levels = ((values + 1) * 127.5).round().to(torch.uint8)
    grids = torch.tensor([store[name].grid_thw for name in ids])
    device = norm.FusedMMInputNorm([0.5] * 3, [0.5] * 3, 1 / 255)
    normalised = device.forward_native(batch["pixel_values"].flatten(1), torch.float32).view_as(values)
    apart = float((normalised - values).abs().max())
    pad = tokenizer.convert_tokens_to_ids("<|media_pad|>")
    places = [
        prompt_ids[place.offset : place.offset + place.length] == [pad] * int(grid.prod() // 4)
        for place, grid in zip(inputs["mm_placeholders"]["image"], grids, strict=True)
    ]
    checks = {
        "an engine input of multimodal type": inputs["type"] == "multimodal" and count == len(ids),
        "uint8 levels as stored": torch.equal(batch["pixel_values"], levels),
        "grids as stored": torch.equal(batch["grid_thws"], grids),
        "a place for every image token": len(places) == len(ids) and all(places),
        "a hash for every image": len(inputs["mm_hashes"]["image"]) == len(ids),
        f"normalised on the device to within {apart:.1e} of the stored values": apart < 1e-6,
    }
    print(f"vLLM {options.version}, {len(ids)} images of {options.features}")
    for name, holds in checks.items():
        print(f"{'yes' if holds else 'NO'}: {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (PrepError, KeyError) as error:
        sys.exit(f"error: {error}")
