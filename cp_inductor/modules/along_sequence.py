"""Pass states and tokens along a sequence whose tokens are shared among ranks.

    a recurrence is affine in its state:   state' = decay * state + update    (or matrix @ state)
    so are all tokens of a rank:           after = decay of all * before + final
      =>
    every rank at once:   final and the decay of all its tokens, from a state of zeros
    one gather:           a pair (decay, final) of each rank, whatever the number of its tokens
    each rank:            before = the pairs of the ranks before it, one after the other

Beyond `MOST_GATHERED` ranks every rank is sent some elements of all pairs instead, composes these,
and sends each rank its states: two exchanges of about two states each, however many ranks there
are. Tokens go to the next rank alone.

A rank's outputs are linear in the state before its tokens: those from a state of zeros, plus what
they read of `before`. The backward of the gather is a reduce-scatter, so gradients are exact. On
one process, and in modules that compute the whole sequence, nothing is before the first token.

Assumes: contiguous shards in the order of the ranks, as `Shard` makes them, on one mesh axis or on
several, each of which shards the parts of those before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.fx.traceback import annotate

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.reading import ComputingAgain, computing
from cp_inductor.torch_private.checkpoint import rerun_within
from cp_inductor.torch_private.groups import exchange_rows

# In meta["custom"] of the node, in Dynamo's graph, that gathers a part of each rank.
GATHERS = "cp_gathers_along_sequence"

# What is kept of a state: `torch.mul` of a decay, `torch.matmul` of a matrix, and a state.
Product = Callable[[Tensor, Tensor], Tensor]

# Sites at which a part that is compiled on its own has asked for the sequence.
_asking: set[str] = set()

# So many ranks gather the pairs of all. More do if they are those of several mesh axes.
MOST_GATHERED = 64


@dataclass(frozen=True, slots=True)
class SharedSequence:
    """A sequence whose tokens are shared among the ranks of mesh axes."""

    # mesh and axes: whose ranks share it.
    mesh: DeviceMesh
    axes: tuple[int, ...]
    length: int | SymInt  # how many tokens all ranks have
    site: str = ""  # of the module that computes on its own tokens

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
        with annotate({GATHERS: True}):
            whole = shards.redistribute(self.mesh, places)
        gathered: Tensor = whole.to_local(grad_placements=sums)
        return gathered

    @property
    def is_gathered(self) -> bool:
        """Whether each rank gets the pairs of all others."""
        return self.world_size <= MOST_GATHERED or len(self.axes) > 1

    def exchange(
        self, rows: Tensor, sent: list[int] | None = None, received: list[int] | None = None
    ) -> Tensor:
        """Send rows to each rank of the one axis, in order, and return those from each.

        They are as many for every rank, unless `sent` and `received` count them.
        """
        (axis,) = self.axes
        with annotate({GATHERS: True}):
            return exchange_rows(rows.contiguous(), received, sent, self.mesh, axis)


def _parts(length: Any, count: int) -> list[Any]:
    longest = (length + count - 1) // count
    return [torch.sym_max(0, torch.sym_min(longest, length - r * longest)) for r in range(count)]


def shared_sequence() -> SharedSequence | None:
    """Return the sequence of which tensors are this rank's part; None if they are whole."""
    sequence: SharedSequence | None = computing().sequence
    if sequence is not None:
        _note_question(sequence.site, torch.compiler.is_compiling())
        if not torch.compiler.is_compiling():
            rerun_within(ComputingAgain({"sequence": sequence}))
    return sequence


# Dynamo calls these functions while it traces, within a checkpoint, too, where it refuses to change
# an object.
@torch.compiler.assume_constant_result
def questions() -> int:
    """Return how often this thread has asked for the sequence."""
    count: int = computing().questions
    return count


@torch.compiler.assume_constant_result
def has_asked(site: str, since: int) -> bool:
    """Return whether it has asked since then, or may have, by a part that is compiled on its own.

    Such a part asks while it is traced, and not again.
    """
    return computing().questions > since or site in _asking


@torch.compiler.assume_constant_result
def _note_question(site: str, is_traced: bool) -> None:
    computing().questions += 1
    # Where the whole module is traced, no sequence is shared but in the trace.
    if is_traced and computing().sequence is not None:
        _asking.add(site)


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
    times = torch.mul if matrix is None else torch.matmul
    dtype = torch.promote_types(final.dtype, torch.float32)
    final, kept = final.to(dtype), kept.to(dtype)
    state = torch.zeros_like(final) if initial is None else initial.to(dtype)
    with torch.autocast(final.device.type, enabled=False):
        sequence = shared_sequence()
        if sequence is None:
            return state, times(kept, state) + final
        if sequence.lengths[sequence.rank] == 0:
            # It is given one token, of zeros, and takes part in the backward of the gather.
            size = kept.shape[-1]
            identity = 1.0 if matrix is None else torch.eye(size, dtype=dtype, device=kept.device)
            kept, final = _in_place_of(kept, identity), _in_place_of(final, 0.0)
        if not sequence.is_gathered:
            return _exchange_states(sequence, kept, final, state, times)
        states = [state]
        for pair in sequence.gather(torch.cat([kept.flatten(), final.flatten()])).unbind(0):
            first, other = pair.split([kept.numel(), final.numel()])
            states.append(times(first.view(kept.shape), states[-1]) + other.view(final.shape))
        # Every rank reads all states, so that every rank takes part in the backward of the gather.
        stacked = torch.stack(states)
        return stacked[sequence.rank], stacked[-1]


def _exchange_states(
    sequence: SharedSequence, kept: Tensor, final: Tensor, initial: Tensor, times: Product
) -> tuple[Tensor, Tensor]:
    if sequence.rank > 0:
        initial = _in_place_of(initial, 0.0)
    final = times(kept, initial) + final
    ranks, whole = sequence.world_size, final.shape
    if times is torch.mul:  # each element is a state, and what is kept of it a matrix
        kept, final = (part[..., None, None] for part in (kept.expand(whole), final))
    # A unit is some columns of a state, beside its matrix, so that there are as many as ranks.
    shape = final.shape
    blocks = min(shape[-1], math.ceil(ranks / math.prod(shape[:-2])))
    width = math.ceil(shape[-1] / blocks)
    final = F.pad(final, (0, blocks * width - shape[-1])).unflatten(-1, (blocks, width))
    final = final.movedim(-2, -3).flatten(0, -3)
    kept = kept.unsqueeze(-3).expand(*shape[:-2], blocks, -1, -1).flatten(0, -3)
    count, sizes = final.shape[0], [kept.shape[-1], final.shape[-1]]
    pairs = F.pad(torch.cat([kept, final], -1), (0, 0, 0, 0, 0, -count % ranks))
    some = sequence.exchange(pairs).unflatten(0, (ranks, -1))
    kept, final = some.split(sizes, -1)
    states = _compose(kept, final, times)
    before = torch.cat([torch.zeros_like(states[:1]), states[:-1]])
    both = torch.cat([before, states[-1:].expand_as(states)], -1)
    both = sequence.exchange(both.flatten(0, 1))[:count].unflatten(0, (*shape[:-2], blocks))
    before, after = (
        state.movedim(-3, -2).flatten(-2)[..., : shape[-1]].reshape(whole)
        for state in both.chunk(2, -1)
    )
    return before + initial, after


def _in_place_of(tensor: Tensor, other: Any) -> Tensor:
    """Return another value, with gradients of zeros for a tensor, which every rank has then."""
    always = torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.where(always, other, tensor)


def _compose(kept: Tensor, final: Tensor, times: Product) -> Tensor:
    """Return the state after each rank, of pairs (P, U, K, K) and (P, U, K, V).

    Runs of ranks are composed side by side, then one after the other.
    """
    count = final.shape[0]
    size = math.isqrt(count - 1) + 1
    kept, final = (
        F.pad(part, (0, 0, 0, 0, 0, 0, 0, -count % size)).unflatten(0, (-1, size))
        for part in (kept, final)
    )
    pairs = [(kept[:, 0], final[:, 0])]
    for first, other in zip(kept.unbind(1)[1:], final.unbind(1)[1:], strict=True):
        before, state = pairs[-1]
        pairs.append((times(first, before), times(first, state) + other))
    kept, final = (torch.stack(parts, 1) for parts in zip(*pairs, strict=True))
    states = [torch.zeros_like(final[0, 0])]
    for first, other in zip(kept[:-1, -1], final[:-1, -1], strict=True):
        states.append(times(first, states[-1]) + other)
    return (times(kept, torch.stack(states)[:, None]) + final).flatten(0, 1)[:count]


def tokens_before(tokens: Tensor, count: int, dim: int) -> Tensor:
    """Return the tokens before those of this rank, and zeros before the first of all.

    Args:
        tokens: this rank's.
        count: how many to return.
        dim: of `tokens`, along which they stand.

    Raises:
        UnsupportedPlacement: `tokens` is a DTensor.
    """
    return _tokens_until(tokens, count, dim, is_end=False)


def last_tokens(tokens: Tensor, count: int, dim: int) -> Tensor:
    """Return the last tokens of all ranks, the same on each, and zeros before the first of all."""
    return _tokens_until(tokens, count, dim, is_end=True)


def _tokens_until(tokens: Tensor, count: int, dim: int, *, is_end: bool) -> Tensor:
    """Return the last tokens before this rank's, or of all, which every rank reads of all."""
    _check_plain(tokens)
    dim %= tokens.ndim
    sequence = shared_sequence()
    if sequence is None:
        none = _zeros(tokens, dim, count)
        return (
            torch.cat([none, tokens], dim).narrow(dim, tokens.shape[dim], count) if is_end else none
        )
    lengths, rank = sequence.lengths, sequence.world_size if is_end else sequence.rank
    most = torch.sym_min(count, lengths[0])
    # A rank without tokens is given one, which is none of the sequence.
    here = torch.sym_min(most, torch.sym_min(lengths[sequence.rank], tokens.shape[dim]))
    tail = tokens.narrow(dim, tokens.shape[dim] - here, here)
    if here < most:  # zeros stand before fewer
        tail = torch.cat([_zeros(tokens, dim, most - here), tail], dim)
    if not sequence.is_gathered and not is_end and most == count:
        # Whoever has tokens stands behind a rank that has enough: only the last may have fewer.
        to_next, of_last = (
            [count * (at == other) for at in range(sequence.world_size)]
            for other in (rank + 1, rank - 1)
        )
        rows = tail.movedim(dim, 0)[: sum(to_next)]
        arrived = sequence.exchange(rows, to_next, of_last).movedim(0, dim)
        before = torch.cat([_zeros(tokens, dim, count), arrived], dim)
        return before.narrow(dim, sum(of_last), count)
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
            remedy="name the class of the module that calls it in parallelize(..., recurrent=)",
        )
