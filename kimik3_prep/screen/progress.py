"""How a run is going: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from kimik3_prep.errors import Problem
from kimik3_prep.manifest.report import PassedOver
from kimik3_prep.screen.terminal import err, print_passed_over, print_problem, say, size_text

_EVERY = 5.0  # seconds between lines where there is no terminal
_FOR_A_BAR, _FOR_A_NOTE = 70, 100  # columns of a terminal that has room for them
_HEADERS = "headers"  # the phase that reads sizes and no pixels


class ProgressReporter:
    """Shows a run's progress. Failures are counted over all phases, as the summary counts them."""

    def __init__(self, show: bool) -> None:
        self.warnings: list[Problem] = []
        self.passed_over: tuple[PassedOver, ...] = ()
        self._show = show
        self._lock = threading.Lock()
        # Not rich's `is_terminal`: FORCE_COLOR asks for colours, and a moving bar would fill a log.
        self._bar = _bar() if show and err.file.isatty() and not err.is_dumb_terminal else None
        self._name, self._total, self._began, self._spoke = "", 0, 0.0, 0.0
        self._images = self._pixels = self._size = self._failed = 0

    def __enter__(self) -> ProgressReporter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close_phase()
        if self._bar is not None:
            self._bar.stop()

    def warn(self, problem: Problem) -> None:
        """Print a warning, and keep it for the JSON output."""
        self.warnings.append(problem)
        print_problem(problem)

    def pass_over(self, kinds: tuple[PassedOver, ...]) -> None:
        """Print what a source holds that became no item, and keep it for the JSON output."""
        self.passed_over += kinds
        print_passed_over(kinds)

    def phase(self, name: str, total: int) -> None:
        """Begin a stage of `total` images."""
        self._close_phase()
        self._name, self._total = name, total
        self._began = self._spoke = time.monotonic()
        self._images = self._pixels = self._size = 0
        if self._bar is not None:
            self._task = self._bar.add_task(name, total=total, note="")

    def advance(self, images: int, pixels: int, size: int, failed: int) -> None:
        """Count images that are done: their source pixels, their stored bytes, how many failed."""
        with self._lock:
            self._images += images
            self._pixels += pixels
            self._size += size
            self._failed += failed
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._task, advance=images, note=self._note(now))
            elif self._show and now - self._spoke >= _EVERY:
                self._spoke = now
                say(err, self._line(now))

    def _close_phase(self) -> None:
        if self._name and self._bar is None and self._show and self._images:
            say(err, self._line(time.monotonic()))
        self._name = ""

    def _note(self, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        images = self._name == _HEADERS
        rate = (
            f"{self._images / seconds:,.0f} images/s" if images else f"{self._pixels / 1e6 / seconds:,.1f} megapixels/s"
        )
        written = f", {size_text(self._size)}" if self._size else ""
        failed = f", {self._failed:,} failed" if self._failed else ""
        return f"{rate}{written}{failed}"

    def _line(self, now: float) -> str:
        left = ""
        if 0 < self._images < self._total:
            seconds = (self._total - self._images) * (now - self._began) / self._images
            left = f", about {timedelta(seconds=int(seconds))} left"
        share = 100 * self._images // max(1, self._total)
        return f"{self._name}: {self._images:,} of {self._total:,} ({share} %), {self._note(now)}{left}"


def _bar() -> Progress:
    """Return a bar whose count, share and time left fit into 40 columns; wider terminals show more."""

    def text(pattern: str) -> TextColumn:
        return TextColumn(pattern, markup=False, table_column=Column(no_wrap=True))

    bar: list[ProgressColumn] = [BarColumn(bar_width=20)] if err.width >= _FOR_A_BAR else []
    note = [text("{task.fields[note]}")] if err.width >= _FOR_A_NOTE else []
    share = text("{task.percentage:.0f} %")
    left = TimeRemainingColumn(compact=True)
    return Progress(text("{task.description}"), *bar, MofNCompleteColumn(), share, *note, left, console=err)
