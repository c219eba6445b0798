"""errors.py: what the errors say, their exit codes, and that they survive the way from a worker process."""

from __future__ import annotations

import pickle
import re
from typing import get_args

import pytest

from kimik3_prep import errors
from kimik3_prep.errors import (
    CannotPrint,
    FailedItem,
    InputError,
    Interrupted,
    ItemError,
    ItemErrorCode,
    PlanMismatch,
    PrepError,
    Problem,
    RunError,
    StoreError,
    TooManyFailures,
)

ONE = Problem("m.jsonl:3", 'backend is "cuda"', '"gpu" or "cpu"', 'was "gpu" meant?')
TWO = Problem("m.jsonl:5", "the row names no image")


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (ONE, 'm.jsonl:3: backend is "cuda"; expected "gpu" or "cpu" (was "gpu" meant?)'),
        (TWO, "m.jsonl:5: the row names no image"),
        (Problem("f", "w", hint="h"), "f: w (h)"),
        (Problem("f", "w", "e", severity="warning"), "f: w; expected e"),
    ],
)
def test_a_problem_is_one_sentence(problem: Problem, sentence: str) -> None:
    assert str(problem) == sentence


def test_an_input_error_lists_every_problem() -> None:
    assert str(InputError([ONE, TWO])).splitlines() == ["2 problems found before any work:", f"  {ONE}", f"  {TWO}"]
    assert str(InputError(iter([TWO]))).splitlines() == ["1 problem found before any work:", f"  {TWO}"]


def test_problems_that_were_only_counted_are_told() -> None:
    error = InputError([ONE, TWO], 12345)
    assert (error.problems, error.total) == ((ONE, TWO), 12345)
    lines = str(error).splitlines()
    assert (lines[0], lines[-1]) == ("12,345 problems found before any work:", "  … and 12,343 more")
    assert InputError([ONE, TWO]).total == 2


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (PrepError("x"), 3),
        (InputError([ONE]), 2),
        (PlanMismatch([ONE]), 2),
        (RunError("the disk is full"), 3),
        (TooManyFailures(3, 2, None), 3),
        (CannotPrint("disk full"), 3),
        (Interrupted(130), 130),
        (Interrupted(143), 143),
        (ItemError("truncated", "the data ends early"), 3),
        (FailedItem("truncated", "the data ends early", "a", 7), 3),
        (StoreError("the shard is gone"), 3),
    ],
)
def test_exit_codes_and_pickling(error: PrepError, exit_code: int) -> None:
    assert error.exit_code == exit_code
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_pickling_keeps_the_count() -> None:
    again = pickle.loads(pickle.dumps(PlanMismatch([ONE, TWO], 500)))
    assert (type(again), again.problems, again.total) == (PlanMismatch, (ONE, TWO), 500)


def test_an_item_error_has_a_code_and_a_sentence() -> None:
    error = ItemError("not_found", "there is no such file")
    assert (error.code, error.message, str(error)) == (
        *("not_found", "there is no such file"),
        "not_found: there is no such file",
    )
    codes = get_args(ItemErrorCode)
    assert len(codes) == len(set(codes))
    assert all(code == code.lower() and code.replace("_", "").isalpha() for code in codes)


def test_the_hierarchy_is_the_one_the_docstring_draws() -> None:
    drawn: dict[str, str] = {}
    path = ["Exception"]
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+)  ", line):
            depth = len(match[1]) // 4 + 1
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1]
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert drawn == {name: value.__base__.__name__ for name, value in classes.items() if issubclass(value, Exception)}
