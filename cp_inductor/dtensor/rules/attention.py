"""SDPA on sequence-sharded DTensors in eager code: the handlers that DTensor calls, and `attend`.

    aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, mask)     q, k, v: DTensor [Shard(2)]
      => wrap(cp_inductor::attention(q.to_local(), k.to_local(), v.to_local(), [rows of mask]))

The handlers compute eager attention over the whole sequence. And they tell Dynamo, which runs
DTensor on fake tensors to learn placements, that the output is sharded along the sequence. Query,
key and value may be placed otherwise than each other. A mask becomes a table of the rule, of which
each rank reads the rows of its queries.

With dropout, SDPA may choose a kernel that has no handler here. A region therefore intercepts eager
attention before SDPA chooses a kernel, and calls `attend`.

Assumes: DTensor calls the handlers below autograd, with the arguments of the aten op.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_inductor.dtensor.axis import (
    SequenceAxis,
    axis_and_placements,
    batch_and_heads,
    from_local_like,
    hold_sequences_along,
    is_sequence_sharded,
    local_part,
    roles_of,
    seed_of_shard,
)
from cp_inductor.dtensor.limits import check_attention, refuse_both_masks, refuse_permuted
from cp_inductor.dtensor.recipe import PlanOptions, make_recipe
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import CPError, UnsupportedAttention
from cp_inductor.mask.language import CAUSAL, FULL
from cp_inductor.mask.rule import Rule, rule_of_table
from cp_inductor.ops.attention import attention, attention_backward
from cp_inductor.run.attention import Attention
from cp_inductor.run.executor import run_backward, run_forward
from cp_inductor.source import user_line
from cp_inductor.tiles.kernel_table import ROWS, choose_kernel
from cp_inductor.tiles.kernels import with_whole_rows
from cp_inductor.torch_private.arguments import OpOverload, bind_arguments
from cp_inductor.torch_private.dtensor import (
    are_plain_tensors_replicated,
    dispatch_as_dtensor,
    is_propagating_shapes,
    replicated,
)
from cp_inductor.torch_private.first_dtensor import BACKWARD_OPS, FORWARD_OPS
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.trust.agreement import agreed, tell_refusal
from cp_inductor.trust.exchanges import named_steps

aten = torch.ops.aten
EAGER = "scaled_dot_product_attention, in eager"
SIDES = ("query", "key", "value")
# The arguments of kernels that are placed alike, those of all backwards included.
PLACED = ROWS | {"logsumexp", "grad_out", "grad_out_"}


def handle_forward(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Handle a forward op: run the plan's part of this rank, or that of its batch and heads."""
    bound = bind_arguments(op, args, kwargs)
    query, *_ = tensors = [bound[side] for side in SIDES]
    site = f"{op.name()} on DTensors"
    if isinstance(query, DTensor) and query.device_mesh.get_coordinate() is None:
        return _results_of(op, bound, query)
    is_propagating = isinstance(query, DTensor) and is_propagating_shapes(query.to_local())
    axis = None
    try:
        axis, placements = axis_and_placements(*tensors, site=site)
        if axis is None:
            return _attend_within_ranks(op, bound)
        if is_propagating and _mask_of(bound) is not None:
            # Dynamo only asks for shapes. What the mask is, the graph pass reads.
            return _results_of(op, bound, _placed(query, placements))
        if bound["dropout_p"]:
            raise UnsupportedAttention(
                site=site,
                expected="dropout_p=0 in eager attention over a sharded sequence",
                got=f"dropout_p={bound['dropout_p']}",
                remedy="compile the model, with backend='cp_inductor' or 'cp_aot_eager'",
            )
        refuse_permuted(site)
        spec, sides, local, extras = _prepare(bound, axis, placements, query.dtype, site)
    except CPError as error:
        if is_propagating:
            # Let Dynamo go on: the graph pass will raise the same error, with the source line.
            return _results_of(op, bound, query)
        if axis is not None:
            tell_refusal(axis.group_name, error)
        raise
    if _is_traced(local[0]):
        out, lse = attention(*local, extras, *spec.arguments)
    else:
        line = f"{site} ({user_line()})"
        has_grad = torch.is_grad_enabled()
        agreement = agreed(spec, local[0], local[1], extras, site=site, has_grad=has_grad)
        with agreement, named_steps(spec, "forward", line):
            out, lse = run_forward(spec, *local, *extras)
        site = line
    # For the backward, which runs on other threads: autograd saves the storage, not the tensor.
    lse.untyped_storage()._cp_inductor_note = site
    # lse (B, H, S) is sharded along the same dims as the query (B, H, S, D).
    return _results_of(op, bound, from_local_like(out, sides[0]), from_local_like(lse, sides[0]))


def handle_flex(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell Dynamo the shapes of flex_attention on DTensors; refuse it in eager code."""
    query, key, value, *_ = args
    site = "flex_attention on DTensors"
    is_propagating = is_propagating_shapes(held_by_rank(query))
    if is_propagating and any(map(is_sequence_sharded, (query, key, value))):
        # The graph pass reads the functions, and refuses with the source line what it cannot.
        with suppress(CPError):
            query = _placed(query, axis_and_placements(query, key, value, site=site)[1])
        return torch.empty_like(query), _statistic(query), _statistic(query)
    error = _not_compiled(site)
    if is_propagating:
        # Dynamo breaks the graph on NotImplementedError. Eager code then raises the other error.
        raise NotImplementedError(str(error))
    raise error


def handle_varlen(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Tell Dynamo the shapes of varlen_attn on sharded tokens; refuse it in eager code."""
    query = bind_arguments(op, args, kwargs)["query"]
    if not isinstance(query, DTensor) or Shard(0) not in query.placements:
        return dispatch_as_dtensor(op, args, kwargs)
    if not is_propagating_shapes(query.to_local()):
        raise _not_compiled("varlen_attn on DTensors")
    # The graph pass writes it as flex_attention, and refuses with the source line.
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return torch.empty_like(query), _statistic(query.transpose(0, 1)), state


def _statistic(query: Tensor) -> Tensor:
    """Return a number of any value for each row of a query, as flex_attention returns them."""
    return query[..., 0].to(torch.promote_types(query.dtype, torch.float32))


def _not_compiled(site: str) -> UnsupportedAttention:
    return UnsupportedAttention(
        site=site,
        expected="sharded tokens in a model compiled with backend='cp_inductor' or 'cp_aot_eager'",
        got="eager code, another backend, or tensors that are not sharded along the sequence",
        remedy="compile the whole model; in eager code, call scaled_dot_product_attention with"
        " is_causal=True or a mask over the whole sequence, as of the numbers of documents",
    )


def handle_backward(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Handle a backward op, for the attention that `handle_forward` computed."""
    bound = bind_arguments(op, args, kwargs)
    tensors = tuple(bound[side] for side in SIDES)
    site = f"{op.name()} on DTensors"
    if isinstance(tensors[0], DTensor) and tensors[0].device_mesh.get_coordinate() is None:
        return _gradients_of(op, map(torch.empty_like, tensors), tensors)
    axis, placements = axis_and_placements(*tensors, site=site)
    if axis is None:
        return _attend_within_ranks(op, bound)
    out, lse = (bound[name].to_local() for name in ("out", "logsumexp"))
    # Nothing if a hook has moved lse elsewhere.
    site_of_forward = getattr(lse.untyped_storage(), "_cp_inductor_note", None)
    # SDPA chose the kernel in the forward. The sdpa_kernel context of the backward may differ, and
    # must not change that choice.
    chosen = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with chosen if tensors[0].device.type == "cpu" else nullcontext():
        spec, sides, local, extras = _prepare(bound, axis, placements, tensors[0].dtype, site)
    grad_out = bound["grad_out"] if "grad_out" in bound else bound["grad_out_"]
    grad_out = _placed(grad_out, sides[0].placements).to_local()
    if _is_traced(local[0]):
        grads = attention_backward(grad_out, *local, out, lse, extras, [], *spec.arguments)
    else:
        with named_steps(spec, "backward", site_of_forward or site):
            grads = run_backward(spec, grad_out, *local, out, lse, *extras)
    return _gradients_of(op, map(from_local_like, grads, sides), tensors)


def _gradients_of(
    op: OpOverload, grads: Iterable[Tensor], tensors: Sequence[Tensor]
) -> tuple[Any, ...]:
    """Return all results of a backward op: gradients, placed as the tensors are; None for others.

    A summand of a partial tensor has the gradient of the whole.
    """
    results: list[Tensor | None] = [None] * len(op._schema.returns)
    for place, (grad, tensor) in enumerate(zip(grads, tensors, strict=True)):
        if isinstance(tensor, DTensor):
            wanted = [p if type(p) is Shard else Replicate() for p in tensor.placements]
            grad = _placed(grad, wanted)
        results[place] = grad
    return tuple(results)


def _attend_within_ranks(op: OpOverload, bound: dict[str, Any]) -> Any:
    """Compute an attention, or its backward, on this rank's batch entries and heads.

    DTensor (up to torch 2.15) has no sharding rule for the kernel of the CPU, and the rules of the
    others do not ask whether groups of query heads stay with their key head.
    """
    bound, tensors = dict(bound), tuple(bound[side] for side in SIDES)
    # In the order of the arguments, in which all ranks redistribute them.
    names = [name for name in bound if name in PLACED]
    if not all(isinstance(tensor, DTensor) for tensor in tensors):
        mesh = next(t.device_mesh for t in bound.values() if isinstance(t, DTensor))
        if not are_plain_tensors_replicated():
            return _dispatch(op, bound)  # which refuses
        plain = [name for name in names if not isinstance(bound[name], DTensor)]
        bound |= {name: replicated(bound[name], mesh) for name in plain}
    placements = batch_and_heads(*(bound[side] for side in SIDES))
    for name in names:
        placed = _placed(bound[name], placements)
        # SDPA checked the strides of the whole tensor when it chose the kernel. The strides of the
        # local part may differ; the kernel needs rows of adjacent numbers.
        part = placed.to_local()
        (rows,) = with_whole_rows(part) if name in ROWS else (part,)
        bound[name] = placed if rows is part else from_local_like(rows, placed)
    if op not in (FORWARD_OPS[0], BACKWARD_OPS[0]):
        return _dispatch(op, bound)
    local: dict[str, Any] = bound | {name: bound[name].to_local() for name in names}
    mask = bound["attn_mask"]
    if mask is not None:
        local["attn_mask"] = local_part(mask, bound["query"], "bh.."[-mask.ndim :])
    results = op(**local)
    sides = [bound[side] for side in SIDES]
    if op in BACKWARD_OPS:
        return _gradients_of(op, map(from_local_like, results, sides), tensors)
    return tuple(from_local_like(result, sides[0]) for result in results)


def _dispatch(op: OpOverload, bound: dict[str, Any]) -> Any:
    """Dispatch a call as DTensor does, which does not look at tensors passed by name."""
    by_name = {it.name: bound[it.name] for it in op._schema.arguments if it.kwarg_only}
    in_order = tuple(value for name, value in bound.items() if name not in by_name)
    return dispatch_as_dtensor(op, in_order, by_name)


def _placed(tensor: Tensor, placements: Sequence[Placement]) -> DTensor:
    assert isinstance(tensor, DTensor)
    is_placed = tensor.placements == tuple(placements)
    return tensor if is_placed else tensor.redistribute(placements=placements)


def attend(*args: Any, like: Tensor, scale: Any = None, enable_gqa: bool = False) -> DTensor:
    """Compute SDPA along a sharded sequence in eager code, with a mask or dropout if wanted.

    The arguments are those of SDPA; query, key and value are DTensors. The mask is over the whole
    sequence, has no gradient, and is a DTensor, or the same on every rank. Ranks draw the seed of
    dropout, and must be seeded alike; `like` is the query that the program has, which may be
    sharded by batch or heads as well.

    Returns:
        (B, H, S, D), placed like query, in query's dtype or that of autocast.
    """
    names = (*SIDES, "attn_mask", "dropout_p", "is_causal")
    call = dict(zip(names, args, strict=True), scale=scale)
    query, key = call["query"], call["key"]
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise UnsupportedAttention(
            site=EAGER,
            expected="equally many query and key heads, or enable_gqa=True",
            got=f"{query.shape[1]} query and {key.shape[1]} key heads",
            remedy="pass enable_gqa=True, or repeat keys and values",
        )
    device = query.device.type
    is_cast = torch.is_autocast_enabled(device)
    refuse_permuted(EAGER)
    dtype = torch.get_autocast_dtype(device) if is_cast else query.dtype
    axis, placements = axis_and_placements(query, key, call["value"], site=EAGER)
    assert axis is not None
    spec, placed, tensors, extras = _prepare(call, axis, placements, dtype, EAGER)
    if call["dropout_p"]:
        seed = torch.randint(0, 1 << 31, (), device=query.device)
        extras.append(seed_of_shard(seed, like))
    has_grad = torch.is_grad_enabled()
    with agreed(spec, tensors[0], tensors[1], extras, site=EAGER, has_grad=has_grad):
        out: Tensor = _AttendWithGradient.apply(spec, *tensors, *extras)
    return from_local_like(out, placed[0])


def _mask_of(bound: Mapping[str, Any]) -> Any:
    """Return what a kernel adds to the scores, by the name that the kernel has for it."""
    return bound.get("attn_mask", bound.get("attn_bias"))


def _prepare(
    call: Mapping[str, Any],
    axis: SequenceAxis,
    placements: Sequence[Placement],
    dtype: torch.dtype,
    site: str,
) -> tuple[Attention, list[DTensor], list[Tensor], list[Tensor]]:
    """Return an attention, its query, key and value placed alike and local, and what else it reads.

    The call is the arguments of SDPA, or of a kernel, by name; the dtype is that of computing.
    """
    attn_mask, is_causal = _mask_of(call), call["is_causal"]
    query, key, _ = sides = [_placed(call[side], placements) for side in SIDES]
    hold_sequences_along(query.device_mesh, axis.group_name)
    check_attention(query=query, key=key, site=site)
    local = [tensor.to_local().to(dtype) for tensor in sides]

    # The rule says which pairs exist; extras are the run-time tensors that it needs.
    rule = Rule(CAUSAL if is_causal else FULL)
    extras = []
    if attn_mask is not None:
        _check_mask(attn_mask, query, key, is_causal=is_causal, site=site)
        rule = rule_of_table(attn_mask.shape, is_bool=attn_mask.dtype == torch.bool)
        # A bias in a wider dtype is added unrounded; under autocast, SDPA casts it.
        is_cast = torch.is_autocast_enabled(query.device.type)
        is_wide = bool(rule.bias) and not is_cast and attn_mask.dtype.itemsize > dtype.itemsize
        rule = replace(rule, is_wide=is_wide)
        extras.append(local_part(attn_mask, query, roles_of(rule.tables[0])))
    kernel, _ = choose_kernel(*local, dtype=dtype, site=site, has_bias=attn_mask is not None)
    # SDPA's own op saves only its results: nothing of what was fetched.
    flags = replace(PlanOptions.read({})[0], can_keep=False)
    recipe = make_recipe(flags, axis, query, key, rule=rule.format(), dtype=dtype, site=site)
    spec = Attention(recipe, axis.rank, call["scale"], kernel, axis.group_name, call["dropout_p"])
    return spec, sides, local, extras


class _AttendWithGradient(torch.autograd.Function):
    """The op pair cp_inductor::attention as plain functions, so that dispatch modes see inside."""

    @staticmethod
    def forward(ctx: Any, spec: Attention, *tensors: Tensor) -> Tensor:
        # The tensors are cast already. Autocast would also cast sums that must stay in float32.
        with torch.autocast(tensors[0].device.type, enabled=False):
            ctx.site = f"scaled_dot_product_attention ({user_line()})"
            with named_steps(spec, "forward", ctx.site):
                out, lse = run_forward(spec, *tensors)
        ctx.spec = spec
        ctx.save_for_backward(out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        out, lse, query, key, value, *extras = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            tensors = (*grads, query, key, value, out, lse, *extras)
            with named_steps(ctx.spec, "backward", ctx.site):
                gradients = run_backward(ctx.spec, *tensors)
        return None, *gradients, *[None] * len(extras)


run_uncompiled(_AttendWithGradient.backward)


def _check_mask(mask: Tensor, query: DTensor, key: DTensor, *, is_causal: bool, site: str) -> None:
    """Raise unless a mask fits the scores (B, H, S, T)."""
    if is_causal:
        refuse_both_masks(site, mask)
    sizes = (*query.shape[:3], key.shape[2])
    pairs = zip(mask.shape[::-1], sizes[::-1], strict=False)
    if not 2 <= mask.ndim <= 4 or any(length not in (1, size) for length, size in pairs):
        raise UnsupportedAttention(
            site=site,
            expected=f"an attn_mask that broadcasts to {sizes}",
            got=f"one of shape {tuple(mask.shape)}",
            remedy="build the mask over the whole sequence",
        )
    if mask.requires_grad:
        raise UnsupportedAttention(
            site=site,
            expected="an attn_mask without a gradient in eager code",
            got="one that requires a gradient",
            remedy="compile the model, with backend='cp_inductor' or 'cp_aot_eager'",
        )


def _is_traced(local: Tensor) -> bool:
    """Whether the call is being traced, so that the graph must contain the op itself."""
    return type(local) is not Tensor or torch.compiler.is_compiling()


def _results_of(
    op: OpOverload, bound: dict[str, Any], out: Tensor, lse: Tensor | None = None
) -> tuple[Any, ...]:
    """Return all results of a kernel: out, lse, lengths, and None for the state of dropout.

    Without lse, they have no values, and shapes and placements as for an `out` that is placed so.
    """
    if lse is None:
        out, lse = torch.empty_like(out), torch.empty_like(out[..., 0])
    lengths = {"max_q": bound["query"].shape[2], "max_k": bound["key"].shape[2]}
    rest = [lengths.get(returned.name) for returned in op._schema.returns[2:]]
    return out, lse, *rest
