"""What reading a source found: problems, warnings, and what was passed over, each with its place and its number."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kimik3_prep.errors import InputError, Problem

#: Problems kept for the report; the rest are only counted.
MAX_PROBLEMS = 1000
_MAX_WARNINGS = 100
_NAMED = 5


@dataclass(frozen=True, slots=True)
class PassedOver:
    """What a source holds that became no item, of one kind."""

    kind: str
    """What it is: `rows without an image`, `.heic files`."""
    count: int
    """How many there are."""
    names: tuple[str, ...]
    """The first ones, as people find them again: `rows.jsonl:7`, `2024/a.heic`."""


class Report:
    """Collects what is wrong with a source, and what is left out of it. Keeps the first ones, counts all."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.total = 0
        self.warnings: list[Problem] = []
        self._more_warnings = 0
        self._passed_over: dict[str, tuple[int, list[str]]] = {}

    @property
    def full(self) -> bool:
        """Whether further problems are only counted."""
        return len(self.problems) == MAX_PROBLEMS

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """What became no item, kind by kind."""
        return tuple(PassedOver(kind, count, tuple(names)) for kind, (count, names) in self._passed_over.items())

    def add(self, where: str, what: str, expected: str = "", hint: str = "") -> None:
        """Note a problem in the words of `Problem`'s fields."""
        self.add_problem(Problem(where, what, expected, hint))

    def add_problem(self, problem: Problem) -> None:
        """Note a problem; past the first `MAX_PROBLEMS` it is only counted."""
        self.total += 1
        if not self.full:
            self.problems.append(problem)

    def add_first(self, problem: Problem) -> None:
        """Note a problem that explains the others: it is kept however many there are."""
        self.total += 1
        self.problems = [problem, *self.problems[: MAX_PROBLEMS - 1]]

    def warn(self, where: str, what: str, hint: str = "") -> None:
        """Note what a person should know, although nothing stops at it."""
        if len(self.warnings) < _MAX_WARNINGS:
            self.warnings.append(Problem(where, what, hint=hint, severity="warning"))
        else:
            self._more_warnings += 1

    def warn_once(self, where: str, what: str) -> None:
        """Note what is so for many rows, the first time."""
        if not any(known.where == where and known.what == what for known in self.warnings):
            self.warn(where, what)

    def all_warnings(self, name: str) -> tuple[Problem, ...]:
        """The warnings, and a last one that counts those that were not kept."""
        if not self._more_warnings:
            return tuple(self.warnings)
        more = Problem(name, f"{self._more_warnings:,} more warnings like these", severity="warning")
        return (*self.warnings, more)

    def pass_over(self, kind: str, name: str, count: int = 1) -> None:
        """Count what becomes no item."""
        before, names = self._passed_over.get(kind, (0, []))
        if len(names) < _NAMED:
            names.append(name)
        self._passed_over[kind] = (before + count, names)

    def raise_problems(self) -> None:
        """Raise InputError with all problems, if there are any."""
        if self.total:
            raise InputError(self.problems, self.total)


def show(value: Any) -> str:
    """A value as JSON on one line, cut where it gets long."""
    text = json.dumps(value, ensure_ascii=True, default=str)
    return text if len(text) <= 80 else f"{text[:70]}…"


def kind(value: Any) -> str:
    """What a JSON value that is no object is called."""
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")
