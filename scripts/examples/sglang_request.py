"""A request to SGLang with features made beforehand.

    python scripts/examples/sglang_request.py FEATURES ID [ID ...] [--model CHECKPOINT]

Without --model it shows what would be sent. With it, SGLang (installed by you) loads the checkpoint and answers.
"""

from __future__ import annotations

import argparse
from typing import Any

from kimik3_prep import FeatureStore


def request(store: FeatureStore, ids: list[str], question: str) -> tuple[str, list[dict[str, Any]]]:
    """The prompt, images first, and the `image_data` that goes with it: the same ids in the same order."""
    prompt = "".join(store.prompt(name) for name in ids) + question
    return prompt, [store.to_sglang(ids)]


def main() -> None:
    """Build a request; send it where there is an engine to send it to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features")
    parser.add_argument("ids", nargs="+")
    parser.add_argument("--model", help="a Kimi-K3 checkpoint")
    parser.add_argument("--question", default="What do these pictures show?")
    options = parser.parse_args()
    prompt, image_data = request(FeatureStore(options.features), options.ids, options.question)
    if options.model is None:
        print(f"{len(prompt):,} characters, {prompt.count('<|media_pad|>'):,} image tokens")
        for name, value in image_data[0].items():
            print(f"{name}: {value if isinstance(value, str) else (value.dtype, tuple(value.shape))}")
        return
    import sglang
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=True)
    engine = sglang.Engine(model_path=options.model, trust_remote_code=True)
    print(engine.generate(input_ids=tokenizer.encode(prompt), image_data=image_data)["text"])


if __name__ == "__main__":
    main()
