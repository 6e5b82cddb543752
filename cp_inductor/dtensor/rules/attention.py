"""SDPA on sequence-sharded DTensors in eager code: the handlers that DTensor calls, and `attend`.

    aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)     q, k, v: DTensor [Shard(2)]
      => wrap(cp_inductor::attention(q.to_local(), k.to_local(), v.to_local()))

The handlers serve two purposes. They compute eager attention over the whole sequence. And they tell
Dynamo, which runs DTensor on fake tensors to learn placements, that the output is sharded along the
sequence as the query is. Attention that is not sharded along the sequence is left to DTensor.
DTensor (up to torch 2.15) has no sharding rule for the CPU kernel, so this module registers one,
which allows batch or heads to be sharded.

With a mask or dropout, SDPA may choose a kernel that has no handler here. A region therefore
intercepts eager attention before SDPA chooses a kernel, and calls `attend`.

Assumes: DTensor calls the handlers below autograd, with the arguments of the aten op.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_inductor.dtensor.axis import (
    SequenceAxis,
    axis_of_tensors,
    from_local_like,
    is_sequence_sharded,
    local_part,
    roles_of,
)
from cp_inductor.dtensor.limits import check_attention, refuse_both_masks
from cp_inductor.dtensor.permuted import refuse_permuted
from cp_inductor.dtensor.recipe import PlanOptions, make_recipe
from cp_inductor.dtensor.rules.dropout import seed_of_shard
from cp_inductor.dtensor.rules.loss import correct_losses_along
from cp_inductor.errors import CPError, UnsupportedAttention
from cp_inductor.mask.language import CAUSAL, FULL
from cp_inductor.mask.rule import Rule, rule_of_table
from cp_inductor.ops.attention import (
    attention,
    attention_backward,
    run_backward,
    run_forward,
)
from cp_inductor.run.attention import Attention
from cp_inductor.tiles.dims import BATCH_DIM, HEADS_DIM
from cp_inductor.tiles.kernel_table import choose_kernel
from cp_inductor.tiles.kernels import with_whole_rows
from cp_inductor.tiles.tile_ops import ROWS
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dtensor import (
    dispatch_as_dtensor,
    has_dtensor_strategy,
    is_propagating_shapes,
    register_dtensor_flex_attention,
    register_dtensor_handler,
)
from cp_inductor.torch_private.first_dtensor import BACKWARD_OPS, FORWARD_OPS
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.torch_private.varlen import varlen_op
from cp_inductor.trust.agreement import agreed, tell_refusal
from cp_inductor.trust.failures import named_steps, user_line

aten = torch.ops.aten
EAGER = "scaled_dot_product_attention, in eager"


def register_dtensor_attention() -> None:
    """Register the handlers of attention along a sharded sequence.

    The handlers hold for the whole process; a second call changes nothing. Handlers that others
    have registered for these ops stay in place, such as those of torch's context parallelism while
    its dispatcher is on (on CUDA).
    """
    for op in FORWARD_OPS:
        register_dtensor_handler(op, _handle_forward)
    for op in BACKWARD_OPS:
        register_dtensor_handler(op, _handle_backward)
    op = varlen_op()
    if op is not None:
        register_dtensor_handler(op, _handle_varlen)
    register_dtensor_flex_attention(_handle_flex)
    if not has_dtensor_strategy(FORWARD_OPS[0]):
        register_sharding(FORWARD_OPS[0])(_cpu_forward_shardings)
        register_sharding(BACKWARD_OPS[0])(_cpu_backward_shardings)


def _handle_forward(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle a forward op: run the plan's part of this rank, or leave the call to DTensor."""
    bound = bind_arguments(op, args, kwargs)
    query, key, value = bound["query"], bound["key"], bound["value"]
    if isinstance(query, DTensor) and query.device_mesh.get_coordinate() is None:
        return dispatch_as_dtensor(op, args, kwargs)
    axis = None
    try:
        axis = axis_of_tensors(query, key, value, site=_site(op))
        if axis is None:
            return _leave_to_dtensor(op, args, kwargs)
        correct_losses_along(query.device_mesh, axis.group_name)
        local = [tensor.to_local() for tensor in (query, key, value)]
        _check_supported(op, bound)
        plan_options = _plan_options(_site(op))
        this = _attention_of_call(op, bound, axis, plan_options)
    except CPError as error:
        if not isinstance(query, DTensor) or not is_propagating_shapes(query.to_local()):
            if axis is not None:
                tell_refusal(axis.group_name, error, is_called=True)
            raise
        # Dynamo only asks for shapes here. Let it go on: the graph pass will raise the same
        # error, with the source line.
        return _results_of(op, torch.empty_like(query), torch.empty_like(query[..., 0]), bound)
    site = _site(op)
    if _is_traced(local[0]):
        out, lse = attention(*local, [], *this.arguments)
    else:
        has_grad = torch.is_grad_enabled()
        site = f"{site} ({user_line()})"
        with (
            agreed(this, local[0], local[1], site=_site(op), has_grad=has_grad),
            named_steps(this, "forward", site),
        ):
            out, lse = run_forward(this, *local)
    _note(lse, site)
    # lse (B, H, S) is sharded along the same dims as the query (B, H, S, D).
    return _results_of(op, from_local_like(out, query), from_local_like(lse, query), bound)


def _handle_flex(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tell Dynamo the shapes of flex_attention on DTensors; refuse it in eager code."""
    is_propagating = is_propagating_shapes(
        query.to_local() if isinstance(query, DTensor) else query
    )
    if is_propagating and all(map(is_sequence_sharded, (query, key, value))):
        # The graph pass reads the functions, and refuses with the source line what it cannot.
        statistic = query[..., 0].to(torch.promote_types(query.dtype, torch.float32))
        return torch.empty_like(query), statistic, torch.empty_like(statistic)
    error = UnsupportedAttention(
        site="flex_attention on DTensors",
        expected="query, key and value that are sharded along the sequence, in a model compiled"
        " with backend='cp_inductor' or 'cp_aot_eager'",
        got="eager code, another backend, or other placements, which DTensor cannot shard",
        remedy="compile the whole model; in eager code, call scaled_dot_product_attention with"
        " is_causal=True or a mask over the whole sequence",
    )
    if is_propagating:
        # Dynamo breaks the graph on NotImplementedError. Eager code then raises the other error.
        raise NotImplementedError(str(error))
    raise error


def _handle_varlen(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tell Dynamo the shapes of varlen_attn on sharded tokens; refuse it in eager code."""
    query = bind_arguments(op, args, kwargs)["query"]
    placements = query.placements if isinstance(query, DTensor) else ()
    if Shard(0) not in placements:
        return dispatch_as_dtensor(op, args, kwargs)
    if is_propagating_shapes(query.to_local()):
        # The graph pass writes it as flex_attention, and refuses with the source line.
        statistic = query[..., 0].transpose(0, 1)
        statistic = statistic.to(torch.promote_types(query.dtype, torch.float32))
        state = torch.empty(2, dtype=torch.uint64, device=query.device)
        return torch.empty_like(query), statistic, state
    raise UnsupportedAttention(
        site="varlen_attn on DTensors",
        expected="sharded tokens in a model compiled with backend='cp_inductor' or 'cp_aot_eager'",
        got="eager code, or another backend",
        remedy="compile the whole model; or number the documents, and compare the numbers in a mask"
        " of scaled_dot_product_attention",
    )


def _handle_backward(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handle a backward op, for the attention that `_handle_forward` computed."""
    bound = bind_arguments(op, args, kwargs)
    query, key, value = bound["query"], bound["key"], bound["value"]
    axis = axis_of_tensors(query, key, value, site=_site(op))
    if axis is None:
        return _leave_to_dtensor(op, args, kwargs)
    grad_out = bound["grad_out"] if "grad_out" in bound else bound["grad_out_"]
    grad_out = grad_out.redistribute(query.device_mesh, query.placements)
    tensors = (grad_out, query, key, value, bound["out"], bound["logsumexp"])
    local = [tensor.to_local() for tensor in tensors]
    site = _noted(local[-1])
    # SDPA chose the kernel in the forward. The sdpa_kernel context of the backward may differ, and
    # must not change that choice.
    chosen = sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    with chosen if query.device.type == "cpu" else nullcontext():
        this = _attention_of_call(op, bound, axis, _flags())
    if _is_traced(local[0]):
        grads = attention_backward(*local, [], [], *this.arguments)
    else:
        with named_steps(this, "backward", site or _site(op)):
            grads = run_backward(this, *local)
    wrapped = tuple(map(from_local_like, grads, (query, key, value)))
    return wrapped + (None,) * (len(op._schema.returns) - len(wrapped))


def _leave_to_dtensor(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let DTensor compute an attention, after copying tensors that the CPU kernel would misread.

    SDPA checked the strides of the whole tensor when it chose the kernel. The strides of the local
    part may differ; the kernel needs rows of adjacent numbers.
    """
    of_call = bind_arguments(op, args, kwargs)
    if of_call.get("attn_mask") is not None:
        return _compute_under_mask(op, of_call)
    names = [argument.name for argument in op._schema.arguments]
    bound = zip(names, args, strict=False)
    given = [_with_whole_rows(value) if name in ROWS else value for name, value in bound]
    named = {
        name: _with_whole_rows(value) if name in ROWS else value for name, value in kwargs.items()
    }
    return dispatch_as_dtensor(op, tuple(given), named)


def _compute_under_mask(op: torch._ops.OpOverload, bound: dict[str, Any]) -> Any:
    """Compute an attention under a mask on this rank's batch entries and heads, on the CPU.

    A rule of `register_sharding` cannot do it: where DTensor remembers what a rule chose, it does
    not look at tensors that are passed by keyword, as the mask is.
    """
    query = bound["query"]
    mesh, placements = query.device_mesh, _of_batch_and_heads(query, bound["key"])
    for name, value in bound.items():
        if isinstance(value, DTensor) and name != "attn_mask":
            bound[name] = value.redistribute(mesh, placements)
    query, mask = bound["query"], bound["attn_mask"]
    local = {
        name: value.to_local() if isinstance(value, DTensor) else value
        for name, value in bound.items()
    }
    for name in ROWS & local.keys():
        (local[name],) = with_whole_rows(local[name])
    local["attn_mask"] = local_part(mask, query, "bh.."[-mask.ndim :])
    results = op(**local)
    like = (query, bound["key"], bound["value"]) if op in BACKWARD_OPS else (query, query)
    return tuple(map(from_local_like, results, like))


def _of_batch_and_heads(query: DTensor, key: DTensor) -> list[Placement]:
    """Return the query's placements, without those that leave ranks with other parts, or none."""
    mesh = query.device_mesh
    found: list[Placement] = list(query.placements)
    for dim in (BATCH_DIM, HEADS_DIM):
        ranks = prod(mesh.size(axis) for axis, one in enumerate(found) if one == Shard(dim))
        if query.shape[dim] % ranks or key.shape[dim] % ranks:
            found = [Replicate() if one == Shard(dim) else one for one in found]
    kept = (Shard(BATCH_DIM), Shard(HEADS_DIM))
    return [one if one in kept else Replicate() for one in found]


def _with_whole_rows(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    (whole,) = with_whole_rows(local)
    return tensor if whole is local else from_local_like(whole, tensor)


def attend(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    like: Tensor | None = None,
) -> DTensor:
    """Compute SDPA along a sharded sequence in eager code, with a mask or dropout if wanted.

    A learned bias, that is, a mask that requires a gradient, is not supported.

    Args:
        query, key, value: (B, H, S, D), (B, G, T, D), (B, G, T, D), sharded along the sequence.
        attn_mask: a bool mask (True: the pair exists), or numbers that are added to the scores.
            Broadcasts to (B, H, S, T), where S and T count the whole sequence. A DTensor, or a
            plain tensor that is the same on every rank. Each rank reads the rows of its queries.
        dropout_p: the probability of dropout. The seed is drawn from torch's generator, which must
            be in the same state on every rank.
        is_causal: query i attends to keys 0 to i; not together with attn_mask.
        scale: multiplies the scores; None means 1 / sqrt(D).
        enable_gqa: G may be less than H.
        like: the original query, if its placements also shard batch or heads; used by dropout.

    Returns:
        (B, H, S, D), placed like query, in query's dtype or that of autocast.

    Raises:
        UnsupportedAttention: the mask does not fit or requires a gradient, or the heads do not fit.
        UnsupportedKernel: no kernel supports the device, dtype or head dim.
        UnsupportedStrategy: `config.strategy` does not support this mask.
    """
    this, tensors, extras = _prepare(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        like=like,
    )
    has_grad = torch.is_grad_enabled()
    with agreed(this, tensors[0], tensors[1], extras, site=EAGER, has_grad=has_grad):
        out: Tensor = _AttendWithGradient.apply(this, *tensors, *extras)
    return from_local_like(out, query)


def _prepare(
    query: DTensor,
    key: DTensor,
    value: DTensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
    like: Tensor | None = None,
) -> tuple[Attention, list[Tensor], list[Tensor]]:
    """Return an attention, its local query, key and value, and what else it reads."""
    site = EAGER
    axis = axis_of_tensors(query, key, value, site=site)
    assert axis is not None
    correct_losses_along(query.device_mesh, axis.group_name)
    check_attention(query=query, key=key, site=site)
    if not enable_gqa:
        _check_equal_heads(query, key, site=site)

    dtype = _dtype_to_compute_in(query)
    local = [tensor.to_local().to(dtype) for tensor in (query, key, value)]

    # The rule says which pairs exist; extras are the run-time tensors that it needs.
    rule = Rule(CAUSAL if is_causal else FULL)
    extras = []
    if attn_mask is not None:
        _check_mask(attn_mask, local[0], query, key, is_causal=is_causal, site=site)
        rule, own_rows = _rule_and_rows_of_mask(attn_mask, query, dtype)
        extras.append(own_rows)
    if dropout_p:
        extras.append(_draw_seed(query if like is None else like))

    kernel = choose_kernel(*local, dtype=dtype, site=site, has_bias=attn_mask is not None)
    recipe = make_recipe(
        _plan_options(site), axis, query, key, rule=rule.format(), dtype=dtype, site=site
    )
    this = Attention(recipe, axis.rank, scale, kernel, axis.group_name, dropout_p)
    return this, local, extras


def _check_equal_heads(query: Tensor, key: Tensor, *, site: str) -> None:
    if query.shape[1] != key.shape[1]:
        raise UnsupportedAttention(
            site=site,
            expected="equally many query and key heads, or enable_gqa=True",
            got=f"{query.shape[1]} query and {key.shape[1]} key heads",
            remedy="pass enable_gqa=True, or repeat keys and values",
        )


def _dtype_to_compute_in(query: Tensor) -> torch.dtype:
    """Return the dtype of autocast if it is on for the query's device, else that of the query."""
    device = query.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return query.dtype


def _rule_and_rows_of_mask(mask: Tensor, query: DTensor, dtype: torch.dtype) -> tuple[Rule, Tensor]:
    """Return the rule that reads a mask as a table, and the part of the mask that this rank reads.

    Args:
        mask: broadcasts to (B, H, S, T) of the whole sequence.
        query: says which batch entries, heads and rows are this rank's.
        dtype: in which the attention is computed.
    """
    rule, indices = rule_of_table(mask.shape, is_bool=mask.dtype == torch.bool)
    # A bias in a wider dtype than the attention is added unrounded; under autocast, SDPA casts it.
    is_cast = torch.is_autocast_enabled(query.device.type)
    is_wide = bool(rule.bias) and not is_cast and mask.dtype.itemsize > dtype.itemsize
    return replace(rule, is_wide=is_wide), local_part(mask, query, roles_of(indices))


def _draw_seed(like: Tensor) -> Tensor:
    """Draw a seed of dropout from torch's generator, and return this rank's part of it.

    Args:
        like: the query (B, H, S, D), a DTensor.
    """
    seed = torch.randint(0, 1 << 31, (), device=like.device)
    return seed_of_shard(seed, like)


class _AttendWithGradient(torch.autograd.Function):
    """The op pair cp_inductor::attention, run as plain functions.

    So dispatch modes see the collectives and kernels, which the custom ops would hide.
    """

    @staticmethod
    def forward(ctx: Any, this: Attention, *tensors: Tensor) -> Tensor:
        # The tensors are cast already. Autocast would also cast sums that must stay in float32.
        with torch.autocast(tensors[0].device.type, enabled=False):
            ctx.site = f"scaled_dot_product_attention ({user_line()})"
            with named_steps(this, "forward", ctx.site):
                out, lse = run_forward(this, *tensors)
        ctx.this = this
        ctx.save_for_backward(out, lse, *tensors)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        out, lse, query, key, value, *extras = ctx.saved_tensors
        with torch.autocast(query.device.type, enabled=False):
            tensors = (*grads, query, key, value, out, lse, *extras)
            with named_steps(ctx.this, "backward", ctx.site):
                found = run_backward(ctx.this, *tensors)
        return None, *found, *[None] * len(extras)


run_uncompiled(_AttendWithGradient.backward)


def _check_mask(
    mask: Tensor, local: Tensor, query: DTensor, key: DTensor, *, is_causal: bool, site: str
) -> None:
    """Raise unless a mask fits the scores: this rank's batch entries and heads, all of S and T."""
    sizes = (*local.shape[:2], query.shape[2], key.shape[2])
    fits = 2 <= mask.ndim <= 4 and all(
        given in (1, size) for given, size in zip(mask.shape[::-1], sizes[::-1], strict=False)
    )
    if is_causal:
        refuse_both_masks(site, mask)
    if not fits:
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


def _attention_of_call(
    op: torch._ops.OpOverload, bound: dict[str, Any], axis: SequenceAxis, plan_options: PlanOptions
) -> Attention:
    """Return the attention that an aten op's arguments ask for."""
    query, key, value = bound["query"], bound["key"], bound["value"]
    kernel = choose_kernel(query, key, value, dtype=query.dtype, site=_site(op))
    recipe = make_recipe(
        plan_options,
        axis,
        query,
        key,
        rule="causal" if bound["is_causal"] else "full",
        dtype=query.dtype,
        site=_site(op),
    )
    return Attention(recipe, axis.rank, bound["scale"], kernel, axis.group_name)


def _plan_options(site: str) -> PlanOptions:
    """Return the flags, of shards that are in order."""
    refuse_permuted(site)
    return _flags()


def _flags() -> PlanOptions:
    """Return the flags, without keeping fetched data: SDPA's own op saves only its results."""
    return replace(PlanOptions.read({})[0], can_keep=False)


def _note(lse: Tensor, site: str) -> None:
    """Record the site for the backward, which runs on other threads.

    The record is an attribute of the storage, because autograd saves the storage, not the tensor
    object.
    """
    lse.untyped_storage()._cp_inductor_note = site  # type: ignore[attr-defined]


def _noted(lse: Tensor) -> str | None:
    """Return what the forward recorded; nothing if a hook has moved lse elsewhere."""
    return getattr(lse.untyped_storage(), "_cp_inductor_note", None)


def _check_supported(op: torch._ops.OpOverload, bound: dict[str, Any]) -> None:
    """Refuse what these handlers do not compute.

    Raises:
        UnsupportedAttention: the call has a mask or dropout, or tensors that do not have 4 dims.
    """
    check_attention(query=bound["query"], key=bound["key"], site=_site(op))
    if bound.get("attn_mask") is not None and bound["is_causal"]:
        refuse_both_masks(_site(op), bound["attn_mask"])
    if bound.get("attn_mask") is not None or bound.get("attn_bias") is not None:
        raise UnsupportedAttention(
            site=_site(op),
            expected="attn_mask=None in eager attention over a sharded sequence",
            got="an attn_mask",
            remedy="compile the model, with backend='cp_inductor' or 'cp_aot_eager'",
        )
    if bound["dropout_p"]:
        raise UnsupportedAttention(
            site=_site(op),
            expected="dropout_p=0 in eager attention over a sharded sequence",
            got=f"dropout_p={bound['dropout_p']}",
            remedy="compile the model, with backend='cp_inductor' or 'cp_aot_eager'",
        )


def _site(op: torch._ops.OpOverload) -> str:
    return f"{op.name()} on DTensors"


def _results_of(
    op: torch._ops.OpOverload, out: Tensor, lse: Tensor, bound: dict[str, Any]
) -> tuple[Any, ...]:
    """Return all results of a kernel: out, lse, lengths, and None for the state of dropout."""
    lengths = {"max_q": bound["query"].shape[2], "max_k": bound["key"].shape[2]}
    rest = [lengths.get(returned.name) for returned in op._schema.returns[2:]]
    return out, lse, *rest


def _cpu_forward_shardings(*args: Any, **kwargs: Any) -> list[Any]:
    """Return the shardings on one mesh axis: (out, lse) for (query, key, value, ...)."""
    rest = [None] * (len(args) - 3)
    placements = (Replicate(), Shard(0), Shard(1))
    return [([p, p], [p, p, p, *rest]) for p in placements]


def _cpu_backward_shardings(*args: Any, **kwargs: Any) -> list[Any]:
    """Return the same for the backward: (dq, dk, dv) for (grad_out, query, ..., lse, ...)."""
    rest = [None] * (len(args) - 6)
    placements = (Replicate(), Shard(0), Shard(1))
    return [([p, p, p], [p] * 6 + rest) for p in placements]
