"""The campaign: kills and hostile inputs, every figure in a table. `scripts/torture --help` says what can be chosen."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from torture_inputs import attacks
from torture_pool import Tally, attack

#: Shares of the time for inputs.
_SHARES = {"image": 6, "worker": 3, "features": 1, "config": 2, "manifest": 3, "flip": 3, "flip-index-only": 1, "run": 4, "run-index-only": 1}


def main() -> None:
    """Run the campaign; ends with 1 where it found a fault."""
    options = _options()
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=parent))
    kinds = [kind for kind in attacks(folder) if not options.only or kind.name in options.only]
    total = sum(_SHARES[kind.name] for kind in kinds)
    tallies: dict[str, Tally] = {}
    try:
        for kind in kinds:
            seconds = options.minutes * 60 * _SHARES[kind.name] / total
            tallies[kind.name] = attack(kind, folder / "work", seconds, options.jobs, options.seed, options.most)
            _print(kind.name, tallies[kind.name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    faults = sum(len(tally.faults) for tally in tallies.values())
    print(f"{sum(tally.attacks for tally in tallies.values()):,} inputs, {faults:,} faults")
    sys.exit(1 if faults else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help="these attacks")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**9 * 1000, help="the first seed")
    parser.add_argument("--most", type=int, help="so many seeds of each attack; 1 repeats a fault")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.hours:
        options.minutes = 60 * options.hours
    return options


def _print(name: str, tally: Tally) -> None:
    outcomes = ", ".join(f"{word} {count:,}" for word, count in tally.outcomes.most_common())
    print(f"{name:16} {tally.attacks:9,} in {tally.seconds:6.0f} s; slowest {tally.slowest:6.2f} s, +{tally.bytes >> 20} MiB; {outcomes}", flush=True)
    shown: dict[str, int] = {}
    for seed, what in tally.faults:
        key = "".join(letter for letter in what if not letter.isdigit())[:60]
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= 3:
            print(f"    FAULT --only {name} --seed {seed} --most 1: {what}", flush=True)
    for key, count in shown.items():
        if count > 3:
            print(f"    … {count} like {key!r}")


if __name__ == "__main__":
    main()
