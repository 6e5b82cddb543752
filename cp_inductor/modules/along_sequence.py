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

Assumes: contiguous shards in the order of the ranks, as `Shard` makes them, on one mesh axis or on
several, each of which shards the parts of those before it.
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
    """A sequence whose tokens are shared among the ranks of mesh axes.

    Attributes:
        mesh, axes: whose ranks share it.
        length: how many tokens all ranks have.
    """

    mesh: DeviceMesh
    axes: tuple[int, ...]
    length: int | SymInt

    @property
    def world_size(self) -> int:
        """How many ranks share the sequence."""
        return len(self.lengths)

    @property
    def rank(self) -> int:
        """The place of this rank among them."""
        rank = 0
        for axis in self.axes:
            rank = rank * self.mesh.size(axis) + self.mesh.get_local_rank(axis)
        return rank

    @property
    def lengths(self) -> list[Any]:
        """How many tokens each rank has. Those without any may be between others."""
        lengths = [self.length]
        for axis in self.axes:
            lengths = [part for whole in lengths for part in _parts(whole, self.mesh.size(axis))]
        return lengths

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, (P, ...), whose gradients are summed over the ranks."""
        places: list[Placement] = [Replicate()] * self.mesh.ndim
        parts, sums = list(places), list(places)
        for axis in self.axes:
            parts[axis], sums[axis] = Shard(0), Partial()
        shards = DTensor.from_local(part[None], self.mesh, parts, run_check=False)
        gathered: Tensor = shards.redistribute(self.mesh, places).to_local(grad_placements=sums)
        return gathered


def _parts(length: Any, count: int) -> list[Any]:
    longest = (length + count - 1) // count
    return [
        torch.sym_max(0, torch.sym_min(longest, length - rank * longest)) for rank in range(count)
    ]


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
    if sequence.lengths[sequence.rank] == 0:
        # It is given one token, of zeros, and takes part in the backward of the gather.
        always = torch.ones((), dtype=torch.bool, device=final.device)
        kept = torch.where(always, _identity(is_matrix, kept), kept)
        final = torch.where(always, 0.0, final)
    states = [state]
    for pair in sequence.gather(torch.cat([kept.flatten(), final.flatten()])).unbind(0):
        one, other = pair.split([kept.numel(), final.numel()])
        state = _step(is_matrix, one.view(kept.shape), other.view(final.shape), state)
        states.append(state)
    # Every rank reads all states, so that every rank takes part in the backward of the gather.
    stacked = torch.stack(states)
    return stacked[sequence.rank], stacked[-1]


def _identity(is_matrix: bool, kept: Tensor) -> Tensor:
    if not is_matrix:
        return torch.ones_like(kept)
    return torch.eye(kept.shape[-1], dtype=kept.dtype, device=kept.device).expand_as(kept)


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
    return _tokens_until(sequence.rank, tokens, count, dim, sequence)


def last_tokens(tokens: Tensor, count: int, dim: int) -> Tensor:
    """Return the last tokens of all ranks, the same on each, and zeros before the first of all."""
    _check_plain(tokens)
    dim %= tokens.ndim
    sequence = shared_sequence()
    if sequence is None:
        return torch.cat([_zeros(tokens, dim, count), tokens], dim).narrow(
            dim, tokens.shape[dim], count
        )
    return _tokens_until(sequence.world_size, tokens, count, dim, sequence)


def _tokens_until(
    rank: int, tokens: Tensor, count: int, dim: int, sequence: SharedSequence
) -> Tensor:
    """Return the last tokens of the ranks before one. All read all, see `_pass_states`."""
    lengths = sequence.lengths
    most = torch.sym_min(count, lengths[0])
    # A rank without tokens is given one, which is none of the sequence.
    here = torch.sym_min(most, torch.sym_min(lengths[sequence.rank], tokens.shape[dim]))
    tail = tokens.narrow(dim, tokens.shape[dim] - here, here)
    if here < most:  # zeros stand before fewer
        tail = torch.cat([_zeros(tokens, dim, most - here), tail], dim)
    parts, start = [_zeros(tokens, dim, count)], 0
    for other, sent in enumerate(sequence.gather(tail.contiguous()).unbind(0)):
        real = torch.sym_min(most, lengths[other])
        parts.append(sent.narrow(dim, most - real, real))
        start = start + real if other < rank else start
    return torch.cat(parts, dim).narrow(dim, start, count)


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
