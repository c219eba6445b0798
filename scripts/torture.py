"""The campaign: runs that are killed, and hostile inputs. Every figure comes in a table."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from torture_inputs import attacks
from torture_kills import kills, s3_server
from torture_pool import Attack, Tally, attack

#: Shares of the time.
SHARES = {
    **{"kill-local": 6, "kill-tar": 3, "kill-parquet": 3, "kill-gpu-kernels": 3, "kill-index-only": 2},
    **{"kill-ranges": 4, "kill-retry": 4, "kill-overwrite": 4, "kill-ray": 4, "kill-s3": 5},
    **{"image": 10, "worker": 8, "features": 2, "config": 4, "manifest": 8},
    **{"flip": 8, "flip-index-only": 3, "run": 10, "run-index-only": 3},
}
_SHOWN = 3  # faults of a kind


def main() -> None:
    """Run the campaign; ends with 1 where it found a fault."""
    options = _options()
    parent = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=parent))
    total = sum(share for name, share in SHARES.items() if not options.only or name in options.only)
    tallies: dict[str, Tally] = {}
    try:
        for kind in _kinds(folder, options.only):
            seconds = options.minutes * 60 * SHARES[kind.name] / total
            tallies[kind.name] = attack(kind, folder / "work", seconds, options.jobs, options.seed, options.most)
            _print(kind.name, tallies[kind.name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    killed = sum(tally.outcomes["driver"] + tally.outcomes["worker"] for tally in tallies.values())
    inputs = sum(tally.attacks for name, tally in tallies.items() if not name.startswith("kill-"))
    images = 99 * tallies["worker"].attacks if "worker" in tallies else 0  # a hundred in each of its runs
    faults = sum(len(tally.faults) for tally in tallies.values())
    print(f"{killed:,} kills, {inputs + images:,} hostile inputs, {faults:,} faults")
    sys.exit(1 if faults else 0)


def _kinds(folder: Path, only: list[str]) -> Iterator[Attack]:
    """The attacks that are wanted, kills first: they fork a process that has no threads yet."""

    def wanted(name: str) -> bool:
        return not only or name in only

    with s3_server() if wanted("kill-s3") else contextlib.nullcontext() as store:
        for name in SHARES:
            if name.startswith("kill-") and wanted(name):
                yield from kills(folder, store, lambda other, name=name: other == name)
    if any(wanted(name) for name in SHARES if not name.startswith("kill-")):
        yield from (kind for kind in attacks(folder) if wanted(kind.name))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--hours", type=float)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], help=f"some of {', '.join(SHARES)}")
    parser.add_argument("--seed", type=int, default=int(time.time()) * 1000, help="the first seed")
    parser.add_argument("--most", type=int, help="so many seeds of each attack; 1 repeats a fault")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="attackers at a time")
    options = parser.parse_args()
    if unknown := set(options.only) - SHARES.keys():
        parser.error(f"no attack is called {sorted(unknown)[0]}")
    if options.hours:
        options.minutes = 60 * options.hours
    return options


def _print(name: str, tally: Tally) -> None:
    """One line of the table, and the first faults of each kind with what repeats them."""
    outcomes = ", ".join(f"{word} {count:,}" for word, count in tally.outcomes.most_common())
    most = f"slowest {tally.slowest:6.2f} s, {tally.bytes >> 20:6,} MiB"
    print(f"{name:16} {tally.attacks:9,} in {tally.seconds:6,.0f} s, {most}; {outcomes}")
    shown: dict[str, int] = {}
    for seed, what in tally.faults:
        key = "".join(letter for letter in what if not letter.isdigit())[:60]
        shown[key] = shown.get(key, 0) + 1
        if shown[key] <= _SHOWN:
            print(f"    FAULT --only {name} --seed {seed} --most 1: {what}")
    for key, count in shown.items():
        if count > _SHOWN:
            print(f"    {count - _SHOWN:,} more like {key!r}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
