"""Prepare images for Kimi-K3 once, offline and exactly: manifest in, safetensors shards and a Parquet index out.

What other programs import, from here:

    FeatureStore          the features in an output folder, by id or by manifest row, and requests to engines
    FeatureDataset        its items for a DataLoader
    TokenBudgetSampler    batches of them that keep a budget of tokens
    collate               items to one batch
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimik3_prep.reading.features import FeatureStore as FeatureStore
    from kimik3_prep.reading.training import FeatureDataset as FeatureDataset
    from kimik3_prep.reading.training import TokenBudgetSampler as TokenBudgetSampler
    from kimik3_prep.reading.training import collate as collate

__version__ = "0.1.0"
__all__ = ["FeatureDataset", "FeatureStore", "TokenBudgetSampler", "collate"]


def __getattr__(name: str) -> Any:
    # On first use: they need torch, which takes a second to import, and the command line starts without.
    if name in __all__:
        module = "features" if name == "FeatureStore" else "training"
        return getattr(importlib.import_module(f"kimik3_prep.reading.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
