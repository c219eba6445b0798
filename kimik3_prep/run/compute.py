"""One image's features computed from its source on the spot, to compare with a shard or for want of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kimik3_prep.checkpoint.levels import DTYPES
from kimik3_prep.errors import ItemError
from kimik3_prep.images.decode import Decoded, decode
from kimik3_prep.images.source import Stamp, foreign_errors, read_file
from kimik3_prep.output.recipe import Recipe
from kimik3_prep.output.tables import PlannedItem
from kimik3_prep.pixels.cpu import write_patches
from kimik3_prep.pixels.ready import cast_features, read_features


def features(item: PlannedItem, source: str, recipe: Recipe, same_file: bool = False) -> tuple[npt.NDArray[Any], str]:
    """`[L, 3, p, p]` of the recipe's dtype, and the hash of the encoded bytes. `source` is the item's, resolved.

    same_file: refuse a file that has changed since it was planned, or is another one.
    Raises ItemError where the image cannot be read, or is not the one that was planned.
    """
    config = recipe.config
    if not item.grid.new_w:  # features made elsewhere
        content, content_hash = read_file(source)
        return cast_features(read_features(content, item.grid.thw, config), config, recipe.dtype), content_hash
    decoded = planned_image(item, source, recipe, item.stamp if same_file else None)
    out = np.empty((item.patch_count, 3, config.patch_size, config.patch_size), DTYPES[recipe.dtype].numpy)
    with foreign_errors():
        write_patches(decoded.image, item.grid, config, out, recipe.dtype)
    return out, decoded.content_hash


def planned_image(item: PlannedItem, source: str, recipe: Recipe, planned: Stamp | None = None) -> Decoded:
    """The item's image decoded. Raises ItemError also where it has another size now, or another stamp."""
    try:
        return decode(source, recipe.max_pixels, planned, recipe.exif, (item.width, item.height))
    except ItemError as error:
        if error.code == "size_mismatch":
            raise ItemError("source_changed", error.message) from error
        raise
