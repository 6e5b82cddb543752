"""Warn of plain inputs that begin alike on all ranks, where each is to have its own tokens.

    options={"mesh": mesh}; positions: 0 1 2 3 on rank 0, 0 1 2 3 on rank 1
      => SequenceWarning: input positions begins with the same numbers on all 2 ranks

Nothing about a plain tensor says that it is a shard. A batch that nobody has cut, and positions
that each rank counts from 0, fit the graph as well as shards do, and make other numbers. So the
beginnings of inputs are compared in the first runs of a graph, through the store of the group.

Masks of True and numbers that are all equal, such as padding, tell nothing and are left out.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp_inductor.errors import SequenceWarning
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.modes import without_modes
from cp_inductor.trust.agreement import Agreed, agreed_of, beginning_of, describe_table
from cp_inductor.trust.claims import digest

# In this many runs of a graph, with gradients and without: a program may cut one batch and not the
# next.
FIRST_RUNS = 2

# So many tokens of a shard are compared, and a power of two: of 5 and of 4 tokens, 4.
MOST_TOKENS = 16

# How long a rank waits for what the others have; they have just run the same graph.
PATIENCE_S = 2.0


class Beginnings:
    """What the inputs of a graph begin with, on all ranks of a group.

    Args:
        group_name: of the ranks that share the sequence.
        shards: the inputs that are shards: by place, their name in the model and sequence dim.
        graph: tells the graph from others, alike on all ranks.
    """

    def __init__(self, group_name: str, shards: Mapping[int, tuple[str, int]], graph: str) -> None:
        self.group_name, self.shards, self.graph = group_name, shards, graph

    def read(self, args: Sequence[Any]) -> dict[str, str]:
        """Return digests of what inputs begin with, by name, if it is to be compared in this run.

        Args:
            args: of the call, before the graph runs, which may write to them.
        """
        group = agreed_of(self.group_name)
        if group is None or not self._is_turn(group):
            return {}
        # Regions, and modes of the user, are not to see what is read here.
        with torch._C.DisableTorchFunction(), without_modes(), torch.no_grad():
            texts = {name: _beginning(args[at], dim) for at, (name, dim) in self.shards.items()}
        return {name: text for name, text in texts.items() if text}

    def compare(self, digests: Mapping[str, str]) -> None:
        """Warn on the first rank if all ranks have read the same; after the graph has run."""
        group = agreed_of(self.group_name)
        if group is None or not digests:
            return
        run = group.num_runs[self._kind()]
        mode = "with" if torch.is_grad_enabled() else "without"
        key = f"beginnings of {self.graph} {mode} gradients, run {run}"
        texts = group.peers.swap(key, json.dumps(dict(digests)), PATIENCE_S)
        if not texts or dist.get_rank(group_of(self.group_name)) != 0:
            return
        others = [json.loads(text) for text in texts]
        alike = [
            name for name, own in digests.items() if all(other.get(name) == own for other in others)
        ]
        if alike:
            _warn(alike, len(texts) + 1)

    def _is_turn(self, group: Agreed) -> bool:
        group.num_runs[self._kind()] += 1
        return group.num_runs[self._kind()] <= FIRST_RUNS

    def _kind(self) -> str:
        return f"beginnings of {self.graph} {torch.is_grad_enabled()}"


def _beginning(value: Any, dim: int) -> str:
    """Return a digest of a shard's first tokens; nothing if they tell nothing."""
    if type(value) is not Tensor or value.dtype == torch.bool or not value.numel():
        return ""
    if value.is_meta or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ""
    length = min(MOST_TOKENS, 1 << (value.shape[dim].bit_length() - 1))
    some = beginning_of(value.narrow(dim, 0, length))
    if some.numel() == 1 or bool((some == some.flatten()[0]).all()):
        return ""
    return digest(describe_table(some).encode())


def _warn(names: Sequence[str], num_ranks: int) -> None:
    begin = "input {} begins" if len(names) == 1 else "inputs {} begin"
    warnings.warn(
        f'options={{"mesh": ...}}: {begin.format(", ".join(names))} with the same numbers on all'
        f" {num_ranks} ranks. Each rank is to pass its own part of the sequence, as torch.chunk"
        " cuts it, and positions count from the start of the whole sequence. Where ranks really"
        " have the same tokens, filter this SequenceWarning",
        SequenceWarning,
        stacklevel=2,
    )
