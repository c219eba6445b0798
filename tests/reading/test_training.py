"""training.py: every index once an epoch, the budget kept, and batches that are their items."""

from __future__ import annotations

import multiprocessing
from itertools import pairwise
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
        rows.append({"id": f"n{number}", "image": f"{number}.png"})
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
        TokenBudgetSampler(TOKENS, 7)
    batches = list(TokenBudgetSampler(TOKENS, 7, oversized="alone"))
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
