"""Image threads whose tasks end in time or are left behind.

Pillow's decoders run in C and cannot be interrupted, and a read over a network may never return. A task that is longer
in there than the limit is given up: its future fails, another thread takes the place of its own, and whatever it may
still bring is thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from kimik3_prep.errors import ItemError

DEFAULT_ITEM_TIMEOUT = 300.0  # seconds; far above what the largest allowed image takes to decode

_HURRY = 2.0  # seconds that a task gets which may hang, once the run was stopped


class Stopped(Exception):
    """Raised inside a job that was asked to stop; its shard stays uncommitted."""


class GivenUp(Exception):
    """Raised inside a task that was given up, so that it writes nothing any more. Nobody sees it."""


@dataclass(slots=True, eq=False)
class _Task:
    future: Future[Any]
    call: Callable[[], Any]
    begun: float | None = None  # when it went into its limited part; None outside of it
    lost: Callable[[], object] | None = None  # called when it is given up there
    given_up: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


_current = threading.local()
_lost: set[threading.Thread] = set()


def left_behind() -> bool:
    """Whether a thread that was given up is still at work: the interpreter cannot be taken down around it."""
    return any(thread.is_alive() for thread in _lost)


@contextmanager
def limited(lost: Callable[[], object] | None = None) -> Iterator[None]:
    """The part of a task that may hang: the time limit holds inside, and only there. It means nothing elsewhere.

    Leaving it raises GivenUp in a task that was given up, whatever else was on its way out. `lost` is called, from
    another thread, when it is given up: what the task holds must not be lost with it.
    """
    task: _Task | None = getattr(_current, "task", None)
    if task is None:
        yield
        return
    task.lost = lost
    task.begun = time.monotonic()
    try:
        yield
    finally:
        with task.lock:
            task.begun = None
            if task.given_up:
                raise GivenUp


class ImageThreads(Executor):
    """`workers` threads, and a time limit of `seconds` for what a task does inside `limited`.

    The future of a task that takes longer gets ItemError("timed_out"). Once `stop` is set, two seconds are the limit,
    and the future gets Stopped: a run that ends waits for no decoder, and blames no image for it. `prepare` runs first
    in every thread.
    """

    def __init__(
        self,
        workers: int,
        name: str,
        seconds: float,
        stop: threading.Event | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._name, self._seconds, self._prepare = name, seconds, prepare
        self._stop = stop or threading.Event()
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running: dict[threading.Thread, _Task] = {}
        self._threads: set[threading.Thread] = set()
        self._left: list[threading.Thread] = []
        self._closed = False
        self._ended = threading.Event()  # closed, and no thread is left
        with self._lock:
            for _ in range(workers):
                self._start()
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)
        self._watcher.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn` on one of the threads. Raises RuntimeError after `shutdown`."""
        if self._closed:
            raise RuntimeError("these threads have been shut down")
        task = _Task(Future(), lambda: fn(*args, **kwargs))
        self._tasks.put(task)
        return task.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once their tasks are done; those left behind are waited for by nobody."""
        if cancel_futures:
            while not self._tasks.empty():
                if (task := self._tasks.get()) is not None:
                    task.future.cancel()
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._tasks.put(None)
        if wait:
            self._ended.wait()
            self._watcher.join()
            for thread in self._left:  # what a thread kept for itself is freed after its last line of Python
                thread.join()

    def _start(self) -> None:
        # A daemon: one that hangs in a decoder must not keep the process from ending.
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _work(self) -> None:
        self._prepare()
        while (task := self._tasks.get()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            with self._lock:
                self._running[threading.current_thread()] = task
            _current.task = task
            try:
                outcome, failed = task.call(), False
            except BaseException as error:  # noqa: BLE001  it belongs to whoever waits for the future
                outcome, failed = error, True
            with self._lock:
                self._running.pop(threading.current_thread(), None)
            if task.given_up:
                return  # another thread has taken this one's place
            (task.future.set_exception if failed else task.future.set_result)(outcome)
            del task, outcome, _current.task
        self._leave(threading.current_thread())

    def _leave(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.discard(thread)
            self._left.append(thread)
            if self._closed and not self._threads:
                self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(0.5, self._seconds / 4)):
            seconds = min(self._seconds, _HURRY) if self._stop.is_set() else self._seconds
            with self._lock:
                running = list(self._running.items())
            for thread, task in running:
                with task.lock:
                    taken = 0.0 if task.begun is None or task.given_up else time.monotonic() - task.begun
                    if taken <= seconds:
                        continue
                    task.given_up = True
                self._replace(thread, task, taken)

    def _replace(self, thread: threading.Thread, task: _Task, taken: float) -> None:
        if task.lost is not None:
            task.lost()
        late = ItemError("timed_out", f"not done after {self._seconds:g} seconds (--item-timeout)")
        task.future.set_exception(late if taken > self._seconds else Stopped())
        with self._lock:
            self._running.pop(thread, None)
            self._threads.discard(thread)
            _lost.add(thread)
            self._start()
