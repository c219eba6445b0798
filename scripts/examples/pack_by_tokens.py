"""Plan batches by tokens before any pixel is decoded, and decode on the fly: no features on disk.

kimik3-prep encode manifest.jsonl --config kimi-k3 --index-only --output INDEX
python scripts/examples/pack_by_tokens.py INDEX
"""

from __future__ import annotations

import sys

from kimik3_prep import FeatureStore
from kimik3_prep.reading.training import TokenBudgetSampler


def main(index: str) -> None:
    """How full the batches are, and the first of them."""
    store = FeatureStore(index)
    sampler = TokenBudgetSampler(store.num_tokens[store.ok], budget=2048, oversized="alone")
    batches = [store.ok[batch] for batch in sampler]
    tokens = [int(store.num_tokens[rows].sum()) for rows in batches]
    print(f"{len(store.ok)} images in {len(batches)} batches of {min(tokens):,} to {max(tokens):,} tokens")
    first = store.batch(batches[0])  # decoded now, from the images themselves
    print(f"the first: {first.pixel_values.dtype} {tuple(first.pixel_values.shape)}, ids {', '.join(first.ids)}")


if __name__ == "__main__":
    main(sys.argv[1])
