"""Pass states and tokens along a sequence whose tokens are shared among ranks.

    a recurrence is affine in its state:   state' = decay * state + update    (or matrix @ state)
    so are all tokens of a rank:           after = decay of all * before + final
      =>
    every rank at once:   final and the decay of all its tokens, from a state of zeros
    one gather:           a pair (decay, final) of each rank, whatever the number of its tokens
    each rank:            before = the pairs of the ranks before it, one after the other

What a rank's tokens make of the state before them is linear in that state: its outputs are those
from a state of zeros, plus what they read of `before`. The gather is one of DTensor, whose backward
is a reduce-scatter, so gradients are exact.

`distribute(..., recurrent=)` names the modules that compute so. On one process, and in modules that
compute the whole sequence, there is nothing before the first token.

Assumes: contiguous shards in the order of the ranks, as `Shard` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.local_weights import computing
from cp_inductor.torch_private.checkpoint import rerun_within


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """A sequence whose tokens are shared among the ranks of a mesh axis.

    Attributes:
        mesh, axis: the axis whose ranks share it.
        length: how many tokens all ranks have.
    """

    mesh: DeviceMesh
    axis: int
    length: int | SymInt

    @property
    def world_size(self) -> int:
        """How many ranks share the sequence."""
        return self.mesh.size(self.axis)

    @property
    def rank(self) -> int:
        """The place of this rank among them."""
        return self.mesh.get_local_rank(self.axis)

    @property
    def longest(self) -> Any:
        """How many tokens the first rank has, and every other before the last that has any."""
        return (self.length + self.world_size - 1) // self.world_size

    def tokens_of(self, rank: int) -> Any:
        """Return how many tokens a rank has."""
        return torch.sym_max(0, torch.sym_min(self.longest, self.length - rank * self.longest))

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, (P, ...), whose gradients are summed over the ranks."""
        places: list[Placement] = [Replicate()] * self.mesh.ndim
        parts, sums = list(places), list(places)
        parts[self.axis], sums[self.axis] = Shard(0), Partial()
        shards = DTensor.from_local(part[None], self.mesh, parts, run_check=False)
        gathered: Tensor = shards.redistribute(self.mesh, places).to_local(grad_placements=sums)
        return gathered


@contextmanager
def sharing(sequence: SharedSequence | None) -> Iterator[None]:
    """Within this context, tensors of tokens are this rank's part of a sequence."""
    here = computing()
    before, here.sequence = here.sequence, sequence
    try:
        yield
    finally:
        here.sequence = before


class _Again:
    """Enters `sharing` again, when a checkpoint within a module recomputes."""

    def __init__(self, sequence: SharedSequence) -> None:
        self.sequence = sequence
        self.entered: list[Any] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Again) and other.sequence == self.sequence

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> None:
        self.entered.append(sharing(self.sequence))
        self.entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)


def shared_sequence() -> SharedSequence | None:
    """Return the sequence of which tensors are this rank's part; None if they are whole."""
    sequence: SharedSequence | None = computing().sequence
    if sequence is not None and not torch.compiler.is_compiling():
        rerun_within(_Again(sequence))
    return sequence


def pass_states(
    final: Tensor,
    *,
    decay: Tensor | None = None,
    matrix: Tensor | None = None,
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the states of a linear recurrence before this rank's tokens and after those of all.

    Args:
        final: the state that this rank's tokens leave, if there are only zeros before them.
        decay: what remains of the state before them, element by element: of a shape that
            broadcasts to that of `final`. 1 keeps the state, 0 forgets it, as at the border of a
            document.
        matrix: instead of `decay`, (..., K, K), by which the state (..., K, V) is multiplied from
            the left.
        initial: the state before the first token of all, the same on every rank; zeros if None.

    Returns:
        Both have the shape of `final`, and are in float32 if that is narrower. The first differs
        from rank to rank, the second is the same on all.

    Raises:
        UnsupportedPlacement: a tensor is a DTensor.
    """
    kept = matrix if decay is None else decay
    if kept is None or (matrix is not None and decay is not None):
        raise TypeError("pass_states takes either decay= or matrix=")
    _check_plain(final, kept, initial)
    with torch.autocast(final.device.type, enabled=False):
        return _pass_states(final, kept, initial, matrix is not None)


def _pass_states(
    final: Tensor, kept: Tensor, initial: Tensor | None, is_matrix: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(final.dtype, torch.float32)
    final, kept = final.to(dtype), kept.to(dtype)
    state = torch.zeros_like(final) if initial is None else initial.to(dtype)
    sequence = shared_sequence()
    if sequence is None:
        return state, _step(is_matrix, kept, final, state)
    states = [state]
    for pair in sequence.gather(torch.cat([kept.flatten(), final.flatten()])).unbind(0):
        one, other = pair.split([kept.numel(), final.numel()])
        state = _step(is_matrix, one.view(kept.shape), other.view(final.shape), state)
        states.append(state)
    # Ranks without tokens are the last. Every rank reads all states, so that every rank takes part
    # in the backward of the gather.
    last = sum(
        1 for rank in range(sequence.world_size) if rank * sequence.longest < sequence.length
    )
    stacked = torch.stack(states)
    return stacked[sequence.rank], stacked[last]


def _step(is_matrix: bool, kept: Tensor, final: Tensor, state: Tensor) -> Tensor:
    return (kept @ state if is_matrix else kept * state) + final


def tokens_before(tokens: Tensor, count: int, dim: int) -> Tensor:
    """Return the tokens before those of this rank, and zeros before the first of all.

    Args:
        tokens: this rank's.
        count: how many to return.
        dim: of `tokens`, along which they stand.

    Raises:
        UnsupportedPlacement: `tokens` is a DTensor.
    """
    _check_plain(tokens)
    dim %= tokens.ndim
    sequence = shared_sequence()
    if sequence is None:
        return _zeros(tokens, dim, count)
    tails, length = _tails(tokens, count, dim, sequence)
    every = torch.cat([_zeros(tokens, dim, count), *tails], dim)
    return every.narrow(dim, sequence.rank * length, count)


def last_tokens(tokens: Tensor, count: int, dim: int) -> Tensor:
    """Return the last tokens of all ranks, the same on each, and zeros before the first of all."""
    _check_plain(tokens)
    dim %= tokens.ndim
    sequence = shared_sequence()
    if sequence is None:
        return torch.cat([_zeros(tokens, dim, count), tokens], dim).narrow(
            dim, tokens.shape[dim], count
        )
    tails, length = _tails(tokens, count, dim, sequence)
    parts = [_zeros(tokens, dim, count)]
    for rank, tail in enumerate(tails):
        real = torch.sym_min(length, sequence.tokens_of(rank))
        parts.append(tail.narrow(dim, length - real, real))
    every = torch.cat(parts, dim)
    return every.narrow(dim, every.shape[dim] - count, count)


def _tails(
    tokens: Tensor, count: int, dim: int, sequence: SharedSequence
) -> tuple[tuple[Tensor, ...], Any]:
    """Gather the last tokens of each rank, as many of each: zeros stand before fewer."""
    length = min(count, sequence.longest)
    here = min(length, tokens.shape[dim])
    tail = tokens.narrow(dim, tokens.shape[dim] - here, here)
    if here < length:
        tail = torch.cat([_zeros(tokens, dim, length - here), tail], dim)
    return sequence.gather(tail.contiguous()).unbind(0), length


def _zeros(tokens: Tensor, dim: int, count: Any) -> Tensor:
    shape = list(tokens.shape)
    shape[dim] = count
    return tokens.new_zeros(shape)


def _check_plain(*tensors: Tensor | None) -> None:
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise UnsupportedPlacement(
            site="pass_states or tokens_before",
            expected="plain tensors of this rank's tokens",
            got="a DTensor",
            remedy="name the class of the module that calls it in distribute(..., recurrent=)",
        )
