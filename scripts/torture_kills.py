"""Runs that are killed at random moments, and begun again until they end: every tree is the one of an undisturbed run.

The victim is the command's own process or one of its worker processes. A moment is a time, or the appearance of a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from torture_pool import Attack, Fault

from kimik3_prep.cli import main

_BASE = ("--config", "kimi-k3", "--dtype", "uint8", "--shard-size", "60kB", "--no-progress")
_CPU = ("--backend", "cpu", *_BASE, "-j", "1")
_MOST_RUNS = 4  # after the kill, until the run has ended
_PATIENCE = 60.0  # seconds for one run
_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG

Tree = dict[str, str]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way to run."""

    name: str

    commands: tuple[tuple[str, ...], ...]
    """Begun together; `OUT` stands for the output. One of them is killed."""

    after: tuple[tuple[str, ...], ...] = ()
    """Once all of them have ended."""

    template: tuple[str, ...] = ()
    """Fills the output first, from the images as they were before they were mended."""

    staged: bool = False
    """The output is at a URL."""

    own_process: bool = False
    """The command starts in an interpreter of its own, where a fork of this process would not do."""

    after_commits: bool = False
    """It is killed once it has committed something, and not before."""

    env: Mapping[str, str] = field(default_factory=dict)


def scenarios(store: Mapping[str, str] | None) -> list[Scenario]:
    """Every engine and source. store: the environment of an S3 server; None leaves that out."""
    ranges = tuple(("encode", "m.jsonl", *_CPU, "-o", "OUT", "--shard-range", f"{part}/3") for part in (1, 2, 3))
    encode = {name: ("encode", name, *_CPU, "-o", "OUT") for name in ("m.jsonl", "images.tar", "images.parquet")}
    gpu = ("encode", "m.jsonl", "--backend", "gpu", "--device", "cpu", *_BASE, "-j", "1", "-o", "OUT")
    mended = ("encode", "mended/m.jsonl", *_CPU, "-o", "OUT")
    found = [
        Scenario("kill-local", (("encode", "m.jsonl", "--backend", "cpu", *_BASE, "-j", "2", "-o", "OUT"),)),
        Scenario("kill-tar", (encode["images.tar"],)),
        Scenario("kill-parquet", (encode["images.parquet"],)),
        Scenario("kill-gpu-kernels", (gpu,)),
        Scenario("kill-index-only", ((*encode["m.jsonl"], "--index-only"),)),
        Scenario("kill-ranges", ranges, after=(("finish", "OUT"),)),
        Scenario("kill-retry", ((*mended, "--retry-failed"),), template=mended),
        Scenario(
            "kill-overwrite", ((*encode["m.jsonl"], "--overwrite"),), template=(*encode["m.jsonl"], "--exif", "apply")
        ),
        Scenario(
            "kill-ray",
            ((*encode["m.jsonl"], "--engine", "ray"),),
            own_process=True,
            after_commits=True,
            env={"RAY_USAGE_STATS_ENABLED": "0"},
        ),
    ]
    if store is not None:
        command = (*encode["m.jsonl"], "--staging", "STAGING")
        found.append(Scenario("kill-s3", (command,), staged=True, own_process=True, env=store))
    return found


def make_sources(folder: Path) -> None:
    """Eleven rows, one image twice, one missing, one cut: as JSON Lines, in a tar and in a Parquet file."""
    folder.mkdir(parents=True)
    mended = folder / "mended"
    mended.mkdir()
    pictures: dict[str, bytes] = {}
    for number in range(8):
        chance = np.random.default_rng(number)
        small = Image.fromarray(chance.integers(0, 256, (9, 9, 4), dtype=np.uint8), "RGBA")
        buffer = io.BytesIO()
        small.resize((90 + 3 * number, 80)).convert(("RGB", "RGBA", "L", "P")[number % 4]).save(buffer, "PNG")
        pictures[f"{number}.png"] = buffer.getvalue()
    names = [*pictures, "gone.png", "cut.png", "0.png"]
    for name, content in pictures.items():
        (folder / name).write_bytes(content)
        (mended / name).write_bytes(content)
    (folder / "cut.png").write_bytes(pictures["1.png"][:300])
    (mended / "cut.png").write_bytes(pictures["1.png"][:300])
    rows = "".join(json.dumps({"id": f"row {n}", "image": name}) + "\n" for n, name in enumerate(names))
    (folder / "m.jsonl").write_text(rows)
    (mended / "m.jsonl").write_text(rows)
    with tarfile.open(folder / "images.tar", "w") as tar:
        for name, content in {**pictures, "cut.png": pictures["1.png"][:300]}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    cells = [{"bytes": content, "path": name} for name, content in {**pictures, "cut.png": b"no"}.items()]
    pq.write_table(pa.table({"image": cells}), folder / "images.parquet", row_group_size=3)


def mend(folder: Path) -> None:
    """Bring the missing image and the cut one, for `--retry-failed`."""
    shutil.copyfile(folder / "mended" / "2.png", folder / "mended" / "gone.png")
    shutil.copyfile(folder / "mended" / "1.png", folder / "mended" / "cut.png")


class Undisturbed:
    """What a scenario makes when nobody disturbs it: its tree, its exit code and its duration."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self.scenario = scenario
        self.sources = folder / f"{scenario.name}-sources"
        make_sources(self.sources)
        self.template = folder / f"{scenario.name}-template"
        if scenario.template:
            end = _run(self, scenario.template, self.template)
            if end not in (0, 1):
                raise SystemExit(f"{scenario.name}: the template ended with {end}")
            if "--retry-failed" in scenario.commands[0]:
                mend(self.sources)
        # As deep as the trials: a run record may hold the way from the output to the images.
        place = self.place(folder / "work" / scenario.name / "undisturbed")
        self.begin(place)
        began = time.monotonic()
        self.code = max(_run(self, command, place) for command in scenario.commands)
        for command in scenario.after:
            self.code = _run(self, command, place)
        self.seconds = time.monotonic() - began
        self.tree = self.tree_of(place)
        if self.code not in (0, 1) or not any(name.endswith("index.parquet") for name in self.tree):
            raise SystemExit(f"{scenario.name}: the undisturbed run ended with {self.code}")

    def place(self, folder: Path) -> Path:
        """The output folder of a trial, or the name below the bucket."""
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "out"

    def url(self, place: Path) -> str:
        """Where the output goes."""
        return f"s3://bucket/{place.parent.name}/out" if self.scenario.staged else str(place)

    def begin(self, place: Path) -> None:
        """Nothing, or the template, where the output will be."""
        if self.scenario.template:
            shutil.copytree(self.template, place)

    def tree_of(self, place: Path) -> Tree:
        """The digest of every file."""
        if not self.scenario.staged:
            paths = (path for path in sorted(place.rglob("*")) if path.is_file())
            return {str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        objects = _objects(self.scenario.env, f"{place.parent.name}/out/")
        return {name: hashlib.sha256(content).hexdigest() for name, content in objects.items()}


def attack_runs_by_killing(scenario: Scenario, folder: Path) -> Callable[[int, Path], str]:
    """Kill a run, begin it again until it ends, compare."""
    whole = Undisturbed(scenario, folder)

    def trial(seed: int, own: Path) -> str:
        chance = Random(f"{scenario.name} {seed}")
        own = own / f"trial-{scenario.name}-{seed}"
        place = whole.place(own)
        whole.begin(place)
        said = own / "said"
        outcome = "too late"
        for _ in range(chance.choice((1, 1, 1, 2))):
            outcome = max(outcome, _killed_once(chance, whole, place, said), key=("too late", "worker", "driver").index)
            if scenario.staged and chance.random() < 0.3:
                shutil.rmtree(own / "staging", ignore_errors=True)
        for _ in range(_MOST_RUNS):
            codes = [_run(whole, command, place) for command in scenario.commands]
            codes += [_run(whole, command, place) for command in scenario.after]
            if set(codes) <= {0, 1}:
                break
        else:
            raise Fault(f"after a kill of the {outcome} it ends with {codes}: {said.read_text()[-300:]!r}")
        code = codes[-1] if scenario.after else max(codes)
        tree = whole.tree_of(place)
        if tree != whole.tree:
            unlike = sorted(name for name in {*tree, *whole.tree} if tree.get(name) != whole.tree.get(name))
            raise Fault(f"after a kill of the {outcome} the tree is another: {unlike}")
        if code != whole.code:
            raise Fault(f"after a kill of the {outcome} it ends with {code}, undisturbed with {whole.code}")
        if more := {path.name for path in own.iterdir()} - {"out", "said", "staging"}:
            raise Fault(f"made {sorted(more)} beside the output")
        shutil.rmtree(own)
        return outcome

    return trial


def _killed_once(chance: Random, whole: Undisturbed, place: Path, said: Path) -> str:
    """Begin the commands and kill one process. Returns which: driver or worker, or too late."""
    commands = whole.scenario.commands
    running = [_start(whole, command, place, said) for command in commands]
    pid = chance.choice(running)
    if whole.scenario.after_commits or chance.random() < 0.4:
        least = chance.randrange(1, 9)
        _wait_for(pid, lambda: _committed(place, whole.scenario.after_commits) >= least)
        time.sleep(chance.uniform(0, 0.05))
    else:
        time.sleep(chance.uniform(0, 1.3 * whole.seconds))
    victim, outcome = pid, "driver"
    if chance.random() < 0.35 and (children := descendants(pid)):
        victim, outcome = chance.choice(children), "worker"
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    codes = {number: _wait(number) for number in running}
    if outcome == "driver":
        outcome = "driver" if codes[pid] == -signal.SIGKILL else "too late"
    elif codes[pid] not in (0, 1, 3):
        raise Fault(f"a worker was killed, and the run ended with {codes[pid]}: {said.read_text()[-300:]!r}")
    _nothing_lives_on(running, ours=not whole.scenario.after_commits)
    return outcome


def _committed(place: Path, only_shards: bool) -> int:
    """Files there are; or the shards that are committed."""
    if only_shards:
        return 8 * len(list(place.glob("shards/*.parquet")))
    return sum(len(names) for _, _, names in os.walk(place))


def _wait_for(pid: int, state: Callable[[], bool]) -> None:
    """Wait for a state, or for the end of the process."""
    end = time.monotonic() + _PATIENCE
    while not state() and _alive(pid) and time.monotonic() < end:
        time.sleep(0.002)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _processes() -> Iterator[tuple[int, int, int]]:
    """`(process, parent, session)` of all processes that live."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z":
                    yield int(entry.name), int(parent), int(session)


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    parents = {process: parent for process, parent, _ in _processes()}
    below = {pid}
    while more := {process for process, parent in parents.items() if parent in below} - below:
        below |= more
    return sorted(below - {pid})


def _nothing_lives_on(sessions: list[int], ours: bool) -> None:
    """Raises Fault where a process of a run that has ended lives on. Ray's own daemons are ended here."""
    end = time.monotonic() + 15
    while left := [process for process, _, session in _processes() if session in sessions]:
        if time.monotonic() > end:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            if ours:
                raise Fault(f"{len(left)} processes live on after the run was killed")
            end = math.inf
        time.sleep(0.02)


# --- one command --------------------------------------------------------------------------------------------------


def _run(whole: Undisturbed, command: tuple[str, ...], place: Path) -> int:
    return _wait(_start(whole, command, place, place.parent / "said"))


def _start(whole: Undisturbed, command: tuple[str, ...], place: Path, said: Path) -> int:
    """Start the command in a session of its own; returns its process."""
    words = {"OUT": whole.url(place), "STAGING": str(place.parent / "staging")}
    arguments = [words.get(word, word) for word in command]
    said.parent.mkdir(parents=True, exist_ok=True)
    with open(said, "ab") as log:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.chdir(whole.sources)
            os.environ.update(NO_COLOR="1", **whole.scenario.env)
            if whole.scenario.own_process:
                os.execv(sys.executable, [sys.executable, "-m", "kimik3_prep", *arguments])
            sys.argv = ["kimik3-prep", *arguments]
            main()
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code if isinstance(end.code, int) else 0 if end.code is None else 99)
        finally:
            os._exit(98)


def _wait(pid: int) -> int:
    """The exit code, negative for a signal. Raises Fault where it does not end."""
    end = time.monotonic() + 2 * _PATIENCE
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise Fault(f"not done after {2 * _PATIENCE:g} s")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


# --- a store ------------------------------------------------------------------------------------------------------

_SERVER = """
import json, sys
from stores import serving
with serving() as store:
    print(json.dumps(store.env), flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server in a process of its own; gives the environment that finds it."""
    tests = Path(__file__).parent.parent / "tests"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as server:
        if server.stdout is None:
            raise SystemExit("the S3 server has no output")
        yield json.loads(server.stdout.readline())
        server.terminate()


def _objects(env: Mapping[str, str], prefix: str) -> dict[str, bytes]:
    import boto3

    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    client: Any = boto3.client("s3", endpoint_url=env["FSSPEC_S3_ENDPOINT_URL"], **keys)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
    names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
    return {name.removeprefix(prefix): client.get_object(Bucket="bucket", Key=name)["Body"].read() for name in names}


def kills(folder: Path, store: Mapping[str, str] | None, wanted: Callable[[str], bool]) -> list[Attack]:
    """Every attack by killing, each once its undisturbed run is done."""
    return [
        Attack(scenario.name, attack_runs_by_killing(scenario, folder), seconds=900, bytes=4 << 30)
        for scenario in scenarios(store)
        if wanted(scenario.name)
    ]
