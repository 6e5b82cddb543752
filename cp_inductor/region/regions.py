"""A region of Python in which attention is over a sequence that is sharded over ranks.

    with SequenceRegion(mesh):
        scaled_dot_product_attention(q, k, v)             q, k, v: this rank's shards
          => scaled_dot_product_attention(*DTensors [Shard(2)]).to_local()

A region only wraps shards into DTensors. From there on, everything is as if the model had been
called with DTensors: in eager code their handler runs the op; in a compile, which traces the region
as part of the model, the graph pass finds them. Nothing is patched, because a region is a
TorchFunctionMode. It also works for code that imported the function earlier, for eager code between
two graphs, and on every thread on which autograd runs a backward. Code that a
`torch.utils.checkpoint` in the region recomputes later runs in the region again.

Assumes: shards are in rank order, as torch.chunk cuts the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from cp_inductor import config
from cp_inductor.dtensor.axis import is_sequence_sharded, whole_of_shard
from cp_inductor.dtensor.limits import (
    check_attention,
    check_mesh,
    refuse_both_masks,
    refuse_transform,
)
from cp_inductor.dtensor.rules.attention import attend
from cp_inductor.dtensor.wrap import wrap_shard, wrap_whole
from cp_inductor.errors import (
    CPError,
    UnevenSequence,
    UnsupportedAttention,
    UnsupportedKernel,
    UnsupportedPlacement,
)
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.region.marks import FLEX, MARK
from cp_inductor.region.modes import (
    MULTI_HEAD,
    SITE,
    WORDS_OF_WEIGHTS,
    RegionMode,
    has_body,
    is_opaque,
    is_sdpa,
    placed_like,
    refuse,
    type_attended,
    typers_of_program,
    words_of_opaque,
)
from cp_inductor.sequence.eager import EagerTyper
from cp_inductor.sequence.types import first_own
from cp_inductor.source import user_line
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.kernel_table import is_a_kernel_enabled
from cp_inductor.torch_private.checkpoint import rerun_within
from cp_inductor.torch_private.dtensor import torchs_context_parallel
from cp_inductor.torch_private.modes import (
    function_modes_of_program,
    is_transforming,
    multi_head_attention,
    needs_weights,
    note_parameters,
    run_uncompiled,
)
from cp_inductor.trust.agreement import tell_refusal
from cp_inductor.trust.unreduced import watch_gradients

# Weights go into these.
_PRODUCTS = frozenset(
    {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.einsum}
)


class SequenceRegion(RegionMode):
    """Attend over the sequence whose shards are on the ranks of a mesh.

    Args:
        mesh: 1-D.
        lengths: of whole sequences, if known. A length that does not divide by the ranks must be.
        buffers: shards that were cut for the region, each with its sequence dim and its whole.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        lengths: Sequence[int] = (),
        *,
        buffers: Sequence[tuple[Tensor, int, Tensor]] = (),
    ) -> None:
        super().__init__()
        check_mesh(mesh, site="a context-parallel region")
        self.mesh = mesh
        self.lengths = tuple(lengths)
        self.whole_of_shard = _whole_lengths(mesh, lengths)
        self.group_name, self.rank = str(mesh.get_group().group_name), mesh.get_local_rank()
        # What is not attention is typed in eager; a compile types its graph.
        self.buffers = buffers
        self.typer: EagerTyper | None = None
        # Dynamo (2.13 to 2.15) does not let a mode enter itself while it is asked.
        self.copy = copy(self)
        self.copy.copy = self

    def _call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return self._call_in_region(func, args, kwargs)
        try:
            return self._call_in_region(func, args, kwargs)
        except CPError as error:
            # Other ranks may wait for this one in an attention: they learn what it refuses.
            tell_refusal(self.group_name, error)
            raise

    def _call_in_region(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_compiling = torch.compiler.is_compiling()
        if is_sdpa(func):
            return self._attend(func, *args, **kwargs)
        if func is MULTI_HEAD:
            return self._attend_multi_head(args, kwargs)
        if func is FLEX and is_compiling:
            return self._attend_flex(*args, **kwargs)
        if is_opaque(func):
            refuse(UnsupportedAttention, **words_of_opaque(func))
        if has_body(func):
            return self._call_with_body(func, args, kwargs)
        if is_compiling:
            return func(*args, **kwargs)
        if func in _PRODUCTS:
            watch_gradients(self.group_name, (*args, *kwargs.values()))
        typer = self.typing()
        return func(*args, **kwargs) if typer is None else typer.run(func, args, kwargs)

    def typing(self) -> EagerTyper | None:
        """Return what types the program inside: of the outermost region over these ranks."""
        if not config.check_sequence or self.mesh.size() == 1:
            return None
        if self.typer is None:
            outer = [region for region in self._alike() if region is not self]
            typer = outer[0].typing() if outer else None
            self.typer = self.copy.typer = typer or EagerTyper(self.group_name, self._is_even)
            for buffer in self.buffers:
                self.typer.declare(*buffer)
        return self.typer

    def _alike(self) -> list[SequenceRegion]:
        """Return the regions over these ranks that the program is in."""
        return [r for r in _regions_of_program() if r.group_name == self.group_name]

    def _is_even(self, length: int) -> bool:
        """Whether all ranks have as many tokens as this one, of its so many."""
        return self.whole_of_shard.get(length, 0) % self.mesh.size() == 0

    def judge(self) -> None:
        """Refuse what was mixed inside and leaves the region: it may be differentiated outside."""
        typer, self.typer, self.copy.typer = self.typer, None, None
        if typer is None or not config.check_sequence:
            return
        if any(region is not self.copy for region in self._alike()):
            return  # the outer one will
        try:
            typer.check_left()
        except CPError as error:
            tell_refusal(self.group_name, error)
            raise

    def _call_with_body(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not _has_tensor((*args, *kwargs.values())):
            refuse(
                UnsupportedAttention,
                expected="a tensor among the arguments of a checkpoint or other higher-order op",
                got="no tensor",
                remedy="pass the tensors that the function reads as arguments, instead of"
                " capturing them",
            )
        named = {name: self._mark(value) for name, value in kwargs.items()}
        return func(*self._mark(args), **named)

    def _mark(self, value: Any) -> Any:
        """Mark the tensors that the body of a higher-order op is called with."""
        if isinstance(value, (tuple, list)):
            return type(value)([self._mark(item) for item in value])
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            where = (self.group_name, self.rank, self.mesh.size())
            return MARK(value, *where, self.lengths)
        return value

    def _attend(
        self,
        func: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if not is_a_kernel_enabled(query.device.type):
            refuse(
                UnsupportedKernel,
                expected="the flash kernel, or on CUDA the memory-efficient one, to be enabled",
                got="an sdpa_kernel that disables it: the other kernels cannot attend over shards",
                remedy="add SDPBackend.FLASH_ATTENTION to the sdpa_kernel around the attention",
            )
        tensors = (query, key, value)
        if attn_mask is not None and not isinstance(attn_mask, DTensor):
            attn_mask, is_causal = _translate_mask(attn_mask, is_causal, query.device)
        if not torch.compiler.is_compiling():
            self._prepare_attention(tensors, attn_mask)
            is_torchs = torchs_context_parallel().is_dispatching
            is_tiny = query.shape[0] == 0 or query.shape[-1] <= 1
            is_odd = is_tiny or query.shape[-1] != value.shape[-1]
            if attn_mask is not None or dropout_p or is_torchs or is_odd:
                # SDPA would take a kernel that DTensors do not have; or torch's ring.
                func = partial(attend, like=query)
        if any(is_sequence_sharded(tensor) for tensor in tensors):
            query, key, value = (_with_whole_rows(t) for t in tensors)
            return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        _check_groups(query, key)
        local = [_without_placements(tensor) for tensor in tensors]
        width, of_values = query.shape[-1], value.shape[-1]
        if of_values < width:
            # No kernel takes other features of values, as latent attention (MLA) has them.
            local[2] = F.pad(local[2], (0, width - of_values))
        local = [_with_whole_rows(tensor) for tensor in local]
        pieces = [self._distribute(tensor) for tensor in local]
        if attn_mask is not None:
            attn_mask = self._distribute_mask(attn_mask, pieces[0], pieces[1])
        out = func(*pieces, attn_mask, dropout_p, is_causal, **kwargs).to_local()
        out = out if of_values >= width else out[..., :of_values]
        out = placed_like(out, query)
        if not torch.compiler.is_compiling():
            type_attended(tensors, out, self)
        return out

    def _prepare_attention(self, tensors: Sequence[Tensor], mask: Tensor | None) -> None:
        """Check an attention that eager code is about to run, and its types in all regions.

        Checkpoints around it will recompute it in this region.
        """
        query, key, value = tensors
        if is_transforming():
            refuse_transform(SITE)
        for side in (key, value):
            check_attention(query=query, key=side, site=SITE)
        rerun_within(self)
        whole = {
            self._whole_length(t.shape[SEQUENCE_DIM]) or t.shape[SEQUENCE_DIM] * self.mesh.size()
            for t in tensors
            if not isinstance(t, DTensor)
        }
        for typer in typers_of_program(self):
            if mask is not None:
                typer.check_mask(mask, whole)
            typer.refuse_mixed(tensors)
            if typer.group_name == self.group_name:
                typer.check_attention(f"{SITE} ({user_line()})", *tensors)

    def _attend_flex(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Mark an attention for the graph pass, which reads its functions.

        Its functions would have to compute with DTensors if its query were one.
        """
        tensors = (query, key, value)
        if any(is_sequence_sharded(tensor) for tensor in tensors):
            return FLEX(query, key, value, *args, **kwargs)
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            refuse(
                UnsupportedPlacement,
                expected="plain shards, or DTensors that shard the sequence, in flex_attention",
                got="DTensors that do not shard the sequence",
                remedy="pass their to_local(), and wrap the result",
            )
        return FLEX(self._mark(query), key, value, *args, **kwargs)

    def _attend_multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(arg, DTensor) for arg in (*args, *kwargs.values())):
            # DTensor knows the ops that it is made of, and has a handler for the attention.
            return MULTI_HEAD(*args, **kwargs)
        if needs_weights(args, kwargs):
            refuse(UnsupportedAttention, **WORDS_OF_WEIGHTS)
        with self.copy:
            return multi_head_attention(*args, **kwargs)

    def _distribute(self, local: Tensor) -> DTensor:
        """Wrap this rank's shard of a sequence into a DTensor."""
        placements = [Shard(SEQUENCE_DIM)]
        length = self._whole_length(local.shape[SEQUENCE_DIM])
        if length is None:
            return DTensor.from_local(local, self.mesh, placements, run_check=False)
        shape = (*local.shape[:SEQUENCE_DIM], length, *local.shape[SEQUENCE_DIM + 1 :])
        return wrap_shard(local, self.mesh, placements, shape)

    def _whole_length(self, length: int) -> int | None:
        """Return the length of the whole of a shard; None if all shards are equally long."""
        if not self.whole_of_shard:
            return None
        if length not in self.whole_of_shard:
            refuse(
                UnevenSequence,
                expected=f"a shard of a known length, {self.whole_of_shard} (shard: whole),"
                " because one of them does not divide by the number of ranks",
                got=f"a shard of another length{_sizes([length])}",
                remedy="pass a buffer of each length to context_parallel, or pad to a"
                " multiple of the number of ranks",
            )
        return self.whole_of_shard[length]

    def _distribute_mask(self, mask: Tensor, query: DTensor, key: DTensor) -> Tensor:
        """Wrap a mask of all queries and keys, which is the same on every rank."""
        if isinstance(mask, DTensor):
            return mask
        lengths = (query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
        # Not `in`: to Dynamo (2.13) a number is in no tuple that holds a symbol.
        pairs = zip(mask.shape[-2:], lengths, strict=True)
        if any(size != 1 and size != whole for size, whole in pairs):
            refuse(
                UnsupportedAttention,
                expected=f"an attn_mask over the whole sequence{_sizes(lengths)}",
                got=f"one that is not{_sizes(mask.shape)}",
                remedy="build the mask from global positions, the same on every rank; if the"
                " model makes it of a shard of its inputs, as those of transformers do for packed"
                " documents, pass the whole mask to the model (docs/fsdp.md)",
            )
        if mask.requires_grad:
            # Every rank would get all of its gradient, where of weights it gets its tokens' part.
            refuse(
                UnsupportedAttention,
                expected="an attn_mask without a gradient over plain shards",
                got="one that requires a gradient",
                remedy="pass DTensors, over which a bias may be learned",
            )
        return wrap_whole(mask, self.mesh)


run_uncompiled(SequenceRegion.judge)


def _sizes(sizes: Sequence[int]) -> str:
    """Write sizes into an error; Dynamo, whose graph break repeats it, cannot write symbols."""
    return "" if torch.compiler.is_compiling() else f", {tuple(sizes)}"


def _regions_of_program() -> list[SequenceRegion]:
    return [mode for mode in function_modes_of_program() if isinstance(mode, SequenceRegion)]


def groups_of_program() -> list[str]:
    """Return the groups of the regions around the program, also while Dynamo compiles a part."""
    return [region.group_name for region in _regions_of_program()]


@note_parameters
def _type_parameter(parameter: Tensor, tensor: Tensor) -> None:
    for typer in typers_of_program():
        kind = first_own([typer.find(tensor)])
        if kind is not None:
            typer.types[parameter] = kind


def _has_tensor(values: Sequence[Any]) -> bool:
    return any(
        _has_tensor(value) if isinstance(value, (tuple, list)) else isinstance(value, Tensor)
        for value in values
    )


def _whole_lengths(mesh: DeviceMesh, lengths: Sequence[int]) -> dict[int, int]:
    """Map this rank's shard lengths to whole lengths; empty if all shards are equally long."""
    world_size = mesh.size()
    known = whole_of_shard(lengths, world_size, mesh.get_local_rank())
    lengths = sorted(set(lengths))
    for shards in zip(*(shard_lengths(length, world_size) for length in lengths), strict=True):
        if len(set(shards)) < len(lengths):
            # Seen on every rank alike: one that went on would wait for the others for ever.
            raise UnevenSequence(
                site="a context-parallel region",
                expected="sequences whose shards have different lengths on every rank,"
                " because one length does not divide by the number of ranks",
                got=f"sequences of {lengths} tokens on {world_size} ranks",
                remedy=f"pad them to multiples of {world_size}",
            )
    return known


def _without_placements(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor that may be sharded over batch or heads."""
    if not isinstance(tensor, DTensor):
        return tensor
    places = tensor.placements
    if not all(p.dim < SEQUENCE_DIM if isinstance(p, Shard) else p.is_replicate() for p in places):
        refuse(
            UnsupportedPlacement,
            expected="plain shards, or DTensors that shard batch or heads",
            got=str(places),
            remedy="redistribute query, key and value before the attention",
        )
    return tensor.to_local()


def _check_groups(query: Tensor, key: Tensor) -> None:
    """Refuse shards of heads in which query heads would meet the key heads of another group."""
    if not isinstance(query, DTensor) or not isinstance(key, DTensor) or key.shape[1] == 1:
        return
    ranks = 1
    for axis, placement in enumerate(query.placements):
        if placement == Shard(1):
            ranks *= query.device_mesh.size(axis)
    is_grouped = query.shape[1] != key.shape[1]
    if query.placements != key.placements or (is_grouped and key.shape[1] % ranks):
        refuse(
            UnsupportedPlacement,
            expected="queries and keys that are placed alike, and a number of key heads that"
            " divides by the ranks which shard heads",
            got=f"{query.shape[1]} query heads {query.placements}, {key.shape[1]} key heads"
            f" {key.placements}",
            remedy="redistribute them alike, or replicate heads, before the attention",
        )


def _with_whole_rows(tensor: Tensor) -> Tensor:
    """Copy a tensor (B, H, S, D) whose rows are not D adjacent numbers, or overlap.

    For such strides SDPA uses no kernel, neither on the tensor nor on the strides that DTensor
    derives, but ops that DTensor cannot shard. `cp_inductor.tiles.kernels.with_whole_rows` does not
    copy again what is copied here.
    """
    if tensor.stride(-1) == 1 and tensor.stride(-2) >= tensor.shape[-1]:
        return tensor
    # contiguous() leaves the stride of a dim of size 1.
    return tensor.clone(memory_format=torch.contiguous_format)


def _translate_mask(
    mask: Tensor, is_causal: bool, device: torch.device
) -> tuple[Tensor | None, bool]:
    """Return `attn_mask` and `is_causal` for what may be a mask of torch.nn.attention.bias.

    Such an object stands for numbers that it does not hold. So may those of other classes.
    """
    if type(mask) in (Tensor, nn.Parameter, nn.Buffer):
        return mask, is_causal
    from torch.nn.attention.bias import CausalBias, CausalVariant  # imports Dynamo

    if not isinstance(mask, CausalBias):
        refuse(
            UnsupportedAttention,
            expected="an attn_mask that is a tensor, or one of torch.nn.attention.bias",
            got=f"a {type(mask).__name__}",
            remedy="pass the numbers that it stands for, as a plain tensor",
        )
    if is_causal:
        refuse_both_masks(SITE, mask)
    num_queries, num_keys = mask.seq_len_q, mask.seq_len_kv
    if mask.variant == CausalVariant.UPPER_LEFT or num_queries == num_keys:
        return None, True
    queries, keys = (torch.arange(n, device=device) for n in (num_queries, num_keys))
    return keys <= queries[:, None] + (num_keys - num_queries), False
