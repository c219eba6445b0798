"""A worker process: it does the tasks it is sent, one at a time, and says on a board which one it has in hand.

The process that started it, the driver, may end it at any moment: with a signal, because a task takes too long, or by
dying itself. Nothing here needs to end cleanly.

    driver -> worker    a chunk: (number, call, payloads); `call` is pickled, it does one payload after the other
    worker -> driver    (number, position of the first answer, answers), as soon as some are there and at a chunk's end
    board               one slot a worker, in shared memory: chunk, position and start of the task in hand
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Protocol

from kimik3_prep.errors import ItemError, PrepError
from kimik3_prep.run import spool

#: A slot of the board: the chunk, the position in it, and when that task began (monotonic seconds; 0 between tasks).
SLOT = struct.Struct("<QQd")

#: The board's slots stand this far apart, so that two workers never write into one cache line.
SLOT_BYTES = 64

_REPORT_EVERY = 0.05  # seconds after which answers are sent though the chunk has more tasks
_FETCHES = 16  # requests that one worker has under way at a time
_FETCHED_AHEAD = 32  # tasks whose bytes may be fetched before their turn
_FETCHED_BYTES = 64 << 20  # the most that fetched bytes, waiting for their turn, are meant to take
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class Call(Protocol):
    """What a chunk's payloads are given to, one by one. It travels pickled."""

    def __call__(self, payload: Any, encoded: Any) -> Any:
        """Do one task. Raises ItemError for a fault of the item; any other PrepError ends the run."""

    def fetch(self, payload: Any) -> Any:
        """A function that gets the payload's bytes from a slow place, or None where reading them is quick."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error that is not the item's: one of ours as it is, any other as text."""

    error: PrepError | None
    traceback: str = ""


@dataclass(slots=True)
class _Chunk:
    number: int
    call: Call
    payloads: list[Any]
    fetched: dict[int, Future[Any]] = field(default_factory=dict)


def main(connection: int, board: int, spooled: int, slot: int, slots: int, parent: int) -> None:
    """Work until the driver, process `parent`, is gone. Connection, board and spool are inherited descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends its workers itself
    _die_with(parent)
    size = spool.ROOM // slots
    spool.mine = spool.Region(spooled, slot * size, size)
    with mmap.mmap(board, 0) as shared, Connection(connection) as driver:
        try:
            _Worker(driver, shared, slot * SLOT_BYTES).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the driver is gone, and nobody waits for an answer
        finally:
            os._exit(0)  # fetching threads may hang in a request


def _die_with(parent: int) -> None:
    """Have the kernel end this process when the driver dies, whatever a decoder is doing then. Linux only.

    Elsewhere the worker ends when it next reads from its connection.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


class _Worker:
    """The loop of a worker, and the chunks that it has been sent."""

    def __init__(self, driver: Connection, board: mmap.mmap, slot: int) -> None:
        self._driver = driver
        self._board = board
        self._slot = slot
        self._chunks: deque[_Chunk] = deque()
        self._calls: OrderedDict[bytes, Call] = OrderedDict()
        self._fetching: ThreadPoolExecutor | None = None

    def run(self) -> None:
        """Do chunk after chunk. Raises EOFError once the driver is gone."""
        while True:
            while not self._chunks or self._driver.poll():
                self._receive()
            self._do(self._chunks[0])
            self._chunks.popleft()

    def _receive(self) -> None:
        number, call, payloads = pickle.loads(self._driver.recv_bytes())
        if call not in self._calls:
            self._calls[call] = pickle.loads(call)
            if len(self._calls) > 16:
                self._calls.popitem(last=False)
        self._chunks.append(_Chunk(number, self._calls[call], payloads))

    def _do(self, chunk: _Chunk) -> None:
        answers: list[Any] = []
        first, spoke = 0, time.monotonic()
        for position, payload in enumerate(chunk.payloads):
            self._fetch_ahead(position)
            now = time.monotonic()
            if answers and now - spoke > _REPORT_EVERY:
                self._driver.send_bytes(pickle.dumps((chunk.number, first, answers)))
                answers, first, spoke = [], position, now
            SLOT.pack_into(self._board, self._slot, chunk.number, position, now)
            answers.append(_answer(chunk, position, payload))
            SLOT.pack_into(self._board, self._slot, chunk.number, position, 0.0)
        self._driver.send_bytes(pickle.dumps((chunk.number, first, answers)))

    def _fetch_ahead(self, position: int) -> None:
        """Begin to fetch what the next tasks need from slow places, also those of the next chunk."""
        if not self._chunks[0].fetched and self._chunks[0].call.fetch(self._chunks[0].payloads[position]) is None:
            return
        while self._driver.poll():
            self._receive()
        begun = held = 0
        for chunk, number in _upcoming(self._chunks, position):
            if begun >= _FETCHED_AHEAD or held > _FETCHED_BYTES:
                return
            begun += 1
            future = chunk.fetched.get(number)
            if future is not None:
                held += len(future.result().content) if future.done() and future.exception() is None else 0
                continue
            fetch = chunk.call.fetch(chunk.payloads[number])
            if fetch is not None:
                self._fetching = self._fetching or ThreadPoolExecutor(_FETCHES, "fetch")
                chunk.fetched[number] = self._fetching.submit(fetch)


def _upcoming(chunks: deque[_Chunk], position: int) -> Any:
    """Tasks in the order of their turns, from `position` of the first chunk on: `(chunk, position)`."""
    firsts = itertools.chain([position], itertools.repeat(0))
    return ((chunk, number) for chunk, first in zip(chunks, firsts) for number in range(first, len(chunk.payloads)))  # noqa: B905


def _answer(chunk: _Chunk, position: int, payload: Any) -> Any:
    try:
        future = chunk.fetched.pop(position, None)
        encoded = None if future is None else future.result()
        return chunk.call(payload, encoded)
    except ItemError as error:
        return error
    except PrepError as error:
        return Fault(error)
    except Exception:  # noqa: BLE001  a fault of ours: the driver reports it
        return Fault(None, traceback.format_exc())
