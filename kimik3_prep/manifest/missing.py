"""Whether relative paths start in the right folder: whether the first files are there, and where else they lie."""

from __future__ import annotations

import os
from itertools import islice

from kimik3_prep.errors import Problem
from kimik3_prep.images.address import is_data_url, resolve, split
from kimik3_prep.manifest.read import Manifest
from kimik3_prep.manifest.report import show
from kimik3_prep.remote import scheme

_LOOKED_AT = 100  # images whose files are looked for
_LOOKED_THROUGH = 20_000  # folders and files below the source's that are looked through for one of them


def missing_files(manifest: Manifest) -> Problem | None:
    """A warning where none of the first files is there: the folder that was tried, and where such files do lie."""
    tried: list[tuple[str, str]] = []
    for batch in manifest.items.slice(0, 50 * _LOOKED_AT).select(["image"]).to_batches():
        for image in batch["image"].to_pylist():
            if is_data_url(image) or len(tried) == _LOOKED_AT:
                continue
            file = split(resolve(image, manifest.base))[0]
            if scheme(file):
                continue
            if "\0" not in file and os.path.lexists(file):
                return None
            tried.append((split(image)[0], file))
    if not tried:
        return None
    image, file = tried[0]
    count = f"of the first {len(tried)} files none is there, such as {show(file)}"
    folder = manifest.base if not os.path.isabs(image) else os.path.dirname(file)
    what = f"{count}; the folder that was tried is {show(folder)}"
    hint = "--image-dir says where relative paths start"
    if (other := _elsewhere(image, manifest.base)) is not None:
        hint = f"such files lie below {show(other)}: --image-dir {other}"
    return Problem(manifest.name, what, hint=hint, severity="warning")


def _elsewhere(image: str, base: str) -> str | None:
    """The folder near the source, or the working one, below which the image's path leads to a file."""
    parts = [part for part in image.removeprefix("file://").split("/") if part not in ("", ".", "..")]
    roots = [root for root in (base, os.getcwd(), os.path.dirname(base)) if not scheme(root)]
    for root in dict.fromkeys(roots):
        for path, _, files in islice(os.walk(root), _LOOKED_THROUGH):
            if not parts or parts[-1] not in files:
                continue
            whole = os.path.join(path, parts[-1])
            for length in range(len(parts), 0, -1):
                end = os.sep + os.path.join(*parts[-length:])
                if whole.endswith(end):
                    return whole.removesuffix(end) or os.sep
    return None
