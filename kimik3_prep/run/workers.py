"""The worker processes of this machine: tasks out, answers back, and blame for whatever hangs or crashes.

Images are opened in worker processes only: Pillow and numpy hold the interpreter lock for small pictures, a decoder
that hangs cannot be interrupted, and one that crashes takes its process along.

    a task takes longer than the time limit    its worker is killed; the answer is ItemError("timed_out")
    a worker dies                              the task in hand is tried again with nothing beside it; when its worker
                                               dies again, the answer is ItemError("decoder_crashed" or "out_of_memory")
    the driver dies                            the kernel kills the workers
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kimik3_prep.disk import disk_errors
from kimik3_prep.errors import ItemError, WorkersDoNotStart
from kimik3_prep.run.spool import Kept
from kimik3_prep.run.worker import SLOT, SLOT_BYTES, Fault

#: A chunk ends after so many tasks, or so many pixels.
MOST_TASKS, MOST_WEIGHT = 64, 1_000_000

_QUEUED = 2  # chunks that a worker has: the one in hand, and the next
_QUEUED_SLOW = 16  # of tasks that wait for a slow place, so that their bytes can be fetched ahead
_SENT_TO_THE_BUSY = 64 << 10  # bytes of the largest chunk for a worker that may not be reading: a socket holds more
_LOOK = 0.25  # seconds between two looks at the clock of every task in hand
_FUTILE_ENDS = 5  # workers that may end in a row without an answer and without a task in hand
_SOCKET_BUFFER = 256 << 10  # bytes, where the system's own buffer is smaller


class WorkerFault(RuntimeError):
    """An error in a worker that this package did not foresee, with the worker's traceback."""


@dataclass(slots=True, eq=False)
class Task:
    """One thing to do for a worker."""

    call: bytes
    """A pickled `worker.Call`, the same object for all tasks of one kind."""

    payload: Any
    """What it is called with."""

    need: int = 0
    """Bytes of memory that it takes at most while it is done."""

    weight: int = 0
    """About the pixels that it decodes."""

    slow: bool = False
    """It has to wait for a slow place, so a worker should know of it early."""

    tag: Any = None
    """For whoever takes the answer; it stays here."""
    crashes: int = 0


Answer = tuple[Task, Any]


@dataclass(slots=True, eq=False)
class _Chunk:
    number: int
    tasks: list[Task]
    need: int
    answered: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    slot: int
    chunks: deque[_Chunk] = field(default_factory=deque)
    late: tuple[int, int] | None = None
    """Chunk and position of the task that took too long, once the worker was killed for it."""

    @property
    def need(self) -> int:
        """Bytes that its largest task may take; it does one at a time."""
        return max((chunk.need for chunk in self.chunks), default=0)


class Workers:
    """Up to `count` worker processes, started as there is work and ended on the way out of the `with` block.

    item_timeout: seconds that a task may take. memory: bytes that tasks under way may take together; a task that needs
    more than all of it is done with nothing beside it.
    """

    def __init__(self, count: int, item_timeout: float, memory: int) -> None:
        self.count = count
        self.memory = memory
        self._item_timeout = item_timeout
        self._workers: list[_Worker] = []
        self._waiting: deque[Task] = deque()  # come before all tasks that nobody has pulled yet
        self._alone: deque[Task] = deque()
        self._source: Iterator[Task] = iter(())
        self.kept: dict[str, Kept] = {}  # files in the spool, by the name that the manifest gives them
        self._closing = ExitStack()
        self._next_number = 0
        self._trying_alone = False
        self._slow = False  # the last task that was pulled waits for a slow place, and so may the next
        self._futile_ends = 0  # workers in a row that ended without an answer and without a task in hand
        self._looked = 0.0

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._closing.close()

    def stop(self) -> None:
        """End all workers; new ones start when there is work."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.connection.close()
        self._workers.clear()

    @cached_property
    def _board(self) -> mmap.mmap:
        """The slots in which workers say what they have in hand; `_board_file` is the same for them."""
        return self._closing.enter_context(mmap.mmap(self._board_file.fileno(), 0))

    @cached_property
    def _board_file(self) -> IO[bytes]:
        file = self._temporary_file()
        with disk_errors(Path(tempfile.gettempdir(), "board")):
            file.truncate(max(mmap.PAGESIZE, self.count * SLOT_BYTES))
        return file

    @cached_property
    def _messages(self) -> IO[bytes]:
        """What libraries print in the workers."""
        return self._temporary_file()

    @cached_property
    def _spool(self) -> IO[bytes]:
        """Files from slow places; see spool.py."""
        return self._temporary_file()

    @cached_property
    def shared(self) -> SharedMemory:
        """What workers decode for a device lies here."""
        memory = SharedMemory()
        self._closing.callback(memory.close)
        return memory

    def _temporary_file(self) -> IO[bytes]:
        """A file without a name, open as long as the workers may run."""
        with disk_errors(Path(tempfile.gettempdir(), "worker")):
            return self._closing.enter_context(tempfile.TemporaryFile())

    def start(self, count: int = 1) -> None:
        """Start workers until there are `count`; they get ready while the driver does something else."""
        free = sorted(set(range(self.count)) - {worker.slot for worker in self._workers})
        for slot in free[: max(0, count - len(self._workers))]:
            self._workers.append(self._started(slot))

    def run(self, tasks: Iterable[Task]) -> Generator[Answer, None, None]:
        """Do all tasks, pulling them as workers have room, and yield `(task, answer)` in the order of the answers.

        An answer is what the call returned, or an ItemError. Raises the PrepError that a task ended with, WorkerFault
        for any other error in a worker, and WorkersDoNotStart. Leaving early ends the workers that have tasks.
        """
        self._source = iter(tasks)
        try:
            while True:
                self._hand_out()
                if not any(worker.chunks for worker in self._workers):
                    return
                for connection in wait([worker.connection for worker in self._workers], self._patience()):
                    worker = next(each for each in self._workers if each.connection is connection)
                    yield from self._receive(worker)
                self._end_late_tasks()
        finally:
            self._source = iter(())
            self._waiting.clear()
            self._alone.clear()
            for worker in [worker for worker in self._workers if worker.chunks]:
                worker.process.kill()
                self._remove(worker)

    # --- handing out ----------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give every worker that has room its next chunk: first to the idle ones, then to new ones, then to all."""
        for most in range(1, _QUEUED_SLOW + 1):
            if most > _QUEUED and not self._slow:
                return
            for worker in self._workers:
                if len(worker.chunks) < most and not self._send_chunk(worker):
                    return
            while len(self._workers) < self.count and self._waits_for_a_worker():
                self.start(len(self._workers) + 1)
                self._send_chunk(self._workers[-1])

    def _waits_for_a_worker(self) -> bool:
        """Whether there is a task that one more worker could begin with now."""
        busy = any(worker.chunks for worker in self._workers)
        if self._alone:
            return not busy
        task = self._pull()
        if task is None:
            return False
        self._waiting.appendleft(task)
        return not busy or sum(worker.need for worker in self._workers) + task.need <= self.memory

    def _send_chunk(self, worker: _Worker) -> bool:
        """Send a worker its next chunk. Return False when there is none, or none that may go out now."""
        busy = any(each.chunks for each in self._workers)
        if busy and (self._alone or self._trying_alone):
            return False
        self._trying_alone = bool(self._alone)
        tasks = [self._alone.popleft()] if self._alone else self._next_tasks(worker, busy)
        if not tasks:
            return False
        chunk = _Chunk(self._next_number, tasks, max(task.need for task in tasks))
        message = pickle.dumps((chunk.number, tasks[0].call, [task.payload for task in tasks]))
        if worker.chunks and len(message) > _SENT_TO_THE_BUSY:
            self._waiting.extendleft(reversed(tasks))
            return False
        self._next_number += 1
        worker.chunks.append(chunk)
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it has died: reading from it tells, and all goes out again
            worker.connection.send_bytes(message)
        return True

    def _next_tasks(self, worker: _Worker, busy: bool) -> list[Task]:
        """The tasks of the worker's next chunk, in order, as far as memory allows."""
        others = sum(each.need for each in self._workers if each is not worker)
        tasks: list[Task] = []
        weight = 0
        while len(tasks) < MOST_TASKS and (task := self._pull()) is not None:
            fits = others + max(worker.need, task.need) <= self.memory or not (busy or tasks)
            together = not tasks or (task.call is tasks[0].call and weight < MOST_WEIGHT)
            if not (fits and together):
                self._waiting.appendleft(task)  # later tasks wait behind it, so that a large one gets its turn
                break
            tasks.append(task)
            weight += task.weight
            if task.need > self.memory:
                break
        return tasks

    def _pull(self) -> Task | None:
        task = self._waiting.popleft() if self._waiting else next(self._source, None)
        self._slow = task is not None and task.slow
        return task

    # --- taking in ------------------------------------------------------------------------------------------------

    def _receive(self, worker: _Worker) -> Iterator[Answer]:
        try:
            message = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError, pickle.UnpicklingError):
            yield from self._bury(worker)
            return
        self._futile_ends = 0
        _, first, answers = message
        chunk = worker.chunks[0]
        done = chunk.tasks[first : first + len(answers)]
        chunk.answered = first + len(answers)
        if chunk.answered == len(chunk.tasks):
            worker.chunks.popleft()
        for task, answer in zip(done, answers, strict=True):
            if isinstance(answer, Fault):
                raise answer.error or WorkerFault(answer.traceback)
            yield task, answer

    def _patience(self) -> float:
        """Seconds until the next look at the clocks."""
        return max(0.0, min(_LOOK, self._item_timeout / 4) - (time.monotonic() - self._looked))

    def _end_late_tasks(self) -> None:
        """Kill the workers whose task in hand has taken too long. What they answered before is read afterwards."""
        self._looked = time.monotonic()
        for worker in self._workers:
            number, position, begun = SLOT.unpack_from(self._board, worker.slot * SLOT_BYTES)
            if begun and self._looked - begun > self._item_timeout and worker.late is None:
                worker.late = number, position
                worker.process.kill()

    # --- life and death -------------------------------------------------------------------------------------------

    def _started(self, slot: int) -> _Worker:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        SLOT.pack_into(self._board, slot * SLOT_BYTES, 0, 0, 0.0)
        files = (theirs.fileno(), self._board_file.fileno(), self._spool.fileno())
        arguments = ", ".join(map(str, (*files, slot, self.count, os.getpid())))
        modules = "kimik3_prep.run.item, kimik3_prep.run.worker"  # the first brings all that images need
        code = f"import sys; sys.path[:] = {sys.path!r}; import {modules}; kimik3_prep.run.worker.main({arguments})"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._messages,
                stderr=self._messages,
                pass_fds=(*files, self.shared.descriptor),
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        return _Worker(process, Connection(ours.detach()), slot)

    def _remove(self, worker: _Worker) -> None:
        worker.process.wait()
        worker.connection.close()
        self._workers.remove(worker)

    def _bury(self, worker: _Worker) -> Iterator[Answer]:
        """Replace a worker that has died, blame the task it had in hand, and hand its other tasks out again."""
        number, position, begun = SLOT.unpack_from(self._board, worker.slot * SLOT_BYTES)
        self._remove(worker)
        again: list[Task] = []
        blamed: Task | None = None
        for chunk in worker.chunks:
            for place, task in enumerate(chunk.tasks):
                if place < chunk.answered:
                    continue
                if begun and (chunk.number, place) == (number, position):
                    blamed = task
                else:
                    again.append(task)
        self._waiting.extendleft(reversed(again))
        if blamed is None:
            self._futile_ends += 1
            if self._futile_ends == _FUTILE_ENDS:
                raise WorkersDoNotStart(_how_it_ended(worker.process.returncode), self._last_message())
            return
        if worker.late is not None and worker.late != (number, position):
            self._waiting.appendleft(blamed)  # the late task had ended just before its worker was killed
            return
        blamed.crashes += 1
        if worker.late is not None:
            yield blamed, ItemError("timed_out", f"not done after {self._item_timeout:g} seconds (--item-timeout)")
        elif blamed.crashes == 1:
            self._alone.append(blamed)
        elif worker.process.returncode == -signal.SIGKILL:
            yield blamed, ItemError("out_of_memory", "the system killed the process that decoded it, twice")
        else:
            how = _how_it_ended(worker.process.returncode)
            yield blamed, ItemError("decoder_crashed", f"the process that decoded it ended twice, with {how}")

    def _last_message(self) -> str:
        """The last line that a worker printed."""
        size = self._messages.seek(0, os.SEEK_END)
        self._messages.seek(max(0, size - 1000))
        lines = self._messages.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


class SharedMemory:
    """Memory that workers write decoded pixels into, for the process that holds a device. It grows as it is used."""

    def __init__(self) -> None:
        name = "kimik3-prep pixels"
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create(name)
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._taken: dict[int, int] = {}

    def allocate(self, size: int) -> int:
        """Return where `size` free bytes begin, in the first gap that is large enough."""
        begin = 0
        for taken in sorted(self._taken):
            if taken - begin >= size:
                break
            begin = taken + self._taken[taken]
        self._taken[begin] = max(1, size)
        return begin

    def free(self, begin: int) -> None:
        """Give back what `allocate` gave."""
        del self._taken[begin]

    def read(self, begin: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Return a copy of the uint8 array of that shape which a worker has written at `begin`."""
        pixels = np.empty(shape, np.uint8)
        content = pixels.reshape(-1).data
        while content:
            count = os.preadv(self.descriptor, [content], begin)
            content, begin = content[count:], begin + count
        return pixels

    def close(self) -> None:
        """Give the memory back to the system."""
        os.close(self.descriptor)


def _how_it_ended(returncode: int) -> str:
    """`signal SIGSEGV` or `exit code 3`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"
