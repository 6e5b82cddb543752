"""Check what a sequence-sharded attention asks for: the rest is refused, never approximated."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_inductor.errors import (
    InvalidArgument,
    UnevenSequence,
    UnsupportedAttention,
    UnsupportedPlacement,
)
from cp_inductor.torch_private.dtensor import torchs_context_parallel
from cp_inductor.torch_private.modes import is_transformed

UNENDING = "over an empty DTensor, torch's views do not end"
UNPERMUTED = (
    "pass load_balancer=None to torch's _context_parallel_shard, or set"
    " torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
    " before torch shards the batch, or use cp_inductor.context_parallel: plans balance the work"
)


def check_attention(*, query: Tensor, key: Tensor, site: str) -> None:
    """Refuse an attention that no plan computes."""
    if is_transformed(query) or is_transformed(key):
        refuse_transform(site)
    if query.ndim != 4 or key.ndim != 4:
        raise UnsupportedAttention(
            site=site,
            expected="query, key and value of shape (batch, heads, sequence, head dim)",
            got=f"a query of {query.ndim} and a key of {key.ndim} dims",
            remedy="unsqueeze the missing dims before the attention, and squeeze them after it",
        )
    if query.shape[0] != key.shape[0]:
        raise UnsupportedAttention(
            site=site,
            expected="equal batch sizes of query and key",
            got=f"{query.shape[0]} and {key.shape[0]}",
            remedy="expand the smaller batch before the attention, as in"
            " k.expand(q.shape[0], -1, -1, -1)",
        )


def check_mesh(mesh: object, *, site: str) -> None:
    """Refuse what is no mesh, such as the name of an axis, and a mesh of several axes."""
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgument(
            site=site,
            expected="a DeviceMesh of one axis",
            got=f"a {type(mesh).__name__}, {mesh!r:.60}",
            remedy="build it with torch.distributed.device_mesh.init_device_mesh; of several axes,"
            ' pass one, as in mesh["cp"]',
        )
    if mesh.ndim != 1:
        raise UnsupportedPlacement(
            site=site,
            expected="a 1-D mesh",
            got=f"a {mesh.ndim}-D mesh with axes {mesh.mesh_dim_names}",
            remedy='name the axis that shards the sequence, as in mesh["cp"]',
        )


def dim_of(tensor: object, dim: object, *, site: str) -> int:
    """Return a dim of a tensor, counted from its first; refuse a dim that it does not have."""
    if not isinstance(tensor, Tensor):
        raise InvalidArgument(
            site=site,
            expected="a tensor",
            got=f"a {type(tensor).__name__}",
            remedy="pass tensors of a sequence",
        )
    if type(dim) is not int or not -tensor.ndim <= dim < tensor.ndim:
        raise InvalidArgument(
            site=site,
            expected=f"a dim of a tensor of shape {tuple(tensor.shape)}",
            got=f"{dim!r}",
            remedy="pass its sequence dim",
        )
    return dim % tensor.ndim


def refuse_both_masks(site: str, mask: object) -> NoReturn:
    """Refuse attention that is given a mask and is_causal=True, as SDPA does."""
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else mask
    raise UnsupportedAttention(
        site=site,
        expected="is_causal=True or an attn_mask, of which SDPA takes one",
        got=f"is_causal=True and an attn_mask of shape {shape}",
        remedy="include causality in the mask, as in mask & causal, and pass is_causal=False",
    )


def refuse_transform(site: str) -> NoReturn:
    """Refuse attention within vmap, grad or another transform of torch.func."""
    raise UnsupportedAttention(
        site=site,
        expected="query, key and value that no transform of torch.func (vmap, grad, ...) wraps",
        got="tensors within such a transform, of which exchanges between ranks know nothing",
        remedy="make what is mapped a part of the batch, as in q.flatten(0, 1), or transform what"
        " is around the attention alone",
    )


def refuse_empty(site: str, tensor: Tensor) -> NoReturn:
    """Refuse a batch without tokens: the rule of DTensor for views (2.13 to 2.15) loops on 0."""
    raise UnevenSequence(
        site=site,
        expected=f"a batch with tokens: {UNENDING}",
        got=f"a tensor of shape {tuple(tensor.shape)}",
        remedy="skip the batch, on all ranks",
    )


def refuse_plain_ids(site: str, ids: Tensor) -> NoReturn:
    """Refuse plain ids in a distributed model, of which nothing says how ranks share them."""
    raise UnsupportedPlacement(
        site=site,
        expected="ids as a DTensor, in a model whose weights are DTensors",
        got=f"a plain tensor of shape {tuple(ids.shape)}",
        remedy="pass distribute_tensor(ids, mesh, [Shard(1)]), within"
        " torch.distributed.tensor.experimental.implicit_replication()",
    )


def may_be_permuted() -> bool:
    """Whether torch's context parallelism has sharded something here, with its load balancer on.

    Torch leaves flags in the process. Not noticed are batches that a program has permuted itself.
    """
    torchs = torchs_context_parallel()
    return torchs.is_balanced and (torchs.is_around or torchs.has_shards)


def refuse_permuted(site: str, *, remedy: str = UNPERMUTED) -> None:
    """Refuse shards that torch's load balancer may have permuted, where an attention is planned.

    Compiled graphs ask in each run. `cp_inductor.context_parallel` clears torch's flag inside.
    """
    if may_be_permuted():
        raise UnsupportedPlacement(
            site=site,
            expected="contiguous shards of the sequence, in the order of the ranks",
            got="shards of torch's context parallelism, whose load balancer may have permuted them",
            remedy=remedy,
        )


def refuse_two_contexts(site: str) -> None:
    """Refuse to shard buffers within torch's own `context_parallel`."""
    if torchs_context_parallel().is_around:
        raise UnsupportedPlacement(
            site=site,
            expected="one context that shards the sequence",
            got="a region of this library and torch's context_parallel, nested",
            remedy="use only one of the two",
        )
