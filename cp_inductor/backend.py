"""The backends of torch.compile: "cp_inductor", and "cp_aot_eager" for debugging.

    Dynamo graph . capture . AOTAutograd . lower . Inductor . PinOrder         cp_inductor
    Dynamo graph . capture . AOTAutograd . lower . interpreted                 cp_aot_eager

Found by their entry points; torch.compile imports this module, and with it the DTensor handlers,
before Dynamo traces anything.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any, cast

import torch.distributed as dist
from torch import SymBool, SymFloat, SymInt, Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import DeviceMesh

from cp_inductor import config
from cp_inductor.agreement import agreed_graph, tell_refusal
from cp_inductor.errors import (
    CPError,
    SequenceWarning,
    UnsupportedAttention,
    UnsupportedPlacement,
)
from cp_inductor.gradients import with_all_gradients
from cp_inductor.held_layout import layout_of_torch
from cp_inductor.kernels import ROWS_OF_TILES
from cp_inductor.loss import correct_losses_compiled_by
from cp_inductor.masks import seed_of_shard
from cp_inductor.passes.pin_order import PinOrder
from cp_inductor.passes.pipeline import (
    LAYOUT_FOUND,
    capture,
    has_attentions,
    has_masks,
    list_attentions,
    lower,
    regions_of,
)
from cp_inductor.passes.schedule_exchange import Scheduling
from cp_inductor.recipes import Policy
from cp_inductor.regions import rerun_regions
from cp_inductor.sharding import SequenceAxis, axis_of_mesh, from_local_like, local_part
from cp_inductor.source import source_hash
from cp_inductor.ties import check_ties
from cp_inductor.torch_private import (
    append_custom_pass,
    as_backend_error,
    is_capturing_whole,
    is_splitting_for_ddp,
    last_strides_kept,
)

__all__ = ["cp_aot_eager", "cp_inductor"]

log = logging.getLogger("cp_inductor")


@dataclass(frozen=True, slots=True)
class Settings:
    """Options and flags of one compile.

    Attributes:
        enabled: expand attentions into plans in the graph; else the op computes them.
        policy: for plans.
        scheduling: of exchanges.
        axis: where the user named a mesh: the axis on which plain tensors are sharded.
        inductor_options: what is not ours, for Inductor.
        check_agreement: ranks compare what they are about to run.
        check_sequence: refuse what mixes the tokens of plain shards and is not attention.
    """

    enabled: bool
    policy: Policy
    scheduling: Scheduling
    axis: SequenceAxis | None
    inductor_options: Mapping[str, Any]
    check_agreement: bool = True
    check_sequence: bool = True


def cp_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph with sequence-sharded attentions rewritten, through Inductor.

    Args:
        gm: from Dynamo.
        example_inputs: its inputs.
        mode: as torch.compile's.
        options: ``mesh`` (a 1-D DeviceMesh: every attention over plain tensors is sharded along
            the sequence on it); ``layout``, ``strategy``, ``stages``, ``keep_bytes``,
            ``schedule``, ``memory_budget_bytes``, ``link_bytes_per_s``, ``device_flops_per_s``,
            ``check_sequence``, as in `cp_inductor.config`; ``seq_len`` (of the whole sequence,
            where the ranks' plain shards differ in length); all others are Inductor's.

    Raises:
        CPError: an attention is sharded along the sequence and cannot be rewritten; the graph,
            the model and the process group are as they were.
    """
    with errors_unwrapped():
        settings = read_settings(options)
        return compile_through_inductor(gm, example_inputs, settings, mode)


def cp_aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Run the same graphs as `cp_inductor`, interpreted: for debugging. Arguments as there."""
    with errors_unwrapped():
        return _compile_aot_eager(gm, example_inputs, read_settings(options))


def compile_through_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    mode: str | None,
    *,
    inner_compile: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Capture, differentiate, lower and compile a Dynamo graph.

    Args:
        gm: from Dynamo.
        example_inputs: its inputs.
        settings: of this compile.
        mode: as torch.compile's.
        inner_compile: what compiles each graph from AOTAutograd, once lowered; Inductor's, if not
            given.
        kwargs: for `torch._inductor.compile_fx.compile_fx`.
    """
    has_attention = capture_graph(gm, settings)
    layout = layout_of_torch() if gm.meta.get(LAYOUT_FOUND) else None
    kept = drop_idle_objects(gm)
    agree = _agreement_of(gm, settings)
    example_inputs = [example_inputs[index] for index in kept]
    patches = _inductor_patches(settings, mode)
    inner_compile = inner_compile or compile_fx_inner
    lowered = partial(_compile_lowered, settings=settings, inner_compile=inner_compile)
    compiled = compile_fx(
        gm, example_inputs, inner_compile=lowered, config_patches=patches, **kwargs
    )
    run = with_all_gradients(cast("Callable[..., Any]", compiled))
    return _with_inputs(kept, run, has_attention, agree, layout)


def _compile_aot_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], settings: Settings
) -> Callable[..., Any]:
    has_attention = capture_graph(gm, settings)
    layout = layout_of_torch() if gm.meta.get(LAYOUT_FOUND) else None
    kept = drop_idle_objects(gm)
    agree = _agreement_of(gm, settings)
    example_inputs = [example_inputs[index] for index in kept]
    compilers = {
        f"{role}_compiler": partial(_interpret_lowered, kind=kind, settings=settings)
        for role, kind in (("fw", "forward"), ("bw", "backward"), ("inference", "inference"))
    }
    compile_graph = aot_autograd(
        **compilers,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = compile_graph(gm, example_inputs)
    return _with_inputs(kept, with_all_gradients(compiled), has_attention, agree, layout)


def drop_idle_objects(gm: fx.GraphModule) -> list[int]:
    """Drop inputs of a Dynamo graph that are neither tensors nor numbers and that nothing reads.

    The mesh of a region is one, once its attentions are captured. To partitioners with a memory
    budget (torch 2.13) it is an object of unknown size.

    Returns:
        The places of the inputs that are left.
    """
    kept = []
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if node.users or isinstance(value, (Tensor, int, float, SymInt, SymFloat, SymBool)):
            kept.append(place)
        else:
            gm.graph.erase_node(node)
    gm.recompile()
    return kept


def _agreement_of(gm: fx.GraphModule, settings: Settings) -> Callable[[Sequence[Any]], Any]:
    """Return what makes the context that a captured graph, once compiled, is called in."""
    planned = list_attentions(gm) if settings.check_agreement else ()
    if not planned:
        return nullcontext
    inputs = gm.graph.find_nodes(op="placeholder")
    return agreed_graph(planned, inputs, is_whole=is_capturing_whole())


def _with_inputs(
    kept: Sequence[int],
    compiled: Callable[..., Any],
    has_attention: bool,
    agree: Callable[[Sequence[Any]], Any],
    layout: str | None,
) -> Callable[..., Any]:
    """Call a compiled graph with those of its inputs that were kept, once all ranks do.

    Dynamo passes what the graph, which it shares, has in the end; its splitter for DDP passes all.

    Args:
        kept: their places.
        compiled: the graph.
        has_attention: whether there is any in it.
        agree: makes the context in which all ranks run the same.
        layout: that was found out when it was compiled, and of which Dynamo knows nothing; None if
            it does not depend on what torch's context parallelism is doing.
    """

    @wraps(compiled)
    def run(*args: Any) -> Any:
        if layout is not None and layout_of_torch() != layout:
            _refuse_other_layout(layout)
        rerun_regions(has_attention)
        if len(args) > len(kept):
            args = tuple(args[place] for place in kept)
        with agree(args):
            return compiled(*args)

    return run


def _refuse_other_layout(layout: str) -> None:
    now = layout_of_torch()
    raise UnsupportedPlacement(
        site="a compiled graph with attention over a sharded sequence",
        expected=f"{layout} shards, as when it was compiled",
        got="shards that torch's _context_parallel_shard may have permuted"
        if now is None
        else f"{now} ones, by what torch's context parallelism is doing now",
        remedy="say which they are with options={'layout': ...}, or compile another function for"
        " them",
    )


def read_settings(options: Mapping[str, Any] | None) -> Settings:
    """Return the flags and options of a compile."""
    policy, rest = Policy.read(options or {})
    # How fast link and device are matters to both.
    scheduling, unscheduled = Scheduling.read(options or {})
    rest = {name: value for name, value in rest.items() if name in unscheduled}
    mesh = rest.pop("mesh", None)
    axis = None if mesh is None else _axis_of_option(mesh)
    check_agreement = bool(config.check_agreement)
    is_checked = bool(rest.pop("check_sequence", config.check_sequence))
    return Settings(
        bool(config.enabled), policy, scheduling, axis, rest, check_agreement, is_checked
    )


def _axis_of_option(mesh: object) -> SequenceAxis:
    if not isinstance(mesh, DeviceMesh):
        raise UnsupportedPlacement(
            site='options={"mesh": ...}',
            expected="a DeviceMesh",
            got=repr(mesh),
            remedy="build one with torch.distributed.device_mesh.init_device_mesh",
        )
    return axis_of_mesh(mesh, site='options={"mesh": ...}')


def capture_graph(gm: fx.GraphModule, settings: Settings) -> bool:
    """Capture the attentions of a Dynamo graph, in place; refuse what cannot be.

    Returns:
        Whether there is any, also one that is left alone.
    """
    check_ties(gm.graph)
    has_attention = has_attentions(gm)
    if settings.axis is not None:
        _check_whole(gm)
        if not has_attention and settings.axis.world_size > 1:
            _warn_of_nothing()
    # DTensor's handler computes the same where nothing is to be rewritten, but knows no masks;
    # plain tensors have no handler, and would attend within their shard.
    if settings.enabled or settings.axis is not None or has_masks(gm) or regions_of(gm):
        try:
            capture(gm, settings.axis, settings.policy, settings.check_sequence)
        except CPError as error:
            if settings.axis is not None and settings.check_agreement:
                tell_refusal(settings.axis.group_name, error)
            raise
    return has_attention


def _check_whole(gm: fx.GraphModule) -> None:
    """Refuse a graph that breaks off where plain tensors are shards.

    What Dynamo leaves to Python between two graphs would attend within the local shard: nothing
    about a plain tensor says that it is one.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        raise UnsupportedAttention(
            site='options={"mesh": ...}',
            expected="a model that Dynamo captures whole",
            got=f"a graph break: {reason.reason}",
            remedy="compile with fullgraph=True and mend the break, or pass DTensors to the model",
        )
    if not is_capturing_whole():
        _warn_of_fallback()


def _warn_of_nothing() -> None:
    """Warn of a mesh that was named for nothing."""
    if is_splitting_for_ddp():
        # Its optimizer cuts models into graphs, of which some have no attention.
        return
    warnings.warn(
        'options={"mesh": ...}, and no scaled_dot_product_attention in the graph: attention that is'
        " written by hand sees this rank's shard alone",
        SequenceWarning,
        stacklevel=2,
    )


@cache
def _warn_of_fallback() -> None:
    log.warning(
        'options={"mesh": ...} without fullgraph=True: wherever torch.compile falls back to eager'
        " (a recompile limit, a dispatch mode), attention sees only its own shard. Compile with"
        " fullgraph=True, or pass DTensors to the model."
    )


def _inductor_patches(settings: Settings, mode: str | None) -> dict[str, Any]:
    """Return what Inductor's config is patched with: the user's options and our two hooks."""
    options = {**(list_mode_options(mode) if mode else {}), **settings.inductor_options}
    name = "post_grad_custom_post_pass"
    pinned = append_custom_pass(
        options.get(name, getattr(inductor_config, name)), PinOrder(_cache_key(settings))
    )
    ours = (from_local_like, local_part, seed_of_shard)
    cacheable = {
        **inductor_config.unsafe_marked_cacheable_functions,
        **{f"{f.__module__}.{f.__qualname__}": source_hash() for f in ours},
    }
    return {**options, name: pinned, "unsafe_marked_cacheable_functions": cacheable}


def _cache_key(settings: Settings) -> str:
    """Return what the generated code depends on beside the graph that Inductor hashes."""
    rank = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    asked_for = (settings.enabled, settings.policy, settings.scheduling, settings.axis)
    return repr((source_hash(), rank, *asked_for, settings.check_agreement))


def _compile_lowered(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    settings: Settings,
    inner_compile: Callable[..., Any],
    **kwargs: Any,
) -> Any:
    """Inductor's inner compile, with attentions expanded first.

    The key of the FX-graph cache is then that of the expanded graph, which is this rank's.
    """
    if settings.enabled:
        kind, check = kind_of(kwargs), settings.check_agreement
        lower(gm, kind, settings.scheduling, select_decomp_table(), check)
    with last_strides_kept(ROWS_OF_TILES):
        return inner_compile(gm, example_inputs, **kwargs)


def kind_of(kwargs: Mapping[str, Any]) -> str:
    """Say which graph Inductor's inner compile was called for, by its keyword arguments."""
    if kwargs.get("is_inference"):
        return "inference"
    return "backward" if kwargs.get("is_backward") else "forward"


def _interpret_lowered(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, kind: str, settings: Settings
) -> Callable[..., Any]:
    if settings.enabled:
        lower(gm, kind, settings.scheduling, {}, settings.check_agreement)
    return make_boxed_func(gm.forward)


@contextmanager
def errors_unwrapped() -> Iterator[None]:
    """Let users catch our errors by their own classes: Dynamo wraps others."""
    try:
        yield
    except CPError as error:
        raise as_backend_error(error) from None


correct_losses_compiled_by(cp_inductor, cp_aot_eager)
