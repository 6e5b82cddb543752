"""The backends of torch.compile: "cp_inductor", and "cp_aot_eager" for debugging.

    Dynamo graph . capture . AOTAutograd . lower . Inductor         cp_inductor
    Dynamo graph . capture . AOTAutograd . lower . interpreted      cp_aot_eager

`passes/pipeline.py` has the list of passes behind `capture` and `lower`.

torch.compile finds them by entry point. It imports this module, and with it the DTensor handlers,
before Dynamo traces anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.tensor import DTensor

from cp_inductor.backend.cache_key import cache_key
from cp_inductor.backend.captured import Captured
from cp_inductor.backend.failed_trace import errors_unwrapped, trace_for
from cp_inductor.backend.partition import Partition
from cp_inductor.backend.progress import compile_announced
from cp_inductor.dtensor.axis import from_local_like, local_part, seed_of_shard
from cp_inductor.dtensor.packed import document_numbers
from cp_inductor.dtensor.rules import register_rules
from cp_inductor.dtensor.rules.in_parts import note_drawn
from cp_inductor.dtensor.rules.writes import replicated_like, replicated_numbers
from cp_inductor.graph.nodes import nodes_of
from cp_inductor.passes.pipeline import PostGrad, Stage, run_passes
from cp_inductor.passes.settings import Settings, read_settings
from cp_inductor.region.flex_bias import bias_of_scores
from cp_inductor.sequence.wholes import count_labels
from cp_inductor.source import source_hash
from cp_inductor.tiles.kernel_table import ROWS_OF_TILES
from cp_inductor.torch_private.dtensor import local_of
from cp_inductor.torch_private.dynamo import one_compile_at_a_time
from cp_inductor.torch_private.inductor import (
    append_custom_pass,
    logits_in_chunks,
    lowered_as_asked,
    meshes_keyed,
)
from cp_inductor.torch_private.sizes import is_zero
from cp_inductor.torch_private.symbolic_dtensor import first_symbols_kept
from cp_inductor.torch_private.traces import traces

log = logging.getLogger("cp_inductor")

_NEW_ZEROS = torch.ops.aten.new_zeros.default

# If the logits are larger, they and their loss are computed for some tokens at a time.
MAX_WHOLE_BYTES = 2**30


def cp_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph through Inductor, with its sequence-sharded attentions rewritten.

    Args:
        gm: from Dynamo.
        example_inputs: its inputs.
        mode: as torch.compile's.
        options: ``mesh`` (a 1-D DeviceMesh: plain tensors are shards of the sequence over it);
            ``seq_dims`` (the dims of plain inputs that hold tokens, by their names);
            ``seq_len`` (number of tokens of the whole sequence; needed if plain shards differ in
            length); ``strategy``, ``stages``, ``keep_bytes``, ``schedule``,
            ``memory_budget_bytes``, ``link_bytes_per_s``, ``device_flops_per_s`` and
            ``check_sequence``, as in `cp_inductor.config`. All others are Inductor's.

    Returns:
        The compiled function.

    Raises:
        CPError: an attention is sharded along the sequence and cannot be rewritten. The graph, the
            model and the process group are left as they were.
    """
    with errors_unwrapped(gm), traces.switched(True):
        settings = read_settings(options)
        return compile_through_inductor(gm, example_inputs, settings, mode)


def cp_aot_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Run the graphs of `cp_inductor` interpreted, for debugging; takes the same arguments."""
    with errors_unwrapped(gm), traces.switched(True):
        settings = read_settings(options)
        captured = Captured.of(gm, settings)
        compilers = {
            f"{role}_compiler": partial(_interpret_lowered, kind=kind, captured=captured)
            for role, kind in (("fw", "forward"), ("bw", "backward"), ("inference", "inference"))
        }
        compile_graph = aot_autograd(
            **compilers,
            partition_fn=Partition(note_backward=captured.note_backward),
            keep_inference_input_mutations=True,
        )
        with first_symbols_kept():
            compiled: Callable[..., Any] = compile_graph(gm, captured.inputs(example_inputs))
        return captured.runner(compiled)


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
        inner_compile: compiles each lowered graph from AOTAutograd; Inductor's by default.
        kwargs: for `torch._inductor.compile_fx.compile_fx`.

    Returns:
        The compiled function.
    """
    has_empty = any(map(_is_empty_part, nodes_of(gm)))
    captured = Captured.of(gm, settings)
    post_grad = PostGrad(cache_key(settings))
    partition = Partition(note_backward=captured.note_backward)
    patches = _inductor_patches(settings, mode, post_grad, partition)
    if has_empty:
        # Empty parts would be constants, and all that is computed of them, though it may start
        # collectives: the rank would run its backward in the forward, or recompute too little.
        kwargs.setdefault("decompositions", {**select_decomp_table(), _NEW_ZEROS: _empty_of})
    compile_inner = inner_compile or compile_fx_inner
    lowered = partial(_compile_lowered, inner_compile=compile_inner, captured=captured)
    # A graph from AOTAutograd's cache is loaded here, without a call of `lowered`.
    inputs = captured.inputs(example_inputs)
    with ExitStack() as around:
        if patches.get("auto_chunker.enable"):
            around.enter_context(logits_in_chunks(_tell_whole_logits))
        around.enter_context(first_symbols_kept())
        around.enter_context(meshes_keyed())
        around.enter_context(compile_announced(len(captured.attentions)))
        compiled = compile_fx(gm, inputs, inner_compile=lowered, config_patches=patches, **kwargs)
    return captured.runner(cast("Callable[..., Any]", compiled))


def _is_empty_part(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, DTensor) and any(is_zero(size) for size in local_of(value).shape)


def _empty_of(x: Tensor, size: Sequence[int], **options: Any) -> Tensor:
    """Decompose `new_zeros`, by which DTensor makes empty parts of a tensor, into a part of it."""
    of_same = options.get("dtype"), options.get("device")
    if 0 in size and of_same in ((None, None), (x.dtype, x.device)):
        return x.reshape(-1)[:0].reshape(size)
    made: Tensor = select_decomp_table()[_NEW_ZEROS](x, size, **options)
    return made


def _inductor_patches(
    settings: Settings, mode: str | None, post_grad: PostGrad, partition: Partition
) -> dict[str, Any]:
    """Return the patches of Inductor's config: the user's options and our hooks."""
    options = {**(list_mode_options(mode) if mode else {}), **settings.inductor_options}
    partitioner = "custom_partitioner_fn"
    partition.inner = options.get(partitioner, getattr(inductor_config, partitioner))
    name = "post_grad_custom_post_pass"
    custom = append_custom_pass(options.get(name, getattr(inductor_config, name)), post_grad)
    ours = (
        *(bias_of_scores, count_labels, document_numbers, from_local_like, local_part),
        *(note_drawn, seed_of_shard, replicated_like, replicated_numbers),
    )
    cacheable = {
        **inductor_config.unsafe_marked_cacheable_functions,
        **{f"{f.__module__}.{f.__qualname__}": source_hash() for f in ours},
    }
    chunker = {}
    if not any(option.startswith("auto_chunker.") for option in options):
        size = "auto_chunker.output_size_threshold"
        chunker = {"auto_chunker.enable": True, size: MAX_WHOLE_BYTES}
    hooks = {name: custom, partitioner: partition}
    hooks["unsafe_marked_cacheable_functions"] = cacheable
    return {**chunker, **options, **hooks}


def _tell_whole_logits(projection: fx.Node, reason: str) -> None:
    size = projection.meta["val"].nbytes / 2**30
    log.warning(
        "%s (%.1f GiB) and what a loss makes of it stay whole: Inductor's chunker says %s",
        projection.name,
        size,
        reason,
    )


def _compile_lowered(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: Callable[..., Any],
    captured: Captured,
    **kwargs: Any,
) -> Any:
    """Lower attentions, then call Inductor's inner compile.

    So the key of the FX-graph cache is that of the lowered graph. It has the rank, and so has that
    of AOTAutograd, which does not see which part of a replicated tensor a rank takes.
    """
    with ExitStack() as until:
        captured.lower(gm, kind_of(kwargs), decompositions=select_decomp_table(), until=until)
        # A backward may be compiled later, when it is first called, on any thread.
        with one_compile_at_a_time, meshes_keyed(), lowered_as_asked(ROWS_OF_TILES):
            return inner_compile(gm, example_inputs, **kwargs)


def kind_of(kwargs: Mapping[str, Any]) -> str:
    """Tell which graph Inductor's inner compile was called for, from its keyword arguments."""
    if kwargs.get("is_inference"):
        return "inference"
    return "backward" if kwargs.get("is_backward") else "forward"


def _interpret_lowered(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, kind: str, captured: Captured
) -> Callable[..., Any]:
    lowering = captured.lower(gm, kind)
    if lowering is not None:
        run_passes(Stage.INTERPRET, lowering)
    return make_boxed_func(gm.forward)


register_rules()
trace_for(cp_inductor, cp_aot_eager)
