"""NaViT integers: from an image's size to the patch grid it becomes.

The rule is the checkpoint's own processor's. Every consumer derives positions and token counts from these numbers,
so the float64 expression is kept operation by operation: 876 of the widths from 7169 to 20000 come out one pixel
narrower than the side limit because of how it rounds, and that is the right answer.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import sqrt


@dataclass(frozen=True, slots=True)
class Grid:
    """Where one image lands.

    new_w, new_h: pixels after the resize. pad_w, pad_h: zero pixels added right and below.
    rows, cols: the patch grid, `grid_thw = (1, rows, cols)`. tokens: what the language model sees after the merge.
    """

    new_w: int
    new_h: int
    pad_w: int
    pad_h: int
    rows: int
    cols: int
    tokens: int

    @property
    def patches(self) -> int:
        """Number of patches, the length of the image's slice of `pixel_values`."""
        return self.rows * self.cols

    @property
    def thw(self) -> tuple[int, int, int]:
        """`(t, h, w)` as a row of `grid_thws`; t is 1 for an image."""
        return (1, self.rows, self.cols)


@dataclass(frozen=True, slots=True)
class GridRule:
    """The config values that decide a grid. All are counts of pixels or patches, above zero.

    `in_patch_limit` scales an image down; it is not a cap: flooring and padding reach 440 x 152 patches with the
    published limit of 65,536. Size buffers from `Grid.patches`.
    """

    patch_size: int
    merge_size: int
    in_patch_limit: int
    patch_limit_on_one_side: int
    fixed_output_tokens: int | None = None

    def grid(self, width: int, height: int) -> Grid:
        """The grid of an image of `width` x `height` pixels, both at least 1, as `PIL.Image.size` reports them.

        Raises ValueError for a size below 1, and for a config whose limits leave a side that padding would push
        beyond `patch_limit_on_one_side` (cannot happen when that limit is a multiple of the merge size).
        """
        if width < 1 or height < 1:
            raise ValueError(f"an image is at least 1 x 1 pixels, not {width} x {height}")
        patch, side = self.patch_size, self.patch_limit_on_one_side * self.patch_size
        cells = max(1.0, width // patch) * max(1.0, height // patch)
        scale = min(1.0, sqrt(self.in_patch_limit / cells), side / width, side / height)
        new_w = min(max(1, int(width * scale)), side)
        new_h = min(max(1, int(height * scale)), side)
        factor = self.merge_size * patch
        pad_w, pad_h = -new_w % factor, -new_h % factor
        rows, cols = (new_h + pad_h) // patch, (new_w + pad_w) // patch
        if rows > self.patch_limit_on_one_side or cols > self.patch_limit_on_one_side:
            raise ValueError(f"{rows} x {cols} patches exceed the side limit of {self.patch_limit_on_one_side}")
        return Grid(new_w, new_h, pad_w, pad_h, rows, cols, self.tokens(rows, cols))

    def limit_within(self, width: int, height: int, max_tokens: int) -> int | None:
        """The largest `in_patch_limit` up to this rule's with which the image has at most `max_tokens` merged patches.

        None where not even a limit of 1 brings it that low. Searched for, because the limit is no cap: flooring and
        padding go beyond it. Halving finds it, because a larger limit never makes a smaller grid.
        """

        def merged(limit: int) -> int:
            grid = replace(self, in_patch_limit=limit).grid(width, height)
            return grid.patches // self.merge_size**2

        if merged(self.in_patch_limit) <= max_tokens:
            return self.in_patch_limit
        return bisect_right(range(1, self.in_patch_limit), max_tokens, key=merged) or None

    def tokens(self, rows: int, cols: int) -> int:
        """Tokens of a grid of patches: one per merged square, unless the config fixes the number."""
        if self.fixed_output_tokens is not None:
            return self.fixed_output_tokens
        return (rows // self.merge_size) * (cols // self.merge_size)
