"""Attackers: forked processes that try one seed after the other, watched for hangs, crashes and memory.

An attack runs in a process that may die of it. Its parent sees in shared memory which seed is in hand since when, kills
the process that takes too long, and starts another one behind that seed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import shutil
import signal
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

#: Shared memory of an attacker: seed in hand, when it began, the longest attack, seconds; most bytes so far.
_SLOT = struct.Struct("<q d d q")
_LOOK = 0.05  # seconds between two looks at the attackers
_TOLD_EVERY = 200  # attacks whose outcomes are told at once


class Fault(Exception):
    """An attack has found something that must not be."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of attack."""

    name: str

    run: Callable[[int, Path], str]
    """Attack with a seed, in a folder of the attacker's own. Returns the outcome in a word; raises what is a fault."""

    seconds: float = 20.0
    """An attack that takes longer is a hang."""

    bytes: int = 700 << 20
    """Most memory above what the attacker had when it began."""


@dataclass(slots=True)
class Tally:
    """What a kind of attack came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, str]] = field(default_factory=list)
    """Seed and sentence."""
    slowest: float = 0.0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def attacks(self) -> int:
        """How many attacks ended, in a fault or not."""
        return self.outcomes.total() + len(self.faults)


@dataclass(slots=True)
class _Attacker:
    pid: int
    slot: mmap.mmap
    outcomes: int
    """Descriptor that outcomes and faults come from, as lines of JSON."""
    folder: Path
    number: int
    rest: bytes = b""


def attack(
    kind: Attack, folder: Path, seconds: float, attackers: int, first_seed: int = 0, most: int | None = None
) -> Tally:
    """Try seeds from `first_seed` on, for so many seconds or `most` attacks, with so many processes at a time."""
    tally, began = Tally(), time.monotonic()
    end = began + seconds
    last = None if most is None else first_seed + most
    running = [_start(kind, folder, number, first_seed + number, attackers, end, last) for number in range(attackers)]
    while running:
        time.sleep(_LOOK)
        for attacker in list(running):
            _listen(attacker, tally)
            seed, since, slowest, peak = _SLOT.unpack(attacker.slot[: _SLOT.size])
            tally.slowest, tally.bytes = max(tally.slowest, slowest), max(tally.bytes, peak)
            hangs = since and time.monotonic() - since > kind.seconds
            if hangs:
                os.kill(attacker.pid, signal.SIGKILL)
            pid, status = os.waitpid(attacker.pid, 0 if hangs else os.WNOHANG)
            if not pid:
                continue
            _listen(attacker, tally)
            os.close(attacker.outcomes)
            running.remove(attacker)
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                continue
            what = f"hangs: not done after {kind.seconds:g} s" if hangs else f"the process ended with {code}"
            tally.faults.append((seed, what))
            if time.monotonic() < end:
                more = (kind, folder, attacker.number, seed + attackers, attackers, end, last)
                running.append(_start(*more))
    tally.seconds = time.monotonic() - began
    return tally


def _start(kind: Attack, folder: Path, number: int, seed: int, step: int, end: float, last: int | None) -> _Attacker:
    slot = mmap.mmap(-1, _SLOT.size)
    read, write = os.pipe()
    own = folder / f"{kind.name}-{number}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        os.close(read)
        code = 99
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # decoders complain there, of every other image
        try:
            _attack_on(kind, own, seed, step, end, last, slot, write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    os.set_blocking(read, False)
    return _Attacker(pid, slot, read, own, number)


def _attack_on(
    kind: Attack, folder: Path, seed: int, step: int, end: float, last: int | None, slot: mmap.mmap, told: int
) -> None:
    """The life of an attacker."""
    before, slowest, outcomes = _peak(), 0.0, Counter[str]()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while time.monotonic() < end and (last is None or seed < last):
        began = time.monotonic()
        slot[: _SLOT.size] = _SLOT.pack(seed, began, slowest, _peak() - before)
        try:
            outcomes[kind.run(seed, folder)] += 1
        except Fault as fault:
            _tell(told, {"seed": seed, "fault": str(fault)})
        except Exception as error:  # noqa: BLE001  the very thing that is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
            _tell(told, {"seed": seed, "fault": text})
        slowest = max(slowest, time.monotonic() - began)
        if (grown := _peak() - before) > kind.bytes:
            _tell(told, {"seed": seed, "fault": f"took {grown:,} bytes of memory"})
            before = _peak()
        if outcomes.total() >= _TOLD_EVERY:
            _tell(told, {"outcomes": outcomes})
            outcomes = Counter()
        seed += step
    slot[: _SLOT.size] = _SLOT.pack(seed, 0.0, slowest, _peak() - before)
    _tell(told, {"outcomes": outcomes})


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _tell(descriptor: int, what: object) -> None:
    os.write(descriptor, json.dumps(what).encode() + b"\n")


def _listen(attacker: _Attacker, tally: Tally) -> None:
    with contextlib.suppress(BlockingIOError):
        while part := os.read(attacker.outcomes, 1 << 16):
            attacker.rest += part
    *lines, attacker.rest = attacker.rest.split(b"\n")
    for line in lines:
        told = json.loads(line)
        if "fault" in told:
            tally.faults.append((told["seed"], told["fault"]))
        else:
            tally.outcomes.update(told["outcomes"])
