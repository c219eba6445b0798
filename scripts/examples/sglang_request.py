"""A request to SGLang with features made beforehand: images and text of a chat become token ids and image data.

    python scripts/examples/sglang_request.py FEATURES ID [ID ...] --tokenizer CHECKPOINT [--engine]

CHECKPOINT is a Kimi-K3 checkpoint, a folder or a name on the hub. Without --engine the script shows what it would send;
with it SGLang (installed by you) loads the checkpoint and answers.

Features reach SGLang in the process of its engine. Its HTTP endpoint takes JSON, which holds no tensors, and 0.5.23
refuses features written as lists ("Unsupported media identity input: list"): behind a server of your own, open the
store beside the engine and let requests name ids.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch

from kimik3_prep import FeatureStore
from kimik3_prep.errors import PrepError


def conversation(images: int, question: str) -> list[dict[str, Any]]:
    """Chat messages: the images, in the order of their ids, and a question. More turns are more messages."""
    parts = [*[{"type": "image"}] * images, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def show(name: str, value: Any) -> str:
    """A line about a part of the image data."""
    return f"{name}: {value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else f"{name}: {value}"


def main() -> None:
    """Build a request; send it where there is an engine to send it to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features")
    parser.add_argument("ids", nargs="+")
    parser.add_argument("--tokenizer", required=True, metavar="CHECKPOINT")
    parser.add_argument("--engine", action="store_true", help="load the checkpoint and answer")
    parser.add_argument("--question", default="What do these pictures show?")
    options = parser.parse_args()

    from transformers import AutoTokenizer

    store = FeatureStore(options.features)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=True)
    messages = conversation(len(options.ids), options.question)
    request = store.sglang_request(options.ids, messages, tokenizer)
    if not options.engine:
        print(f"{len(request.input_ids):,} token ids")
        for name, value in request.image_data[0].items():
            print(show(name, value))
        return
    import sglang

    engine = sglang.Engine(model_path=options.tokenizer, trust_remote_code=True)
    print(engine.generate(**request._asdict())["text"])


if __name__ == "__main__":
    try:
        main()
    except (PrepError, KeyError) as error:  # a folder that is no finished run, an id that is not in it or has failed
        sys.exit(f"error: {error.args[0] if isinstance(error, KeyError) else error}")
