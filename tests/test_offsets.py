"""offsets.py: a file that is read by offset moves and reads as any other."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st

from kimik3_prep.offsets import OffsetFile

DATA = bytes(range(50))


class Bytes(OffsetFile):
    """The bytes of DATA by offset."""

    def size(self) -> int:
        return len(DATA)

    def _read(self, place: int, count: int) -> bytes:
        return DATA[place : place + count]


STEP = st.tuples(st.just("read"), st.integers(0, 60)) | st.tuples(st.sampled_from([0, 1, 2]), st.integers(0, 60))


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=12))
def test_it_moves_and_reads_as_a_file_in_memory_does(steps: list[tuple[object, int]]) -> None:
    file, other = Bytes(), io.BytesIO(DATA)
    assert file.readable()
    assert file.seekable()
    for step, number in steps:
        if step == "read":
            assert file.read(number) == other.read(number)
        else:
            assert file.seek(number, int(str(step))) == other.seek(number, int(str(step)))
        assert file.tell() == other.tell()


def test_nobody_moves_before_the_start() -> None:
    assert Bytes().seek(-3, io.SEEK_CUR) == 0
