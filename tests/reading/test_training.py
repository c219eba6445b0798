"""training.py: every index once an epoch, the budget kept, and batches that are their items."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Silent, picture, write_manifest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from kimik3_prep.errors import InputError
from kimik3_prep.reading.features import Batch, FeatureStore
from kimik3_prep.reading.training import FeatureDataset, TokenBudgetSampler, collate
from kimik3_prep.run.prepare import Settings, prepare

TOKENS = [5, 3, 8, 1, 1, 9, 2, 4, 4, 6]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """Nine pictures and a failed item between them."""
    folder = tmp_path_factory.mktemp("training")
    rows: list[dict[str, Any]] = []
    for number in range(9):
        picture(40 + 20 * number, 60, "RGB", number).save(folder / f"{number}.png")
        rows.append({"id": f"n{number}", "image": f"{number}.png", "caption": f"no {number}"})
    rows.insert(4, {"id": "gone", "image": "gone.png"})
    settings = Settings(str(write_manifest(folder / "m.jsonl", rows)), folder / "out", "kimi-k3", "cpu", "uint8")
    prepare(settings, Silent())
    return FeatureStore(folder / "out")


# --- sampler ------------------------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(1, 50), max_size=60),
    budget=st.integers(1, 120),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_every_index_once_an_epoch_and_the_budget_kept(
    tokens: list[int], budget: int, shuffle: bool, seed: int, epoch: int
) -> None:
    sampler = TokenBudgetSampler(tokens, budget, shuffle=shuffle, seed=seed, oversized="alone")
    sampler.set_epoch(epoch)
    batches = list(sampler)
    flat = [index for batch in batches for index in batch]
    assert sorted(flat) == list(range(len(tokens)))
    assert shuffle or flat == list(range(len(tokens)))
    assert len(sampler) == len(batches)
    assert all(batches)
    for batch in batches:
        assert sum(tokens[index] for index in batch) <= budget or len(batch) == 1
    for batch, following in pairwise(batches):  # none is closed early
        assert sum(tokens[index] for index in batch) + tokens[following[0]] > budget
    if max(tokens, default=0) <= budget:
        strict = TokenBudgetSampler(tokens, budget, shuffle=shuffle, seed=seed)
        strict.set_epoch(epoch)
        assert list(strict) == batches
        assert all(sum(tokens[index] for index in batch) <= budget for batch in batches)


def test_batches_in_order() -> None:
    assert list(TokenBudgetSampler(TOKENS, 10)) == [[0, 1], [2, 3, 4], [5], [6, 7, 8], [9]]
    assert all(type(index) is int for batch in TokenBudgetSampler(TOKENS, 10) for index in batch)


@pytest.mark.parametrize("tokens", [np.array(TOKENS, np.int32), torch.tensor(TOKENS), tuple(TOKENS)])
def test_tokens_of_any_kind(tokens: Any) -> None:
    assert list(TokenBudgetSampler(tokens, 10)) == list(TokenBudgetSampler(TOKENS, 10))


def test_drop_last_drops_the_batch_that_ended_because_the_indices_did() -> None:
    sampler = TokenBudgetSampler(TOKENS, 10, drop_last=True)
    assert list(sampler) == [[0, 1], [2, 3, 4], [5], [6, 7, 8]]
    assert len(sampler) == 4
    assert list(TokenBudgetSampler([], 10, drop_last=True)) == []


def test_epochs_differ_and_the_same_one_is_the_same() -> None:
    def epoch(number: int, seed: int = 3) -> list[list[int]]:
        sampler = TokenBudgetSampler(TOKENS, 20, shuffle=True, seed=seed)
        list(sampler)
        sampler.set_epoch(number)
        assert len(sampler) == len(list(sampler))
        assert list(sampler) == list(sampler)
        return list(sampler)

    assert epoch(1) == epoch(1)
    assert len({str(epoch(number)) for number in range(5)}) == 5
    assert epoch(1) != epoch(1, seed=4)


def test_what_is_larger_than_the_budget_is_refused_or_goes_alone() -> None:
    with pytest.raises(InputError, match=r"2 of 10 items have more tokens than 7; expected 9 or more, .* index 5 "):
        TokenBudgetSampler(TOKENS, 7, oversized="refuse")
    batches = list(TokenBudgetSampler(TOKENS, 7))
    assert batches == [[0], [1], [2], [3, 4], [5], [6, 7], [8], [9]]
    for options, what in [({"budget": 0}, "above zero"), ({"budget": 9, "oversized": "skip"}, '"refuse" or "alone"')]:
        with pytest.raises(InputError, match=what):
            TokenBudgetSampler(TOKENS, **options)  # type: ignore[arg-type]


# --- dataset and batches ------------------------------------------------------------------------------------------


def test_the_dataset_is_the_items_that_are_ok(store: FeatureStore) -> None:
    dataset = FeatureDataset(store)
    assert (len(store), len(dataset)) == (10, 9)
    assert [dataset[index].id for index in range(9)] == [f"n{number}" for number in range(9)]
    assert dataset.num_tokens.tolist() == [dataset[index].num_tokens for index in range(9)]
    with pytest.raises(IndexError):
        dataset[9]


def same(one: Batch, other: Batch) -> bool:
    tensors = [(getattr(one, name), getattr(other, name)) for name in ("pixel_values", "grid_thws", "num_tokens")]
    return one.ids == other.ids and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)


def test_collated_items_are_the_stores_batch(store: FeatureStore) -> None:
    names = ["n3", "n0", "n0"]
    batch = collate([store[name] for name in names])
    assert same(batch, store.batch(names))
    assert (batch.grid_thws.dtype, batch.num_tokens.dtype) == (torch.int64, torch.int64)
    assert len(batch.pixel_values) == int(batch.grid_thws.prod(1).sum()) > 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_epoch_through_worker_processes(store: FeatureStore, method: str) -> None:
    dataset = FeatureDataset(store)
    sampler = TokenBudgetSampler(dataset.num_tokens, 40, shuffle=True, seed=1)
    context = multiprocessing.get_context(method)
    loader = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=collate, num_workers=2, multiprocessing_context=context
    )
    wanted = [store.batch(dataset.rows[batch]) for batch in sampler]
    found = list(loader)
    assert len(found) == len(wanted) > 2
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(int(batch.num_tokens.sum()) <= 40 for batch in found)


def test_pinning_reaches_every_tensor(store: FeatureStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning itself needs a GPU; what is seen here is that DataLoader's hook asks it of all three tensors."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)
    batch = store.batch(["n1", "n2"])
    pinned = batch.pin_memory()
    assert pinned.ids == batch.ids
    for name in ("pixel_values", "grid_thws", "num_tokens"):
        assert torch.equal(getattr(pinned, name), getattr(batch, name) + 1)


def test_a_batch_carries_rows_and_extra_and_normalises_itself(store: FeatureStore) -> None:
    raw, plain = FeatureStore(store.paths[0], raw=True), FeatureStore(store.paths[0])
    for batch in (raw.batch(["n1", "n3"]), collate([raw["n1"], raw["n3"]])):
        assert batch.pixel_values.dtype == torch.uint8
        assert [row["image"] for row in batch.rows] == ["1.png", "3.png"]
        assert batch.extra == ({"caption": "no 1"}, {"caption": "no 3"})
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            done = batch.normalised(dtype)
            expected = plain.batch(["n1", "n3"]).pixel_values.to(dtype)
            assert done.pixel_values.dtype == dtype
            assert torch.equal(done.pixel_values, expected)
            assert (done.ids, done.rows) == (("n1", "n3"), batch.rows)
            done.pixel_values.zero_()  # the caller's own
        assert batch.to("meta").normalised(torch.bfloat16).pixel_values.device.type == "meta"
        assert torch.equal(
            plain.batch(["n1"]).normalised(torch.bfloat16).pixel_values, plain["n1"].pixel_values.bfloat16()
        )


# --- ranks, packing, and going on ---------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(1, 50), max_size=60),
    budget=st.integers(1, 120),
    replicas=st.integers(1, 5),
    window=st.sampled_from([1, 4, 16]),
    drop=st.booleans(),
    groups=st.integers(1, 4),
)
def test_ranks_have_as_many_batches_and_together_all_indices(
    tokens: list[int], budget: int, replicas: int, window: int, drop: bool, groups: int
) -> None:
    lines = [index // groups for index in range(len(tokens))]
    options: dict[str, Any] = {"shuffle": True, "window": window, "groups": lines, "drop_last": drop}
    ranks = [
        list(TokenBudgetSampler(tokens, budget, rank=rank, num_replicas=replicas, **options))
        for rank in range(replicas)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for own in ranks for batch in own]
    for batch in batches:
        whole = [index for index, line in enumerate(lines) if line in {lines[member] for member in batch}]
        assert sorted(batch) == whole
        assert sum(tokens[index] for index in batch) <= budget or len({lines[member] for member in batch}) == 1
    seen = [index for batch in batches for index in batch]
    if drop:
        assert len(set(seen)) == len(seen)
    else:
        assert set(seen) == set(range(len(tokens)))
        assert len(batches) - len({tuple(batch) for batch in batches}) < replicas


def test_windows_fill_batches_better_than_the_order() -> None:
    tokens = np.random.default_rng(1).lognormal(5.8, 0.8, 2000).astype(int).clip(16, 4096)
    least = tokens.sum() / 4096
    in_order, fitted = (len(TokenBudgetSampler(tokens, 4096, shuffle=True, window=window)) for window in (1, 128))
    assert in_order > least * 1.08
    assert fitted < least * 1.05


def test_an_epoch_goes_on_where_its_state_was_taken() -> None:
    def make(**more: Any) -> TokenBudgetSampler:
        return TokenBudgetSampler(TOKENS, 10, shuffle=True, window=4, **more)

    sampler = make()
    sampler.set_epoch(3)
    whole = list(sampler)
    begun = iter(sampler)
    first = [next(begun), next(begun)]
    state = sampler.state_dict()
    assert state == sampler.state_dict(batches=2)
    other = make()
    other.load_state_dict(state)
    other.set_epoch(3)  # as a loop over epochs does
    assert first + list(other) == whole
    assert list(other) == whole  # the next pass is a whole one
    other.load_state_dict(sampler.state_dict(batches=1))
    other.set_epoch(4)
    assert len(list(other)) == len(other)
    with pytest.raises(InputError, match="of a sampler with other items, budget, order or number of processes"):
        make(num_replicas=2).load_state_dict(state)


def test_wrong_ranks_groups_and_windows_are_said() -> None:
    for options, what in [
        ({"rank": 2, "num_replicas": 2}, "rank: it is 2; expected a number from 0 to 1"),
        ({"num_replicas": 0}, "num_replicas: it is 0"),
        ({"window": 0}, "window: it is 0"),
        ({"groups": [1]}, "there are 1 for 10 indices"),
    ]:
        with pytest.raises(InputError, match=what):
            TokenBudgetSampler(TOKENS, 10, **options)  # type: ignore[arg-type]


RANK = """
import sys
import torch.distributed as dist
from torch.utils.data import DataLoader
from kimik3_prep import FeatureDataset, FeatureStore, TokenBudgetSampler, collate

if __name__ == "__main__":
    path, rank, meeting = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    dataset = FeatureDataset(FeatureStore(path, raw=True))
    sampler = TokenBudgetSampler(dataset.num_tokens, 12, shuffle=True, window=4, rank=rank, num_replicas=2)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=1)
    for batch in loader:
        both = [None, None]
        dist.all_gather_object(both, batch.ids)  # hangs where the ranks differ in number
        assert batch.normalised().pixel_values.shape == batch.pixel_values.shape
        if rank == 0:
            print(*both[0], *both[1])
"""


def test_two_processes_train_side_by_side(store: FeatureStore, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py"), str(store.paths[0])]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], env=env, stdout=-1, stderr=-1, text=True)
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert set(said[0][0].split()) == {f"n{number}" for number in range(9)}


def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(store: FeatureStore) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def make(workers: int) -> Any:
        dataset = FeatureDataset(FeatureStore(store.paths[0]))
        sampler = TokenBudgetSampler(dataset.num_tokens, 8, shuffle=True)
        return loaders.StatefulDataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=workers)

    for workers in (0, 2):
        whole = [batch.ids for batch in make(workers)]
        begun = make(workers)
        batches = iter(begun)
        first = [next(batches).ids, next(batches).ids]
        resumed = make(workers)
        resumed.load_state_dict(begun.state_dict())
        assert first + [batch.ids for batch in resumed] == whole
