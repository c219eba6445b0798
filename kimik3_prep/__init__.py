"""Prepare images for Kimi-K3 once, offline and exactly: manifest in, safetensors shards and a Parquet index out.

What other programs import: `from kimik3_prep import FeatureStore`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimik3_prep.reading.features import FeatureStore as FeatureStore

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # On first use: it needs torch, which takes a second to import, and the command line starts without.
    if name == "FeatureStore":
        return importlib.import_module("kimik3_prep.reading.features").FeatureStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
