"""Inductor's passes, order and strides; Triton without a GPU. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import AOTInput
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.traceback import NodeSource
from torch.utils._ordered_set import OrderedSet


def is_input_of_forward(node: fx.Node) -> bool:
    """Whether an input of a graph from AOTAutograd is an input of the whole function.

    The other inputs are tensors that the forward saved, and gradients (2.13-2.15).
    """
    description = node.meta.get("desc")
    return isinstance(description, AOTInput) and not description.is_tangent()


def keep_order(graph: fx.Graph, earlier_of: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor run each node after the nodes that `earlier_of` gives for it.

    `preserve_node_ordering` (torch._inductor.fx_passes.control_dependencies, 2.13-2.15) wraps each
    node in a higher-order op whose lowering adds dependencies to the scheduler. Call this after the
    FX-graph cache has computed its key, because that op is not cacheable.

    A tensor that several matrix multiplications read must be computed once and stored. Inductor
    does not see multiplications in the higher-order op, so its readers would recompute the tensor;
    `meta["inductor_realize_to_strides"]` (torch._inductor.graph, 2.13-2.15) makes it store it.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    for source in {source for node in earlier_of for source in node.all_input_nodes}:
        if len(source.users) > 1 and isinstance(source.meta.get("val"), Tensor):
            source.meta["inductor_realize_to_strides"] = True
    preserve_node_ordering(
        graph, {node: OrderedSet(earlier) for node, earlier in earlier_of.items() if earlier}
    )


def sort_topologically(graph: fx.Graph) -> None:
    """Move nodes after their inputs; nodes that are in order keep their order.

    Inductor does so after its post-grad passes; until then a graph may be out of order (2.13-2.15).
    """
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def append_custom_pass(existing: Any, ours: CustomGraphPass) -> Any:
    """Return a custom-pass setting of Inductor's config with one more pass (2.13-2.15)."""
    return ours if existing is None else [*get_custom_graph_passes(existing), ours]


# In the meta of a concatenation: it is to be one kernel.
ONE_KERNEL_KEY = "cp_inductor_one_kernel"

# Beyond so many inputs, that each element asks of all inputs whether it is theirs takes too long.
MAX_INPUTS_OF_KERNEL = 64

# The version that each release's CUDA build requires, by its wheel's metadata (2.13: its sources).
_TRITON_OF_TORCH = {"2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}

# Returns Inductor's cache folder.
cache_folder = cache_dir


@contextmanager
def lowered_as_asked(arguments_of: Mapping[torch._ops.OpOverload, Sequence[int]]) -> Iterator[None]:
    """Have Inductor keep last strides of 1, and generate one kernel where a concatenation asks.

    For attention kernels, `_maybe_layout_constraints` (torch._inductor.lowering, 2.13-2.15)
    constrains only the order of strides. Inductor may change layouts, as it does for convolutions,
    so the innermost stride may differ from 1 although it is 1 in the graph. Here it is 1, by copies
    if needed.

    `cat` (torch._inductor.lowering, 2.13-2.15) copies each input by a kernel of its own on a GPU if
    there are more than eight, if one of them was reduced, or if an op of aten reads the result.
    `config.force_pointwise_cat` (2.13-2.15) says what it is to do.

    What nothing but such a concatenation reads, such as another one or a sum, is computed in its
    kernel. Inductor would store what reads more than eight buffers or has more than thirty ops:
    `StorageBox.has_exceeded_max_reads` and `Loops.has_large_inner_fn` (torch._inductor.ir,
    2.13-2.15) tell it so.

    Args:
        arguments_of: op => the positions of the arguments whose last strides are 1.
    """
    from torch._inductor import config, ir, lowering
    from torch._inductor.virtualized import V

    constraints = lowering._maybe_layout_constraints
    strided = {
        op: partial(_keep_last_strides, constraints.get(op), places)
        for op, places in arguments_of.items()
    }
    cat = torch.ops.aten.cat.default
    lower = lowering.lowerings[cat]

    def lower_cat(inputs: Sequence[Any], dim: int = 0) -> Any:
        is_asked_for = V.current_node.meta.get(ONE_KERNEL_KEY, False)
        is_on_cpu = inputs[0].get_device().type == "cpu"
        if not is_asked_for or is_on_cpu or len(inputs) > MAX_INPUTS_OF_KERNEL:
            return lower(inputs, dim)
        with config.patch(force_pointwise_cat=True):
            return lower(inputs, dim)

    def unless_inlined(is_too_much: Callable[..., bool]) -> Callable[..., bool]:
        def is_stored(value: Any, *args: Any, **kwargs: Any) -> bool:
            is_inlined = isinstance(V.current_node, fx.Node) and _is_inlined(V.current_node)
            return not is_inlined and is_too_much(value, *args, **kwargs)

        return is_stored

    exceeded, large = ir.StorageBox.has_exceeded_max_reads, ir.Loops.has_large_inner_fn
    with (
        mock.patch.dict(constraints, strided),
        mock.patch.dict(lowering.lowerings, {cat: lower_cat}),
        mock.patch.object(ir.StorageBox, "has_exceeded_max_reads", unless_inlined(exceeded)),
        mock.patch.object(ir.Loops, "has_large_inner_fn", unless_inlined(large)),
    ):
        yield


def _keep_last_strides(
    constrain: Any, places: Sequence[int], node: fx.Node, *args: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """Apply another layout constraint, and then ask for last strides of 1."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if constrain is not None:
        args, kwargs = constrain(node, *args, **kwargs)
    arguments = list(args)
    for place in places:
        strides = arguments[place].maybe_get_stride()
        if strides is None or not V.graph.sizevars.statically_known_equals(strides[-1], 1):
            arguments[place] = ir.ExternKernel.require_contiguous(arguments[place])
    return tuple(arguments), kwargs


def _is_inlined(node: fx.Node) -> bool:
    """Whether a node is computed in the kernel of the one concatenation that reads it."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type == "cpu" or not _is_by_element(node):
        return False
    cat = None
    while len(node.users) == 1 and _is_by_element(user := next(iter(node.users))):
        node = user
        if node.meta.get(ONE_KERNEL_KEY, False):
            cat = node
    return cat is not None and _num_reads(cat) <= MAX_INPUTS_OF_KERNEL


def _num_reads(node: fx.Node) -> int:
    """Return how many tensors the kernel of a node reads, if all that it alone reads is inlined."""
    return sum(
        _num_reads(source) if len(source.users) == 1 and _is_by_element(source) else 1
        for source in node.all_input_nodes
    )


def _is_by_element(node: fx.Node) -> bool:
    """Whether an element of a result is computed from one element, or a few, of each input."""
    target, aten = node.target, torch.ops.aten
    if not isinstance(target, torch._ops.OpOverload) or target is aten.expand.default:
        return False
    if target is aten.cat.default:
        return bool(node.meta.get(ONE_KERNEL_KEY, False))
    return (
        target is torch.ops.prims.convert_element_type.default
        or torch.Tag.pointwise in target.tags
        or target.is_view
    )


def put_label(node: fx.Node, label: str) -> None:
    """Have Inductor write a label into the comment above what it generates for a node.

    `get_kernel_metadata` (torch._inductor.utils, 2.13-2.15) writes there the name of the first
    `NodeSource` (torch.fx.traceback, 2.13-2.15) in `meta["from_node"]`.
    """
    source = NodeSource(node, "cp_inductor")
    assert source.node_info is not None
    source.node_info.name = label
    node.meta["from_node"] = [source]


def label_of(node: fx.Node) -> str | None:
    """Return the label that was put last; another text, or None, if there is none."""
    sources = node.meta.get("from_node")
    return str(sources[0].name) if sources else None


def is_bisected_away(name: str) -> bool:
    """Whether torch's bisector has a pass of ours left out, as the environment says.

    `TORCH_BISECT_BACKEND=cp_inductor TORCH_BISECT_SUBSYSTEM=passes TORCH_BISECT_MAX=n` keeps the
    first n applications (2.13-2.15).
    """
    from torch._inductor.compiler_bisector import CompilerBisector

    return CompilerBisector.disable_subsystem("cp_inductor", "passes", lambda: name)


def cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor will call."""
    with suppress(InvalidCxxCompiler):
        return str(get_cpp_compiler())
    return None


@contextmanager
def meshes_keyed() -> Iterator[None]:
    """Let Inductor's and AOTAutograd's caches know the meshes of a graph by their ranks and groups.

    `FxGraphCachePickler` (torch._inductor.codecache, 2.13) pickles all of a mesh: also this rank,
    and Python's own hash, which is another one in each process.
    """
    from torch._inductor.codecache import FxGraphCachePickler

    real = FxGraphCachePickler._reduce_fake_script_object

    def reduce(pickler: FxGraphCachePickler, handed_on: Any) -> Any:
        if not isinstance(mesh := handed_on.real_obj, DeviceMesh):
            return real(pickler, handed_on)
        return tuple, ((mesh._stable_hash(), *getattr(mesh, "_dim_group_names", ())),)

    with mock.patch.object(FxGraphCachePickler, "_reduce_fake_script_object", reduce):
        yield


@contextmanager
def logits_in_chunks(tell: Callable[[fx.Node, str], None]) -> Iterator[None]:
    """Let Inductor's chunker leave a graph as it is, whatever it fails of, and tell of it.

    `chunk` (torch._inductor.fx_passes.auto_chunker, 2.13) computes a large projection, what follows
    it up to a loss, and the gradients of both, for some rows at a time. It raises `CantChunk` for
    ops that it has no rule for, which the pass around it takes; it also asserts.

    It looks for values that have as many elements as the projection
    (`propagator.get_fake_tensor_from_node_arg`), and fails where only data says how many a value
    has, as in graphs whose plans the batch decides. Such values are hidden from it: they belong to
    attention, before the projection and after its gradient.

    Args:
        tell: called with the projection that stays whole, and the reason.
    """
    from torch._inductor import inductor_prims  # noqa: F401  # defines ops that the chunker names
    from torch._inductor.fx_passes import auto_chunker
    from torch._inductor.fx_passes.auto_chunker import propagator

    real, read = auto_chunker.chunk, propagator.get_fake_tensor_from_node_arg

    def read_static(node: fx.Node) -> Tensor | None:
        value: Tensor | None = read(node)
        return None if value is None or free_unbacked_symbols(value) else value

    def chunk(gm: fx.GraphModule) -> fx.GraphModule:
        try:
            return real(gm)
        except Exception as error:
            for node in gm.graph.nodes:
                node.meta.pop("chunking", None)
            projection = auto_chunker.find_amplifier_node(gm.graph)
            if projection is not None:
                tell(projection, str(error).partition("\n")[0] or type(error).__name__)
            raise auto_chunker.CantChunk(str(error)) from error

    with (
        mock.patch.object(auto_chunker, "chunk", chunk),
        mock.patch.object(propagator, "get_fake_tensor_from_node_arg", read_static),
    ):
        yield


def triton_for_this_torch() -> str:
    """Return the triton version that the installed torch requires; "any" if unknown."""
    return _TRITON_OF_TORCH.get(".".join(torch.__version__.split(".")[:2]), "any")


def compile_triton_kernel(autotuner: Any) -> Iterator[tuple[str, Any]]:
    """Compile one of Inductor's Triton kernels in every configuration that it would try.

    `CachingAutotuner.configs` and `._precompile_config` (torch._inductor.runtime.triton_heuristics,
    2.13-2.15), which Inductor's compile workers call, too. Call this within `pretend_gpu`. It
    yields the configuration as text, and the compiled kernel.
    """
    from torch._inductor import config as inductor_config

    # With the static launcher, a compiled kernel gives only a loader, not the machine code.
    with inductor_config.patch(use_static_triton_launcher=False):
        for config in autotuner.configs:
            yield str(config).replace(",", ""), autotuner._precompile_config(config).kernel


def cuobjdump_path() -> str:
    """Return the path of cuobjdump, which reads machine code and comes with triton (3.7-3.9)."""
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)
