"""tables.py: images that lie in a Parquet file, read cell by cell."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import Silent, picture, png_bytes, write_manifest
from pyarrow import parquet
from stores import Store

from kimik3_prep.errors import InputError, ItemError
from kimik3_prep.images import cell as cells
from kimik3_prep.images.address import TableCell, resolve
from kimik3_prep.images.decode import decode
from kimik3_prep.images.source import read_whole
from kimik3_prep.manifest import columns as tables
from kimik3_prep.manifest.read import read_manifest
from kimik3_prep.output.folder import Output
from kimik3_prep.reading.verify import Comparison, verify
from kimik3_prep.run.check import Settings
from kimik3_prep.run.prepare import prepare


def png(seed: int = 0) -> bytes:
    buffer = io.BytesIO()
    picture(100 + seed, 90, seed=seed).save(buffer, "PNG")
    return buffer.getvalue()


def saved(path: Path, rows: list[dict[str, Any]], **more: Any) -> str:
    parquet.write_table(pa.Table.from_pylist(rows), path, **more)
    return str(path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_run_from_a_table_is_the_run_from_a_folder(tmp_path: Path, s3: Store, nested: bool) -> None:
    contents = [*map(png, range(7)), png(8)[:2000]]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.png").write_bytes(content)
    write_manifest(tmp_path / "m.jsonl", [{"id": str(n), "image": f"{n}.png", "word": "w"} for n in range(8)])
    stored = [{"bytes": c, "path": f"{n}.png"} if nested else c for n, c in enumerate(contents)]
    listed = [{"id": n, "image": image, "word": "w"} for n, image in enumerate(stored)]
    saved(tmp_path / "t-0.parquet", listed[:5], row_group_size=2)
    saved(tmp_path / "t-1.parquet", listed[5:], row_group_size=2)
    for number in (0, 1):
        s3.put(f"t-{number}.parquet", (tmp_path / f"t-{number}.parquet").read_bytes())

    def outcome(manifest: str, name: str) -> Any:
        more: dict[str, Any] = {"config": "kimi-k3", "backend": "cpu", "dtype": "uint8", "shard_size": 80_000}
        prepare(Settings(manifest, tmp_path / name, workers=3, **more), Silent())
        index = Output(tmp_path / name).read_index().drop_columns(["image", "extra"])
        shards = [path.read_bytes() for path in sorted((tmp_path / name / "shards").glob("*.safetensors"))]
        # Behind the header, which names the run.
        return index.to_pylist(), [shard[8 + int.from_bytes(shard[:8], "little") :] for shard in shards]

    expected = outcome(str(tmp_path / "m.jsonl"), "files")
    assert [row["error_code"] for row in expected[0]] == [None] * 7 + ["truncated"]
    pattern = str(tmp_path / "t-*.parquet")
    assert outcome(pattern, "tabled") == expected
    assert outcome("s3://bucket/t-*.parquet", "stored") == expected
    plan = parquet.read_table(tmp_path / "tabled" / "plan.parquet")
    assert plan.nbytes < 20_000, "no pixels in it"
    extra = Output(tmp_path / "tabled").read_index()["extra"].to_pylist()
    assert extra[1] == ('{"word":"w","image_path":"1.png"}' if nested else '{"word":"w"}')
    report = verify(tmp_path / "tabled", Comparison(pattern))
    assert (report.compared, report.problems) == (7, ())


@pytest.mark.parametrize("statistics", [True, False])
def test_rows_without_bytes_are_read_from_their_path(tmp_path: Path, statistics: bool) -> None:
    rows = [{"image": {"bytes": b"x", "path": "a"}}, {"image": {"bytes": None, "path": "b.png"}}]
    path = saved(tmp_path / "m.parquet", [*rows, *rows[1:] * 2], row_group_size=2, write_statistics=statistics)
    with pytest.raises(InputError, match="stands on line 2 already"):
        read_manifest(path)
    path = saved(tmp_path / "m.parquet", rows, write_statistics=statistics)
    assert read_manifest(path).items["image"].to_pylist() == ["m.parquet!parquet:0!image.bytes", "b.png"]
    path = saved(tmp_path / "m.parquet", [*rows, {"image": None}], write_statistics=statistics)
    (passed_over,) = read_manifest(path).passed_over
    assert (passed_over.kind, passed_over.names) == ("rows without an image", (f"{path}:3",))


def test_the_digest_tells_tables_apart(tmp_path: Path) -> None:
    def digest(content: bytes, word: str) -> str:
        rows = [{"image": b"1234", "word": "a"}, {"image": content, "word": word}, {"image": b"1", "word": "z"}]
        return read_manifest(saved(tmp_path / "m.parquet", rows)).digest

    digests = [digest(b"12", "b"), digest(b"123", "b"), digest(b"12", "c")]
    assert len(set(digests)) == 3
    assert digest(b"12", "b") == digests[0]


def test_row_groups_that_no_memory_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_MOST_OF_A_GROUP", 5000)
    path = saved(tmp_path / "m.parquet", [{"image": bytes([n]) * 1000} for n in range(9)], compression="none")
    with pytest.raises(InputError, match=r"row group 0 holds .* bytes of images.*row_group_size"):
        read_manifest(path)


def test_cells_that_are_not_there(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.parquet", [{"image": b"1", "word": "a"}, {"image": None, "word": "b"}])
    assert read_whole(f"{path}!parquet:0!image").content == b"1"
    for place in ("9!image", "0!none", "1!image", "0!word"):
        with pytest.raises(ItemError, match=r"row|column"):
            read_whole(f"{path}!parquet:{place}")
    (tmp_path / "no.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(ItemError, match="corrupt"):
        decode(f"{tmp_path}/no.parquet!parquet:0!image")


def test_a_row_group_is_read_once_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_groups", cells._Kept(2, 0))
    loads: list[int] = []
    real = parquet.ParquetFile.read_row_group

    def counting(self: Any, group: int, **more: Any) -> Any:
        loads.append(group)
        return real(self, group, **more)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counting)
    path = saved(tmp_path / "m.parquet", [{"image": bytes([n])} for n in range(40)], row_group_size=10)
    found: list[bytes] = []

    def read(rows: range) -> None:
        for row in rows:
            with open(path, "rb") as file:
                found.append(cells.read_cell(file, path, TableCell(row, "image")))

    for begin in range(0, 40, 10):
        threads = [threading.Thread(target=read, args=(range(begin + n, begin + 10, 5),)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [bytes([n]) for n in range(40)]
    assert loads == [0, 1, 2, 3]
    assert len(cells._groups._things) == 2


def test_long_texts_are_read_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that repeats is small in the file, and as large as each of its rows in memory."""
    monkeypatch.setattr(tables, "_MOST_AT_A_TIME", 1 << 20)
    sizes: list[int] = []
    real = parquet.ParquetFile.iter_batches

    def counting(self: Any, batch_size: int, **more: Any) -> Any:
        sizes.append(batch_size)
        return real(self, batch_size, **more)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counting)
    rows = [{"image": f"{n}.png", "text": "x" * 100_000} for n in range(50)]
    for values in (pa.Table.from_pylist(rows), pa.Table.from_pylist(rows).combine_chunks()):
        text = values["text"].combine_chunks().dictionary_encode()
        parquet.write_table(values.set_column(1, "text", text), tmp_path / "m.parquet")
        assert read_manifest(str(tmp_path / "m.parquet")).items.num_rows == 50
        assert max(sizes[1:]) <= 16


def test_a_row_group_that_no_memory_holds_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m.parquet", [{"image": bytes([n]) * 1000} for n in range(9)], compression="none")
    monkeypatch.setattr(cells, "_MOST_OF_A_GROUP", 5000)
    with pytest.raises(ItemError, match=r"row group 0 holds .* bytes of images"):
        read_whole(f"{path}!parquet:0!image")


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file], ids=["stream", "file"])
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_no_damage_of_an_arrow_table_is_worse_than_a_sentence(tmp_path: Path, new: Any, flip: int) -> None:
    """Offsets that lead out of the table ended the process, or a text began in front of it."""
    table = pa.table({"id": ["x", "y"], "image": ["a.png", "b.png"], "tags": [["t", "u"], []]})
    sink = io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    content, path = sink.getvalue(), tmp_path / "m.arrow"
    refused = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ flip]) + content[place + 1 :])
        try:
            read_manifest(str(path))
        except InputError:
            refused += 1
    assert refused > len(content) // 20


def test_a_cell_of_a_table_that_was_damaged_since_is_one_failure(tmp_path: Path) -> None:
    table = pa.table({"image": pa.array([png_bytes(30, 20)] * 2, pa.binary())})
    path = tmp_path / "m.arrow"
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)
    content = path.read_bytes()
    image = read_manifest(str(path)).items["image"].to_pylist()[1]
    offset = len(png_bytes(30, 20)).to_bytes(4, "little")
    place = content.index(offset + (2 * len(png_bytes(30, 20))).to_bytes(4, "little"))
    path.write_bytes(content[:place] + (2**31 - 5).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(ItemError):
        read_whole(resolve(image, str(tmp_path)))
