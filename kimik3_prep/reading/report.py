"""One HTML file to look at a whole run: every item as the model sees it, with its numbers. Needs no torch.

The page loads nothing, so it works from a disk and by mail. Whatever comes from the run stands in JSON blocks, which a
browser never runs, and the page's script writes it as text. The pictures lie in blocks of their own that are read when
their items are shown.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from kimik3_prep.disk import write_whole
from kimik3_prep.errors import FailedItem, InputError, Problem
from kimik3_prep.reading.fetched import open_runs
from kimik3_prep.reading.inspection import OutputDescription
from kimik3_prep.reading.pictures import Entry, Pixels, ReportPage, RunSource, without_padding

MOST_ITEMS = 5000
"""Items on a page, if no other number is asked for. A picture takes about 10 kB."""

_TEMPLATE = Path(__file__).with_name("report.html")
_PER_CHUNK = 100  # pictures in a block
_SIDE, _SHORT, _LONGEST = 224, 48, 2048  # pixels: of the longer side, at least of the shorter, at most of a strip
_LOSSLESS = 128 * 128  # a picture with no more pixels is kept as it is
_QUALITY = 80
_CAPTIONS = ("caption", "text", "prompt", "description")
_MOST_OF_A_TEXT = 500


def write_report(
    place: Path | str, target: Path, description: OutputDescription, first: int | None = None
) -> ReportPage:
    """Write the page of a finished run. first: how many items, `MOST_ITEMS` if not given.

    Raises InputError for a folder that is no finished run, before anything is written; StoreError, RunError.
    """
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError([Problem("--report", f"{target} is no name of a page", "a file that ends in .html")])
    page = _Page(RunSource(open_runs([place])), description, MOST_ITEMS if first is None else first)
    write_whole(target, page.write, parents=True)
    return ReportPage(str(target), len(page.items), description.rows, target.stat().st_size)


class _Page:
    """The page while it is made."""

    def __init__(self, source: RunSource, description: OutputDescription, most: int) -> None:
        self._source, self._description, self._most = source, description, most
        self.items: list[dict[str, Any]] = []
        self._numbers: dict[tuple[str, int], int] = {}  # of pictures, by shard and row: rows may share one
        self._pictures = 0

    def write(self, file: BinaryIO) -> None:
        before, _, after = _TEMPLATE.read_text(encoding="utf-8").partition("$data")
        script = after.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        title = html.escape(f"{self._description.path}: kimik3-prep")
        file.write(Template(before).substitute(title=title, script_hash=f"sha256-{digest}").encode())
        chunk: list[str] = []
        for number, picture in enumerate(self._draw()):
            chunk.append(picture)
            if len(chunk) == _PER_CHUNK:
                file.write(_block(f"pictures-{number // _PER_CHUNK}", chunk))
                chunk.clear()
        file.write(_block(f"pictures-{self._pictures // _PER_CHUNK}", chunk))
        file.write(_block("items", self.items))
        file.write(_block("run", self._run()))
        file.write(after.encode())

    def _draw(self) -> Iterator[str]:
        """Give the pictures, and collect the items. An item whose image has changed since then has none."""
        for row in range(min(self._most, len(self._source.run))):
            values = self._source.run.values(row)
            entry = self._source.entry(row)
            item = _item(entry, values)
            self.items.append(item)
            if entry.error_code:
                continue
            place = values["shard"] or values["image"], values["row"] or 0
            if place not in self._numbers:
                try:
                    pixels, _ = self._source.pixels(entry)
                except FailedItem as error:  # of an index without features
                    item.update(error=error.code, message=error.message)
                    continue
                self._numbers[place] = self._pictures
                self._pictures += 1
                yield _data_url(without_padding(pixels, entry.padding))
            item["picture"] = self._numbers[place]

    def _run(self) -> dict[str, Any]:
        """Return what the page says above the items."""
        about = self._description
        totals = f"{about.by_status.get('ok', 0):,} of {about.rows:,} items have features, "
        totals += f"{about.by_status.get('failed', 0):,} failed; {about.images:,} images, {about.num_tokens:,} tokens"
        left_out = about.rows - len(self.items)
        cap = f"The page shows the first {len(self.items):,} items. --first shows more." if left_out else ""
        settings = [(f"{name}", _text(value)) for name, value in about.settings.facts().items()]
        versions = [(f"version of {name}", value) for name, value in about.versions.items()]
        return {
            "path": about.path,
            "totals": totals,
            "cap": cap,
            "histogram": about.histogram,
            "errors": list(about.by_error_code.items()) or [("none", 0)],
            "settings": [*settings, *versions, ("fingerprint", about.fingerprint)],
            "patch_size": self._source.patch_size,
            "merge_size": self._source.merge_size,
            "per_chunk": _PER_CHUNK,
        }


def _item(entry: Entry, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page's script reads of an item."""
    width, height = entry.size or (values["width"], values["height"])
    new_width, new_height = entry.new_size or (None, None)
    return {
        "row": entry.row,
        "line": values["line"],
        "id": _text(entry.id),
        "caption": _caption(values["extra"]),
        "error": entry.error_code,
        "message": _text(entry.error_message),
        "width": width,
        "height": height,
        "new_width": new_width,
        "new_height": new_height,
        "pad_width": entry.padding[0],
        "pad_height": entry.padding[1],
        "rows": entry.grid[0],
        "columns": entry.grid[1],
        "tokens": entry.tokens,
        "mode": values["mode"],
        "format": values["format"],
        "orientation": values["exif_orientation"] or 1,
        "shard": values["shard"],
        "picture": None,
    }


def _caption(extra: str | None) -> str:
    """Return the text that came with an image: a field that is called so, else all its fields."""
    fields = json.loads(extra) if extra else {}
    caption = next((fields[name] for name in _CAPTIONS if isinstance(fields.get(name), str)), None)
    return _text(caption if caption is not None else fields) if fields else ""


def _text(value: Any) -> str:
    """Return a value as a text of bounded length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_OF_A_TEXT else f"{text[:_MOST_OF_A_TEXT]}…"


def _data_url(pixels: Pixels) -> str:
    """Return a small picture as a URL that holds it. A strip keeps a height that can be read."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    longest, shortest = max(image.size), min(image.size)
    scale = min(1.0, max(_SIDE / longest, min(_SHORT / shortest, _LONGEST / longest)))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)
    kind = "png" if image.width * image.height <= _LOSSLESS else "jpeg"
    buffer = io.BytesIO()
    small.save(buffer, kind.upper(), **({"quality": _QUALITY} if kind == "jpeg" else {}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _block(name: str, value: Any) -> bytes:
    """Return a JSON block. No `<` stands in it, so no text of the run can end it or begin another tag."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'.encode()
