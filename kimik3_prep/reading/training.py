"""For training: a map-style dataset of the items that are ok, batches by token budget, and their packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.reading.features import Batch, Features, FeatureStore
from kimik3_prep.reading.stored import Ints


class FeatureDataset(Dataset[Features]):
    """The items of a store that are ok, in manifest order; `store.failures` lists the others.

    rows: manifest row of every index, int64. num_tokens: tokens of every index, int64; what `TokenBudgetSampler` takes.
    """

    def __init__(self, store: FeatureStore) -> None:
        self.store = store
        self.rows: Ints = store.ok
        self.num_tokens: Ints = store.num_tokens[self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Features:
        return self.store[self.rows[index]]


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of dataset indices whose tokens sum up to `budget` at most; for DataLoader's `batch_sampler`.

    Indices come in order, or shuffled; a batch is closed when the next index would break the budget. Every index comes
    exactly once an epoch, but for the last batch under `drop_last`: the one that ended because the indices did.

    num_tokens: tokens of every index, `FeatureDataset.num_tokens`.
    shuffle, seed: another order for every `set_epoch`, the same for the same seed, epoch and number of indices.
    oversized: an index above the budget alone is refused when the sampler is made (InputError), because a budget is
    there to fit memory; "alone" gives each such index a batch of its own, which then breaks the budget.
    """

    def __init__(
        self,
        num_tokens: Sequence[int] | npt.NDArray[np.integer] | torch.Tensor,
        budget: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        oversized: Literal["refuse", "alone"] = "refuse",
    ) -> None:
        self._tokens: Ints = np.asarray(num_tokens, np.int64)
        self._budget, self._shuffle, self._seed, self._drop_last = budget, shuffle, seed, drop_last
        self._epoch = 0
        self._packed: tuple[Ints, list[int]] | None = None
        if oversized not in ("refuse", "alone"):
            raise InputError([Problem("oversized", f"it is {oversized!r}", '"refuse" or "alone"')])
        if budget < 1:
            raise InputError([Problem("budget", f"it is {budget}", "a number of tokens above zero")])
        larger = np.flatnonzero(self._tokens > budget)
        if len(larger) and oversized == "refuse":
            what = f"{len(larger):,} of {len(self._tokens):,} items have more tokens than {budget:,}"
            hint = 'raise it, leave them out, or give each a batch of its own with oversized="alone"'
            largest = int(np.argmax(self._tokens))
            expected = f"{self._tokens[largest]:,} or more, the tokens of index {largest}"
            raise InputError([Problem("budget", what, expected, hint)])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; without `shuffle` it changes nothing."""
        self._epoch, self._packed = epoch, None

    def __len__(self) -> int:
        return len(self._cuts()[1]) - 1

    def __iter__(self) -> Iterator[list[int]]:
        order, cuts = self._cuts()
        return (order[begin:end].tolist() for begin, end in pairwise(cuts))

    def _cuts(self) -> tuple[Ints, list[int]]:
        """Indices in this epoch's order, and where each batch begins; the last cut is where the last batch ends."""
        if self._packed is None:
            count = len(self._tokens)
            random = np.random.default_rng([self._seed, self._epoch])
            order = random.permutation(count) if self._shuffle else np.arange(count)
            ends = np.cumsum(self._tokens[order])
            cuts = [0]
            while cuts[-1] < count:
                begin = cuts[-1]
                before = int(ends[begin - 1]) if begin else 0
                # At least one: an index above the budget goes alone.
                cuts.append(max(begin + 1, int(np.searchsorted(ends, before + self._budget, "right"))))
            if self._drop_last and len(cuts) > 1:
                cuts.pop()
            self._packed = order, cuts
        return self._packed


def collate(items: Sequence[Features]) -> Batch:
    """Items packed one after the other into a `Batch`; for DataLoader's `collate_fn`."""
    return Batch(
        torch.cat([item.pixel_values for item in items]),
        torch.tensor([item.grid_thw for item in items], dtype=torch.int64),
        torch.tensor([item.num_tokens for item in items], dtype=torch.int64),
        tuple(item.id for item in items),
    )
