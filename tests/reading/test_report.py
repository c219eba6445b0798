"""report.py: one page that loads nothing, whatever the run holds; and what a browser makes of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import Run, encode, picture, write_manifest

from kimik3_prep.errors import InputError
from kimik3_prep.reading.inspection import OutputDescription, inspect
from kimik3_prep.reading.pictures import ReportPage
from kimik3_prep.reading.report import write_report

HOSTILE = ["<script>document.title = 'owned'</script>", "</script><img src=x onerror=\"document.title='owned'\">"]
ROWS: list[dict[str, Any]] = [
    {"id": HOSTILE[0], "image": "0.png", "caption": HOSTILE[1]},
    {"id": HOSTILE[1], "image": "1.png", "caption": "<b>\u202egnp.exe\u2028"},
    {"id": "strip", "image": "2.png", "text": "a long strip"},
    {"id": "gone", "image": "gone.png", "caption": HOSTILE[0]},
    {"id": "again", "image": "0.png", "score": 5},
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of pictures of several shapes and one failed item, with texts that want to be more than texts."""
    folder = tmp_path_factory.mktemp("report")
    for number, (width, height, mode) in enumerate([(50, 61, "RGB"), (700, 500, "L"), (7600, 180, "RGB")]):
        picture(width, height, mode, number).save(folder / f"{number}.png")
    encode(write_manifest(folder / "m.jsonl", ROWS), folder / "out", dtype="uint8")
    return folder / "out"


def report(root: Path, target: Path, first: int | None = None) -> ReportPage:
    description = inspect(root)
    assert isinstance(description, OutputDescription)
    return write_report(root, target, description, first)


class Reader(HTMLParser):
    """Collects the tags of a page, and the text of its scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = (dict(attrs).get("id") or "") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def block(self, name: str) -> Any:
        return json.loads(self.scripts[name])


def test_the_page_loads_nothing_and_runs_only_its_own_script(made: Path, tmp_path: Path) -> None:
    written = report(made, tmp_path / "new" / "look.html")
    text = Path(written.path).read_text()
    page = Reader(text)
    assert [(tag, key) for tag, attributes in page.tags for key in attributes if key in ("src", "href", "srcset")] == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML|insertAdjacentHTML|document\.write", text)
    assert {tag for tag, _ in page.tags} & {"img", "b", "link", "iframe", "object", "base", "form"} == set()
    run = [attributes for tag, attributes in page.tags if tag == "script" and "type" not in attributes]
    assert len(run) == 1
    digest = base64.b64encode(hashlib.sha256(page.scripts[""].encode()).digest()).decode()
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_the_page_holds_every_item_with_its_numbers(made: Path, tmp_path: Path) -> None:
    written = report(made, tmp_path / "look.html")
    assert (written.items, written.rows) == (5, 5)
    assert str(written) == f"{tmp_path / 'look.html'}: 5 items, {written.size:,} bytes"
    page = Reader((tmp_path / "look.html").read_text())
    items = page.block("items")
    assert [item["id"] for item in items] == [row["id"] for row in ROWS]
    assert [item["caption"] for item in items] == [
        *(HOSTILE[1], ROWS[1]["caption"], "a long strip", HOSTILE[0], '{"score": 5}'),
    ]
    assert [item["error"] for item in items] == ["", "", "", "not_found", ""]
    assert [item["picture"] for item in items] == [0, 1, 2, None, 0]
    strip = {
        key: items[2][key] for key in ("width", "height", "new_width", "new_height", "pad_width", "tokens", "mode")
    }
    assert strip == {
        **{"width": 7600, "height": 180, "new_width": 7168, "new_height": 169, "pad_width": 0, "tokens": 1792},
        "mode": "RGB",
    }
    pictures = page.block("pictures-0")
    assert [url[:16] for url in pictures] == ["data:image/png;b", "data:image/jpeg;", "data:image/jpeg;"]
    run = page.block("run")
    assert run["totals"] == "4 of 5 items have features, 1 failed; 3 images, 2,254 tokens"
    assert (run["cap"], run["errors"], run["patch_size"]) == ("", [["not_found", 1]], 14)
    assert ["dtype", "uint8"] in run["settings"]


def test_a_page_may_show_the_first_items_only(made: Path, tmp_path: Path) -> None:
    written = report(made, tmp_path / "look.html", first=2)
    assert str(written).startswith(f"{tmp_path / 'look.html'}: the first 2 of 5 items, ")
    page = Reader((tmp_path / "look.html").read_text())
    assert len(page.block("items")) == 2
    assert page.block("run")["cap"] == "The page shows the first 2 items. --first shows more."


def test_many_pictures_are_in_several_blocks(tmp_path: Path) -> None:
    for number in range(205):
        picture(28, 28, "RGB", number).save(tmp_path / f"{number}.png")
    rows = [{"id": str(number), "image": f"{number}.png"} for number in range(205)]
    encode(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out", dtype="uint8")
    report(tmp_path / "out", tmp_path / "look.html")
    page = Reader((tmp_path / "look.html").read_text())
    assert [len(page.block(f"pictures-{number}")) for number in range(3)] == [100, 100, 5]
    assert [item["picture"] for item in page.block("items")] == list(range(205))


def test_an_index_without_features_shows_what_its_images_give(tmp_path: Path) -> None:
    for name in ("a", "b"):
        picture(56, 28).save(tmp_path / f"{name}.png")
    rows = [{"id": name, "image": f"{name}.png"} for name in ("a", "b")]
    encode(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out", index_only=True)
    (tmp_path / "b.png").unlink()
    report(tmp_path / "out", tmp_path / "look.html")
    items = Reader((tmp_path / "look.html").read_text()).block("items")
    assert [(item["picture"], item["error"]) for item in items] == [(0, ""), (None, "not_found")]


def test_what_gives_no_page_is_said_before_anything_is_written(made: Path, tmp_path: Path, run: Run) -> None:
    with pytest.raises(InputError, match="ends in"):
        report(made, tmp_path / "look.png")
    for arguments, words in (
        ([made / "index.parquet", "--report", "a.html"], "is no output folder"),
        ([made, "--report", "a.txt"], "ends in .html"),
    ):
        refused = run("inspect", *arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert words in refused.stderr
    assert list(tmp_path.iterdir()) == []
    done = run("inspect", made, "--report", "a.html", "--format", "json")
    size = (tmp_path / "a.html").stat().st_size
    assert json.loads(done.stdout)["report"] == asdict(ReportPage("a.html", 5, 5, size))


# --- in a browser -------------------------------------------------------------------------------------------------

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--window-size=1200,900"]


class Browser:
    """A browser that a driver program steers: the few WebDriver commands that are needed here."""

    def __init__(self, port: int, profile: Path) -> None:
        self._address = f"http://127.0.0.1:{port}/session"
        options = {"args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._ask("", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        self._address += f"/{session}"

    def _ask(self, path: str, body: dict[str, Any], method: str = "POST") -> Any:
        request = urllib.request.Request(self._address + path, json.dumps(body).encode(), method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, path: Path) -> None:
        self._ask("/url", {"url": path.as_uri()})

    def run(self, script: str) -> Any:
        return self._ask("/execute/sync", {"script": script, "args": []})

    def choose(self, id: str, value: str) -> None:
        self.run(
            f"const e = document.getElementById('{id}'); e.value = {json.dumps(value)};"
            "e.dispatchEvent(new Event('change')); e.dispatchEvent(new Event('input'));"
        )

    def ids(self) -> Any:
        return self.run("return [...document.querySelectorAll('.card .id')].map(e => e.textContent)")

    def messages(self) -> Any:
        return self._ask("/se/log", {"type": "browser"})

    def close(self) -> None:
        self._ask("", {}, "DELETE")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no chromium and chromedriver on this machine")
    with subprocess.Popen([driver, "--port=0"], stdout=-1, text=True) as process:
        assert process.stdout
        found = (re.search(r"successfully on port (\d+)", line.strip()) for line in process.stdout)
        port = next(int(match[1]) for match in found if match)
        opened = Browser(port, tmp_path_factory.mktemp("profile"))
        try:
            yield opened
        finally:
            opened.close()
            process.terminate()


def test_a_browser_shows_every_item_and_runs_no_text(made: Path, tmp_path: Path, browser: Browser) -> None:
    report(made, tmp_path / "look.html")
    browser.open(tmp_path / "look.html")
    assert browser.ids() == [row["id"] for row in ROWS]
    assert browser.run("return document.title").endswith("out: kimik3-prep")
    assert browser.run("return document.querySelectorAll('main script, main b').length") == 0
    captions = browser.run("return [...document.querySelectorAll('.caption')].map(e => e.textContent)")
    assert captions[:2] == [HOSTILE[1], "<b>\\u202egnp.exe\\u2028"]
    loaded = "return [...document.images].filter(i => i.complete && i.naturalWidth > 0).length"
    assert browser.run(loaded) == 4
    assert [message for message in browser.messages() if message["level"] == "SEVERE"] == []


def test_a_browser_filters_sorts_and_marks(made: Path, tmp_path: Path, browser: Browser) -> None:
    report(made, tmp_path / "look.html")
    browser.open(tmp_path / "look.html")
    browser.choose("error", "not_found")
    assert browser.ids() == ["gone"]
    browser.choose("error", "without errors")
    browser.choose("sort", "tokens")
    assert browser.ids()[-1] == "strip"
    browser.run("document.getElementById('reverse').click()")
    assert browser.ids()[0] == "strip"
    browser.choose("mode", "L")
    assert browser.ids() == [HOSTILE[1]]
    browser.choose("mode", "any")
    browser.choose("search", "LONG STRIP")
    assert browser.ids() == ["strip"]
    browser.choose("search", "")
    assert browser.run("return document.querySelectorAll('.lines').length") == 0
    browser.run("document.getElementById('grid').click()")
    assert browser.run("return document.querySelectorAll('.lines').length") == 4
    width, height = browser.run(
        "const f = [...document.querySelectorAll('.card')].find(e => e.querySelector('.id').textContent === 'again')"
        ".querySelector('.frame'); return [f.offsetWidth, f.offsetHeight]"
    )
    assert (width, height) == (56 * 3, 84 * 3)  # the padding is there now


def test_a_browser_turns_pages(tmp_path: Path, browser: Browser) -> None:
    picture(28, 28).save(tmp_path / "a.png")
    rows = [{"id": str(number), "image": "a.png"} for number in range(150)]
    encode(write_manifest(tmp_path / "m.jsonl", rows), tmp_path / "out", dtype="uint8")
    report(tmp_path / "out", tmp_path / "look.html")
    browser.open(tmp_path / "look.html")
    seen: list[str] = []
    for page in (1, 2, 3):
        assert browser.run("return document.getElementById('page').textContent") == f"page {page} of 3"
        seen += browser.ids()
        browser.run("document.getElementById('on').click()")
    assert seen == [str(number) for number in range(150)]
