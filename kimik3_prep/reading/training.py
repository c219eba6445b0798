"""For training: a map-style dataset of the items that are ok, batches by token budget, and their packing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler

from kimik3_prep.errors import InputError, Problem
from kimik3_prep.reading.features import Batch, Features, FeatureStore
from kimik3_prep.reading.stored import Ints

Numbers = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


class FeatureDataset(Dataset[Features]):
    """The items of a store that are ok, in manifest order; `store.failures` lists the others."""

    def __init__(self, store: FeatureStore) -> None:
        self.store = store

        self.rows: Ints = store.ok
        """Manifest row of every index."""

        self.num_tokens: Ints = store.num_tokens[self.rows]
        """Tokens of every index, for `TokenBudgetSampler`."""

        self.lines: Ints = store.lines[self.rows]
        """Manifest line of every index: images of one row have the same, for `TokenBudgetSampler(groups=…)`."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Features:
        return self.store[self.rows[index]]

    def __getitems__(self, indices: Sequence[int]) -> list[Features]:
        """Several items; DataLoader asks for a batch's together."""
        return self.store.items(self.rows[list(indices)])


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of dataset indices whose tokens sum up to `budget` at most; for DataLoader's `batch_sampler`.

    Every index comes once an epoch. Batches are made for all ranks together and dealt out in turn; where they do not
    go up evenly the first ones are dealt again, so that every rank has the same number.

    num_tokens: tokens of every index, `FeatureDataset.num_tokens`.
    shuffle, seed: another order for every `set_epoch`, the same for the same seed, epoch and number of indices.
    drop_last: leave out the last batch, and what does not go up evenly between ranks, instead of dealing twice.
    window: pack so many indices at a time, largest first into the first batch with room; 1 keeps the order, and closes
    a batch when the next index would break the budget.
    groups: a number for every index; indices of one number stay in one batch. `FeatureDataset.lines` keeps the images
    of a manifest row together.
    oversized: what becomes of an index (or group) above the budget alone: a batch of its own, which breaks the budget,
    or InputError when the sampler is made.
    rank, num_replicas: which of how many processes this is.
    """

    def __init__(
        self,
        num_tokens: Numbers,
        budget: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        window: int = 1,
        groups: Numbers | None = None,
        oversized: Literal["refuse", "alone"] = "alone",
        rank: int = 0,
        num_replicas: int = 1,
    ) -> None:
        tokens: Ints = np.asarray(num_tokens, np.int64)
        self._units = _Units(tokens, None if groups is None else np.asarray(groups, np.int64))
        self._budget, self._shuffle, self._seed, self._drop_last = budget, shuffle, seed, drop_last
        self._window, self._rank, self._replicas = window, rank, num_replicas
        self._epoch = self._begin = self._given = 0
        self._packed: tuple[Ints, list[tuple[int, int]]] | None = None
        if oversized not in ("refuse", "alone"):
            raise InputError([Problem("oversized", f"it is {oversized!r}", '"refuse" or "alone"')])
        for name, value in (("budget", budget), ("window", window), ("num_replicas", num_replicas)):
            if value < 1:
                raise InputError([Problem(name, f"it is {value}", "a number above zero")])
        if not 0 <= rank < num_replicas:
            raise InputError([Problem("rank", f"it is {rank}", f"a number from 0 to {num_replicas - 1}")])
        larger = np.flatnonzero(self._units.tokens > budget)
        if len(larger) and oversized == "refuse":
            what = f"{len(larger):,} of {len(self._units.tokens):,} items have more tokens than {budget:,}"
            hint = 'raise it, leave them out, or give each a batch of its own with oversized="alone"'
            largest = int(np.argmax(self._units.tokens))
            expected = f"{self._units.tokens[largest]:,} or more, the tokens of index {self._units.first(largest)}"
            raise InputError([Problem("budget", what, expected, hint)])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; without `shuffle` it changes nothing. Another epoch begins at its start."""
        if epoch != self._epoch:
            self._epoch, self._packed = epoch, None
            self._begin = self._given = 0

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch."""
        return len(self._batches()[1])

    def __iter__(self) -> Iterator[list[int]]:
        begin, self._begin = self._begin, 0
        self._given = begin
        indices, cuts = self._batches()
        for first, end in cuts[begin:]:
            self._given += 1
            yield indices[first:end].tolist()

    # --- in the middle of an epoch ------------------------------------------------------------------------------

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where this rank is in the epoch.

        batches: how many of the epoch's were trained on. None: how many were given out, which is more with workers,
        who fetch ahead; StatefulDataLoader asks at the right moment.
        """
        return {"epoch": self._epoch, "batches": self._given if batches is None else batches, "of": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where that state was taken. Raises InputError for the state of a sampler with other settings."""
        if state.get("of") != self._identity():
            what = "it is of a sampler with other items, budget, order or number of processes"
            raise InputError([Problem("state", what, hint="make the sampler as it was, or begin the epoch anew")])
        self.set_epoch(int(state["epoch"]))
        self._begin = self._given = int(state["batches"])

    def _identity(self) -> str:
        """What decides the batches of all ranks."""
        facts = [self._budget, self._shuffle, self._seed, self._drop_last, self._window, self._replicas]
        return hashlib.sha256(json.dumps(facts).encode() + self._units.digest).hexdigest()

    # --- packing ------------------------------------------------------------------------------------------------

    def _batches(self) -> tuple[Ints, list[tuple[int, int]]]:
        """The indices in this epoch's order, and where each batch of this rank begins and ends among them."""
        if self._packed is None:
            count = len(self._units.tokens)
            random = np.random.default_rng([self._seed, self._epoch])
            order: Ints = random.permutation(count) if self._shuffle else np.arange(count)
            if self._window > 1:
                order, cuts = self._fitted(order)
            else:
                cuts = self._in_order(order)
            indices, ends = self._units.indices(order)
            spans = list(pairwise([0, *ends[np.asarray(cuts[1:], np.int64) - 1].tolist()]))
            if self._drop_last:
                spans = spans[:-1]
                spans = spans[: len(spans) - len(spans) % self._replicas]
            elif spans:
                spans += [spans[number % len(spans)] for number in range(-len(spans) % self._replicas)]
            self._packed = indices, spans[self._rank :: self._replicas]
        return self._packed

    def _in_order(self, order: Ints) -> list[int]:
        """Where batches begin, and the end of the last: each is closed when the next unit would break the budget."""
        ends = np.cumsum(self._units.tokens[order])
        cuts = [0]
        while cuts[-1] < len(order):
            begin = cuts[-1]
            before = int(ends[begin - 1]) if begin else 0
            # At least one: a unit above the budget goes alone.
            cuts.append(max(begin + 1, int(np.searchsorted(ends, before + self._budget, "right"))))
        return cuts

    def _fitted(self, order: Ints) -> tuple[Ints, list[int]]:
        """Another order of the units, and its cuts: in each window, largest first into the first batch with room."""
        packed: list[list[int]] = []
        for begin in range(0, len(order), self._window):
            window = order[begin : begin + self._window]
            sizes = self._units.tokens[window]
            bins: list[list[int]] = []
            room: list[int] = []
            for place in np.argsort(-sizes, kind="stable").tolist():
                size = int(sizes[place])
                fits = next((number for number, free in enumerate(room) if free >= size), len(room))
                if fits == len(room):
                    bins.append([])
                    room.append(self._budget)
                bins[fits].append(int(window[place]))
                room[fits] -= size
            packed += bins
        flat = np.asarray([unit for batch in packed for unit in batch], np.int64)
        return flat, [0, *np.cumsum([len(batch) for batch in packed], dtype=np.int64).tolist()]


class _Units:
    """What is packed as a whole: the indices of a group, or each index for itself."""

    def __init__(self, tokens: Ints, groups: Ints | None) -> None:
        if groups is None:
            groups = np.arange(len(tokens))
        if len(groups) != len(tokens):
            what = f"there are {len(groups):,} for {len(tokens):,} indices"
            raise InputError([Problem("groups", what, "a number for every index")])
        _, first, of = np.unique(groups, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first, kind="stable")] = np.arange(len(first))  # in the order in which the groups appear
        unit = rank[of] if len(of) else of
        self._members: Ints = np.argsort(unit, kind="stable")
        self._sizes: Ints = np.bincount(unit, minlength=len(first)).astype(np.int64)
        self._starts: Ints = np.cumsum(self._sizes) - self._sizes
        self.tokens: Ints = np.bincount(unit, tokens, len(first)).astype(np.int64)
        self.digest = hashlib.sha256(tokens.tobytes() + unit.tobytes()).digest()

    def first(self, unit: int) -> int:
        """The first index of a unit."""
        return int(self._members[self._starts[unit]])

    def indices(self, order: Ints) -> tuple[Ints, Ints]:
        """The indices of units in that order, and where those of each unit end."""
        sizes = self._sizes[order]
        ends = np.cumsum(sizes)
        within = np.arange(int(sizes.sum())) - np.repeat(ends - sizes, sizes)
        return self._members[np.repeat(self._starts[order], sizes) + within], ends


def collate(items: Sequence[Features]) -> Batch:
    """Items packed one after the other into a `Batch`; for DataLoader's `collate_fn`."""
    return Batch(
        torch.cat([item.pixel_values for item in items]),
        torch.tensor([item.grid_thw for item in items], dtype=torch.int64),
        torch.tensor([item.num_tokens for item in items], dtype=torch.int64),
        tuple(item.row for item in items),
        items[0].scale,
    )
