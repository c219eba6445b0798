"""Items as columns: the schema that the reader fills and the plan begins with. No image library is needed for it."""

from __future__ import annotations

import hashlib

import pyarrow as pa

from kimik3_prep.images.address import is_data_url

ITEM_SCHEMA = pa.schema(
    [
        ("item", pa.int64()),  # 0-based manifest row
        ("line", pa.int64()),  # 1-based line of the file (row number for tables, tars and folders)
        ("id", pa.large_string()),
        ("image", pa.large_string()),  # as written; the features file for local items
        ("path", pa.string()),  # preprocessing path: deferred | local
        ("backend", pa.string()),  # what the row asks for: cpu | gpu | null
        ("content_hash", pa.string()),  # what the row promises
        ("width", pa.int64()),
        ("height", pa.int64()),
        ("grid_thw", pa.list_(pa.int64(), 3)),  # local items only
        ("extra", pa.large_string()),  # the row's other fields, JSON
    ]
)


def short_image(image: str) -> str:
    """The image string as an index shows it: a `data:` URL by its media type and a digest, all else unchanged."""
    if not is_data_url(image):
        return image
    digest = hashlib.sha256(image.encode("utf-8")).hexdigest()
    return f"{image.partition(',')[0][:100]},sha256-{digest[:32]}"
