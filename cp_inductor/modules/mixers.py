"""Run modules that mix tokens themselves: on the whole sequence, or on each rank's own tokens.

    mixer(hidden (B, S, H) [Shard(1)]) -> out
      =>
    whole = hidden's tokens of all ranks, a plain tensor        gathered; `OnWhole`
    weight = weight.to_local(grad_placements=[Partial()])
    out = mixer's own forward(whole)                            by every rank
    from_local(this rank's tokens of out)                       [Shard(1)]
      =>
    local = hidden.to_local()                                   this rank's tokens; `OnOwnTokens`
    out = from_local(mixer's own forward(local))                [Shard(1)]
        its convolution: the last tokens of the rank before     `tokens_before`
        its recurrence: the state that the ranks before leave   `pass_states`

On the whole sequence every rank computes all tokens, with the time and the memory that it takes on
one process, and keeps its own. Its gradients, of weights and of what it gathered, are those of the
tokens that it keeps: a part of the sum. Modules that begin a sequence, such as the patches of an
image, are treated alike: the result is sharded.

On its own tokens a rank needs no other rank's, but for states and the last tokens before them. A
rank without tokens computes one of zeros and drops the result. Ranks that hold the same tokens, as
by tensor parallelism, share them: each computes a part, and gathers the others. A mixer runs on the
whole sequence instead if it goes on from the states of a cache, or is given what is not of tokens,
such as a mask of pairs, which a warning says.

Assumes: the batch is dim 0. On the whole sequence a result has the sequence in the dim in which it
was sharded before, or in dim 1; random numbers may differ from rank to rank. On a rank's own tokens
the first tensor is (B, S, H), and so is the first result; others are the same on every rank.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_inductor.dtensor.wrap import is_whole, wrap_parts, wrap_whole
from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.along_sequence import SharedSequence, has_asked, questions, tokens_before
from cp_inductor.modules.reading import ReadsLocally, computing, computing_with, locally, reading_of
from cp_inductor.modules.weights import scale_gradient
from cp_inductor.modules.whole_batches import TOKENS, map_parts, tensors_of
from cp_inductor.plan.grid import shard_lengths


class OnWhole(ReadsLocally):
    """Computes on all tokens, and returns this rank's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the arguments, and compute."""
        tensors = [leaf for leaf in tensors_of((args, kwargs)) if isinstance(leaf, DTensor)]
        reading = reading_of(self) if computing().is_running else None
        meshes = [leaf.device_mesh for leaf in tensors] + ([reading.mesh] if reading else [])
        if not meshes:
            return super().forward(*args, **kwargs)
        mesh = meshes[0]
        placements = _placements_of_result(tensors, mesh, type(self).__name__)
        args, kwargs = map_parts(lambda _, leaf: gathered(leaf), (args, kwargs))
        # A checkpoint may recompute this together with modules that share the sequence.
        left: list[tuple[nn.Module, str]] = []
        with computing_with(sequence=None, left=left):
            result = locally(super().forward, *args, **kwargs)
        _share_what_is_left(left, mesh, placements)
        of_batch = (tensor for tensor in tensors if Shard(0) in tensor.placements)
        batch = next(((t.to_local().shape[0], t.shape[0]) for t in of_batch), None)
        return map_parts(lambda _, x: own_part(x, mesh, placements, batch), result, is_ours=True)


def _share_what_is_left(
    left: Sequence[tuple[nn.Module, str]], mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Give each rank its share of the gradient of a loss that all have left in an attribute.

    Every rank differentiates it, and they sum their gradients of what it was made of.
    """
    sizes = zip(mesh.shape, placements, strict=True)
    num_alike = math.prod([size for size, place in sizes if place != Shard(0)])
    for module, name in left:
        loss = getattr(module, name, None)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            continue
        if num_alike < mesh.size():
            raise UnsupportedPlacement(
                site=f"{type(module).__name__}.{name}",
                expected="a module that leaves no loss, as the batch is sharded",
                got="one of this rank's part of the batch",
                remedy="compute it from what the module returns",
            )
        # Whoever adds it to what is of all tokens has a DTensor's gradient for it.
        whole = loss if isinstance(loss, DTensor) else wrap_whole(loss, mesh)
        setattr(module, name, scale_gradient(whole, 1 / num_alike))


def _placements_of_result(read: Sequence[DTensor], mesh: DeviceMesh, site: str) -> list[Placement]:
    """Return the placements of the first argument along the sequence, or those of its beginning."""
    for tensor in read:
        if any(isinstance(place, Shard) and place.dim > 0 for place in tensor.placements):
            return list(tensor.placements)
    places: list[Placement] = [
        Shard(0) if any(tensor.placements[axis] == Shard(0) for tensor in read) else Replicate()
        for axis in range(mesh.ndim)
    ]
    free = [axis for axis, placement in enumerate(places) if placement == Replicate()]
    if len(free) != 1:
        raise UnsupportedPlacement(
            site=site,
            expected="an argument that is sharded along the sequence, or one mesh axis on which"
            " none is sharded, for the sequence that begins here",
            got=f"{len(free)} such axes of {mesh.mesh_dim_names}",
            remedy="parallelize the model on the axis of the sequence alone, or shard the batch on"
            " the others",
        )
    places[free[0]] = Shard(TOKENS)
    return places


def gathered(leaf: Any) -> Any:
    """Return the whole sequence of this rank's batch entries, whose gradient is a part."""
    if not isinstance(leaf, DTensor):
        return leaf
    mesh = leaf.device_mesh
    places = [p if p == Shard(0) and leaf.ndim > 1 else Replicate() for p in leaf.placements]
    parts = [p if p == Shard(0) else Partial() for p in places]
    return leaf.redistribute(mesh, places).to_local(grad_placements=parts)


@contextmanager
def drawing_alike(block: nn.Module, tokens: DTensor) -> Iterator[None]:
    """Refuse random numbers for unequally many tokens: the ranks would draw apart from then on."""
    is_uneven = any(
        tokens.shape[place.dim] % size
        for place, size in zip(tokens.placements, tokens.device_mesh.shape, strict=True)
        if isinstance(place, Shard)
    )
    state_of = getattr(torch.get_device_module(tokens.device), "get_rng_state", torch.get_rng_state)
    states = (torch.get_rng_state, state_of) if is_uneven else ()
    before = [state() for state in states]
    yield
    if not all(torch.equal(state(), last) for state, last in zip(states, before, strict=True)):
        raise UnsupportedPlacement(
            site=type(block).__name__,
            expected="a module that draws as many numbers on every rank",
            got=f"random numbers for this rank's part of {tuple(tokens.shape)}, which the ranks do"
            " not divide",
            remedy="pad the sequence to a multiple of the ranks, or draw outside of the module",
        )


def dims_of_tokens(tokens: Tensor) -> int:
    """Return how many dims tell tokens apart: of (B, S, ...) two, of (T, ...) one."""
    return 2 if tokens.ndim > 2 else 1


def shared_out(tokens: DTensor, dims: int | None = None) -> list[Shard]:
    """Return placements of tokens of which each rank computes its own: shards of the first dims."""
    # If ranks hold the same tokens, each takes a part. Otherwise gradients would count twice.
    dims = dims or dims_of_tokens(tokens)
    parts = [p if type(p) is Shard and p.dim < dims else Shard(dims - 1) for p in tokens.placements]
    # If the backward is the first to ask whether a length is below 3 ranks, its symbol becomes 2
    # after torch (2.13) has counted results of the forward, which it was one of. So ask here.
    changes = zip(parts, tokens.placements, tokens.device_mesh.shape, strict=True)
    any(tokens.shape[part.dim] < size for part, before, size in changes if part != before)
    return parts


def wrap_tokens(out: Tensor, tokens: DTensor, dims: int | None = None) -> DTensor:
    """Wrap what was computed of this rank's tokens, with as many features as it has."""
    dims = dims or dims_of_tokens(tokens)
    shape = (*tokens.shape[:dims], *out.shape[dims:])
    return wrap_parts(out, tokens.device_mesh, tokens.placements, shape)


def part_beside(other: Tensor, tokens: DTensor) -> Tensor:
    """Return what a rank's own tokens meet of another tensor, whose gradient is a part.

    Args:
        other: (B, S, ...) or (1, S, ...) of all tokens, of which the rank takes those of its own;
            (B, ...), of which it takes those of its batch entries; or anything, all of it.
        tokens: (B, S, ...), or (T, ...).
    """
    mesh, dims = tokens.device_mesh, dims_of_tokens(tokens)
    if not isinstance(other, DTensor):
        other = wrap_whole(other, mesh)
    has_batch = other.ndim > 0 and other.shape[0] == tokens.shape[0]
    is_of_tokens = other.ndim >= dims and other.shape[dims - 1] == tokens.shape[dims - 1]
    is_of_tokens = is_of_tokens and (has_batch or (dims == 2 and other.shape[0] == 1))
    places = [
        place if (is_of_tokens if place == Shard(dims - 1) else has_batch) else Replicate()
        for place in shared_out(tokens)
    ]
    parts = [Partial() if place.is_replicate() else place for place in places]
    own: Tensor = other.redistribute(mesh, places).to_local(grad_placements=parts)
    return own


def own_part(
    leaf: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], batch: tuple[int, int] | None
) -> DTensor:
    """Return a DTensor of this rank's part of a plain tensor that has all tokens.

    Args:
        leaf: (B, S, ...), or with the sequence in the dim that `placements` shard; or a DTensor,
            which is returned as it is.
        mesh, placements: of the result.
        batch: how many entries the batch has on this rank and on all of them, if it is sharded.
    """
    if isinstance(leaf, DTensor):
        return leaf
    (dim,) = {p.dim for p in placements if isinstance(p, Shard) and p.dim > 0}
    if leaf.ndim <= dim:
        raise UnsupportedPlacement(
            site="parallelize(..., whole=)",
            expected=f"modules that return tensors with the sequence in dim {dim}",
            got=f"one of shape {tuple(leaf.shape)}",
            remedy="name a module inside it that returns tokens",
        )
    shape = list(leaf.shape)
    if batch is not None and shape[0] == batch[0]:
        shape[0] = batch[1]
    # If ranks hold the same tokens, each takes a part. Otherwise gradients would count twice.
    places: list[Shard] = [p if isinstance(p, Shard) else Shard(dim) for p in placements]
    for axis, place in enumerate(places):
        if place.dim == dim:
            rank = mesh.get_local_rank(axis)
            lengths = shard_lengths(leaf.shape[dim], mesh.size(axis))
            leaf = leaf.narrow(dim, sum(lengths[:rank]), lengths[rank])
    return wrap_parts(leaf, mesh, places, shape).redistribute(mesh, placements)


class OnOwnTokens(OnWhole):
    """Computes on this rank's tokens, if it can."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's tokens, or those of all ranks."""
        begun = self.begin(args, kwargs)
        leaves, site = tensors_of(begun), type(self).__name__
        shards = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
        if shards is None or shards.ndim != 3 or Shard(TOKENS) not in shards.placements:
            return super().forward(*args, **kwargs)
        other = next((leaf for leaf in leaves if not _is_part(leaf, shards)), None)
        if other is not None:
            _warn_of_whole(site, other.ndim)
            return super().forward(*args, **kwargs)
        places = shared_out(shards)
        tokens = shards.redistribute(placements=places)
        axes = tuple(axis for axis, place in enumerate(places) if place == Shard(TOKENS))
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        dim = SharedSequence(tokens.device_mesh, axes, tokens.shape[TOKENS], name)
        args, kwargs = map_parts(lambda _, x: _own(tokens if x is shards else x, tokens), begun)
        alike = nullcontext() if torch.compiler.is_compiling() else drawing_alike(self, tokens)
        asked = questions()
        with computing_with(sequence=dim), alike:
            result = locally(self.compute, *args, **kwargs)
        if not has_asked(name, asked):
            raise UnsupportedPlacement(
                site=site,
                expected="a module that passes states or tokens along the sequence",
                got="one whose forward called no known function, nor pass_states or tokens_before",
                remedy="register the function that it calls with register_recurrence; if it treats"
                " each token alone, leave its class out of parallelize(..., recurrent=)",
            )
        first, *rest = result if isinstance(result, tuple) else (result,)
        out = _wrapped(first, tokens, shards, site)
        states = map_parts(lambda _, state: _state(state, tokens, dim, site), rest, is_ours=True)
        return (out, *states) if isinstance(result, tuple) else out

    def begin(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments to compute with; None if the whole sequence is to be computed."""
        return args, kwargs

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's tokens."""
        return super(OnWhole, self).forward(*args, **kwargs)


class ShortConvolution(ReadsLocally):
    """A causal `nn.Conv1d`, padded with K - 1 zeros on both sides, whose caller drops the end."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Convolve this rank's tokens, and the K - 1 before them."""
        if computing().sequence is None:
            return super().forward(tokens)
        self_: Any = self
        count = self_.kernel_size[0] - 1
        padded = (self_.padding, self_.stride, self_.dilation, self_.padding_mode)
        if padded != ((count,), (1,), (1,), "zeros"):
            raise UnsupportedPlacement(
                site=type(self).__name__,
                expected=f"a causal convolution, padded with {count} zeros",
                got=f"padding, stride, dilation and padding_mode {padded}",
                remedy="name the module around it in parallelize(..., whole=)",
            )
        longer = torch.cat([tokens_before(tokens, count, -1), tokens], -1)
        out: Tensor = super().forward(longer)
        # What stands behind the last token belongs to the next rank. Nobody may read it here.
        return F.pad(out[..., count : count + tokens.shape[-1]], (0, count), value=float("nan"))


# In modules that compute on their own tokens.
CONVOLUTIONS: dict[type, type[ReadsLocally]] = {nn.Conv1d: ShortConvolution}


# Dynamo (2.13) does not trace warnings.
@torch.compiler.assume_constant_result
def _warn_of_whole(site: str, ndim: int) -> None:
    warnings.warn(
        f"{site} is given a tensor of {ndim} dims that is not one of tokens, so every rank computes"
        " this module on the whole sequence, with the time and the memory that it takes on one"
        " process. Name its class in parallelize(..., whole=) to silence this warning.",
        stacklevel=2,
    )


def _is_part(leaf: Tensor, tokens: DTensor) -> bool:
    """Whether a tensor is of the tokens, or has nothing to do with them."""
    if leaf.ndim < 2:
        return not isinstance(leaf, DTensor) or is_whole(leaf)
    is_alike = leaf.ndim < 4 and leaf.shape[TOKENS] == tokens.shape[TOKENS]
    # Not `in`: to Dynamo (2.13) a number is in no tuple that holds a symbol.
    return is_alike and (leaf.shape[0] == tokens.shape[0] or leaf.shape[0] == 1)


def _own(leaf: Tensor, tokens: DTensor) -> Tensor:
    """Return this rank's part of a tensor of tokens, and all of any other."""
    if leaf.ndim < 2:
        return gathered(leaf)
    own = part_beside(leaf, tokens)
    return own if own.shape[TOKENS] else F.pad(own, (0, 0) * (own.ndim - 2) + (0, 1))


def _state(state: Tensor, tokens: DTensor, sequence: SharedSequence, site: str) -> DTensor:
    """Wrap what a rank returns beside its tokens: a state, which all ranks of the sequence have.

    Each of them differentiates it, and they sum their gradients of what it was made of. So each
    takes its share.
    """
    mesh, places = tokens.device_mesh, list(tokens.placements)
    is_of_tokens = state.ndim > 1 and any(state.shape[TOKENS] == n for n in sequence.lengths)
    of_batch = state.ndim > 0 and state.shape[0] == tokens.to_local().shape[0]
    if (is_of_tokens and of_batch) or (Shard(0) in places and not of_batch):
        raise UnsupportedPlacement(
            site=site,
            expected="results beside the first that are states (B, ...), the same on all ranks",
            got=f"{tuple(state.shape)}, which may be of this rank's tokens alone",
            remedy="return it from another module, or name this one in parallelize(..., whole=)",
        )
    places = [p if p == Shard(0) else Replicate() for p in places]
    shape = (tokens.shape[0], *state.shape[1:]) if of_batch else state.shape
    return wrap_parts(scale_gradient(state, 1 / sequence.world_size), mesh, places, shape)


def _wrapped(out: Any, tokens: DTensor, like: DTensor, site: str) -> Any:
    local = tokens.to_local()
    length = local.shape[TOKENS]
    if not isinstance(out, Tensor) or out.shape[:2] != (local.shape[0], max(length, 1)):
        raise UnsupportedPlacement(
            site=site,
            expected="a module whose first result is (B, S, ...)",
            got=f"{tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
            remedy="name a module around it that returns tokens",
        )
    parts = wrap_tokens(out[:, :length], tokens)
    # What was a sum over ranks, or sharded by features, is neither after the last projection.
    places = [p if type(p) is Shard and p.dim < 2 else Replicate() for p in like.placements]
    return parts.redistribute(tokens.device_mesh, places)
