"""Run modules that mix tokens by a recurrence on each rank's own tokens.

    mixer(hidden (B, S, H) [Shard(1)]) -> out
      =>
    local = hidden.to_local()                                   this rank's tokens
    out = from_local(mixer's own forward(local))                [Shard(1)]
        its convolution: the last tokens of the rank before     `tokens_before`
        its recurrence: the state that the ranks before leave   `pass_states`

Everything between treats each token alone, and needs no other rank's. A rank's gradient of a weight
is its part of the sum. A rank without tokens computes one of zeros and drops the result.

On a mesh of several axes, ranks that hold the same tokens, or the same tokens of other heads, such
as those of tensor parallelism, share these tokens as well: each computes a part, for all heads, and
gathers the others. Weights that are sharded among them are gathered.

A mixer runs on the whole sequence instead (see `whole`) if it goes on from the states of a cache,
or is given what is not of tokens, such as a mask of pairs, which a warning says.

Assumes: the first tensor is (B, S, H), and so is the first result. Other results are the same on
every rank.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_inductor.dtensor.wrap import is_whole, wrap_parts
from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.along_sequence import SharedSequence, has_asked, sharing, tokens_before
from cp_inductor.modules.reading import ReadsLocally, computing, locally, scale_gradient
from cp_inductor.modules.whole import (
    OnWhole,
    drawing_alike,
    gathered,
    part_beside,
    shared_out,
    wrap_tokens,
)
from cp_inductor.modules.whole_batches import map_parts, tensors_of

# The dim of the sequence.
TOKENS = 1


class OnOwnTokens(OnWhole):
    """Computes on this rank's tokens, if it can."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's tokens, or those of all ranks."""
        begun = self.begin(args, kwargs)
        leaves = tensors_of(begun)
        tokens = next((leaf for leaf in leaves if isinstance(leaf, DTensor)), None)
        if tokens is None or tokens.ndim != 3 or Shard(TOKENS) not in tokens.placements:
            return super().forward(*args, **kwargs)
        other = next((leaf for leaf in leaves if not _is_part(leaf, tokens)), None)
        if other is not None:
            _warn_of_whole(type(self).__name__, other.ndim)
            return super().forward(*args, **kwargs)
        given, places = tokens, shared_out(tokens)
        tokens = given.redistribute(placements=places)
        axes = tuple(axis for axis, place in enumerate(places) if place == Shard(TOKENS))
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        sequence = SharedSequence(tokens.device_mesh, axes, tokens.shape[TOKENS], name)
        args, kwargs = map_parts(
            lambda _, leaf: _own(tokens if leaf is given else leaf, tokens),
            "",
            begun,
            is_ours=False,
        )
        alike = nullcontext() if torch.compiler.is_compiling() else drawing_alike(self, tokens)
        with sharing(sequence), alike:
            result = locally(self.compute, *args, **kwargs)
        if not has_asked(name):
            raise UnsupportedPlacement(
                site=type(self).__name__,
                expected="a module that passes states or tokens along the sequence",
                got="one whose forward called no known function, nor pass_states or tokens_before",
                remedy="register the function that it calls with register_recurrence; if it treats"
                " each token alone, leave its class out of parallelize(..., recurrent=)",
            )
        first, *rest = result if isinstance(result, tuple) else (result,)
        site = type(self).__name__
        out = _wrapped(first, tokens, given, site)
        states = map_parts(
            lambda _, state: _state(state, tokens, sequence, site), "", rest, is_ours=True
        )
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
CONVOLUTIONS: dict[type, type[nn.Module]] = {nn.Conv1d: ShortConvolution}


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


def _wrapped(out: Any, tokens: DTensor, given: DTensor, site: str) -> Any:
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
    places = [p if type(p) is Shard and p.dim < 2 else Replicate() for p in given.placements]
    return parts.redistribute(tokens.device_mesh, places)
