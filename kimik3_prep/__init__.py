"""Prepare images for Kimi-K3 once, offline and exactly: manifest in, safetensors shards and a Parquet index out."""

__version__ = "0.1.0"
