"""check.py: what options mean, and which device runs, decided before any work."""

from __future__ import annotations

import os

import pytest
import torch

from kimik3_prep.errors import InputError
from kimik3_prep.pixels import device as pixels_device
from kimik3_prep.run.check import auto_backend, find_devices, parse_range, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("1", 1), ("200MB", 200_000_000), ("2GiB", 2 << 30), ("512 mib", 512 << 20), ("1.5K", 1536)],
        *[("10b", 10), ("1tb", 10**12), (" 3M ", 3 << 20)],
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "MB", "-1", "1XB", "1.2.3", "1 2", "inf", "nan", "1e400"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="--shard-size"):
        parse_size(text, "--shard-size")


@pytest.mark.parametrize(
    ("text", "range_"),
    [("1/1", (1, 1)), ("2/8", (2, 8)), (" 8 / 8 ", (8, 8)), ("3 of 4", (3, 4)), ("007/010", (7, 10))],
)
def test_ranges_as_people_write_them(text: str, range_: tuple[int, int]) -> None:
    assert parse_range(text) == range_


@pytest.mark.parametrize(
    "text", ["", "3", "0/8", "9/8", "-1/8", "1/0", "0/0", "1/8/2", "a/b", "1,8", "1.5/8", "\u0661/\u0662"]
)
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(InputError, match="as 1/8 to 8/8") as caught:
        parse_range(text)
    assert ("the first is 1/8, the last 8/8" in str(caught.value)) == (text in ("0/8", "9/8"))


# --- devices --------------------------------------------------------------------------------------------------------


def pretend_cuda(monkeypatch: pytest.MonkeyPatch, devices: int, built: bool = True) -> None:
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if built else None)


def test_auto_is_gpu_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 1)
    assert auto_backend() == "gpu"
    pretend_cuda(monkeypatch, 0)
    assert auto_backend() == "cpu"
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert auto_backend() == "cpu"


@pytest.mark.parametrize(
    ("device", "found"),
    [(None, ("cuda:0", "cuda:1")), ("cuda", ("cuda:0", "cuda:1")), ("cuda:1", ("cuda:1",)), ("cpu", ("cpu",))],
)
def test_devices(device: str | None, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 2)
    assert find_devices(device, "--backend gpu") == found


def test_a_device_of_other_machines_need_not_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 0)
    for device, found in ((None, "cuda"), ("cuda:1", "cuda"), ("cpu", "cpu")):
        assert find_devices(device, "--backend gpu", elsewhere=True) == (found,)
    with pytest.raises(InputError, match="no device"):
        find_devices("tpu", "--backend gpu", elsewhere=True)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", "cpu:1", "mps:0", "tpu"])
def test_what_is_no_device(device: str) -> None:
    with pytest.raises(InputError, match="is no device"):
        find_devices(device, "--backend gpu")


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cuda(monkeypatch, 2)
    with pytest.raises(InputError, match="cuda:0 to cuda:1"):
        find_devices("cuda:2", "--backend gpu")
    pretend_cuda(monkeypatch, 0)
    with pytest.raises(InputError, match="CUDA finds no device"):
        find_devices("cuda", "m.jsonl:7")
    pretend_cuda(monkeypatch, 0, built=False)
    with pytest.raises(InputError, match="built without CUDA") as caught:
        find_devices(None, "m.jsonl:7")
    assert caught.value.problems[0].where == "m.jsonl:7"
    assert "--device cpu" in caught.value.problems[0].hint
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="no MPS device"):
        find_devices("mps", "--backend gpu")


def test_a_pillow_that_resizes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels_device, "resizes_like_pillow", lambda: False)
    with pytest.raises(InputError, match="pillow>=13"):
        find_devices("cpu", "--backend gpu")
