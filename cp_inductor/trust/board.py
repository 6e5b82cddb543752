"""A folder in the store of a group, in which each rank writes for the others.

    rank 0: write("0", text)        rank 1: read([0])  =>  {0: text}

A key is `incarnation/epoch/name`. A store may outlive a group and serve another group of the same
name. All ranks of the first group have joined before any rank of the second does, so the number of
ranks that have joined says which group this is. An epoch ends when ranks disagree.
"""

from __future__ import annotations

from collections.abc import Sequence

from cp_inductor.trust.bounded_store import BoundedStore


class Board:
    """What the ranks of a group have written for each other.

    Args:
        store: of the group.
        name: of the folder; ledgers and the like of one group have different names.
        ranks: the global ranks of the group, by position.
    """

    def __init__(self, store: BoundedStore, name: str, ranks: Sequence[int]) -> None:
        self.store, self.ranks = store.under(f"cp_inductor/{name}"), tuple(ranks)
        self.incarnation: int | None = None
        self.epoch = 0

    @property
    def folder(self) -> str:
        """What the keys of this group begin with, until ranks disagree."""
        if self.incarnation is None:
            self.incarnation = (self.store.add("joined", 1) - 1) // len(self.ranks)
        return f"{self.incarnation}/{self.epoch}"

    def write(self, name: str, text: str) -> None:
        """Write a text, over what was there."""
        self.store.set(f"{self.folder}/{name}", text)

    def add(self, name: str, amount: int) -> int:
        """Add to a number, and return the sum."""
        return self.store.add(f"{self.folder}/{name}", amount)

    def decide(self, name: str, text: str) -> None:
        """Write a text, unless there is one."""
        self.store.set_first(f"{self.folder}/{name}", text)

    def find(self, name: str) -> bytes | None:
        """Return a text, if it was written."""
        key = f"{self.folder}/{name}"
        return self.store.get(key) if self.store.check([key]) else None

    def read(self, positions: Sequence[int], under: str = "") -> dict[int, bytes]:
        """Return what some ranks have written under their positions; others are not in it."""
        keys = {position: f"{self.folder}/{under}{position}" for position in positions}
        if not self.store.check(list(keys.values())):
            keys = {position: key for position, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get(list(keys.values())) if keys else []
        return dict(zip(keys, texts, strict=True))


def name_ranks(ranks: Sequence[int]) -> str:
    """Name global ranks, as in "ranks 0, 1 and 2"."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    return f"ranks {', '.join(names[:-1])} and {names[-1]}"
