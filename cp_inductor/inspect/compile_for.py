"""Compile a Dynamo graph for a target that need not exist, up to its generated code.

    target = Target.parse("cuda:sm_90")     the numbers of the H100; "cpu": this machine
    compile_for(target, gm, inputs, settings, mode, inner_compile=generates(target, load))
      =>  load("forward", graph, code, constants), load("backward", ...)      what runs the graphs

What `load` makes of the code is called as Inductor's own module would be: `cross_compile` keeps the
text, and the rehearsal in `tests/rehearsal` runs it.

If torch was built without CUDA, autograd cannot run on fake GPU tensors. So AOTAutograd traces on
the CPU, without decompositions, and `Retarget` traces its joint graph again, on fake GPU tensors:

    linear = aten.addmm(bias, x, w)             val: cpu
    mean = aten.native_layer_norm(x, ...)[1]    val: cpu, bfloat16
      =>
    linear = aten.addmm(bias, x, w)             val: cuda:0
    mean = ...                                  val: cuda:0, float32: decomposed as for a GPU

Decompositions depend on the device, as do the shapes and dtypes of some results. All later steps,
from the partitioner on, see a graph on the GPU.

Per-chip figures: NVIDIA A100 Tensor Core GPU Architecture (whitepaper, 2020), table 4; NVIDIA H100
Tensor Core GPU Architecture (whitepaper, 2023), tables 2 and 3, SXM5; NVIDIA H200 data sheet
(2024), whose chip is the H100's; NVIDIA Blackwell architecture technical brief (2024) and Blackwell
tuning guide (CUDA 12.8). Per-capability limits: CUDA C++ Programming Guide 12.8, section 17.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table

from cp_inductor.backend.compile import compile_through_inductor, kind_of
from cp_inductor.errors import MissingTriton, UnsupportedTarget
from cp_inductor.graph.nodes import graphs_of
from cp_inductor.inspect.pretend import code_loaded_by, fakes_without_devices, pretend_gpu
from cp_inductor.passes.nodes import insert_graph
from cp_inductor.passes.settings import Settings
from cp_inductor.plan.machine import CHIPS
from cp_inductor.tiles.kernel_table import choose_kernel, get_kernel
from cp_inductor.tiles.kernels import Partial, TileCall
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.inductor import append_custom_pass, triton_for_this_torch
from cp_inductor.torch_private.modes import has_autocast
from cp_inductor.torch_private.tracing import INVOKE_SUBGRAPH, fake_on, retrace

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class GPU:
    """The properties of a GPU that Inductor and Triton read.

    Attributes are named as in `torch.cuda.get_device_properties`; sizes are in bytes.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    shared_memory_per_block: int = 48 * KIB
    regs_per_multiprocessor: int = 64 * KIB
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32


# fmt: off
GPUS = {
    "a100": GPU("NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 * GIB, 164 * KIB, 163 * KIB, 40 * MIB),
    "h100": GPU("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 * GIB, 228 * KIB, 227 * KIB, 50 * MIB),
    "h200": GPU("NVIDIA H200", 9, 0, 132, 141 * GIB, 228 * KIB, 227 * KIB, 50 * MIB),
    "b200": GPU("NVIDIA B200", 10, 0, 148, 180 * GIB, 228 * KIB, 227 * KIB, 126 * MIB),
}
# fmt: on

# The name of an architecture stands for one chip.
ARCHITECTURES = {f"sm_{major}{minor}": chip for (major, minor), chip in CHIPS.items()}

TARGETS = ("cpu", *(f"cuda:{name}" for name in (*ARCHITECTURES, *GPUS)))


@dataclass(frozen=True, slots=True)
class Target:
    """A device to generate code for."""

    name: str  # one of `TARGETS`
    chip: str  # the key of the GPU in `GPUS`; "" for the CPU of this machine

    @staticmethod
    def parse(name: str) -> Target:
        """Return the target called ``cpu``, ``cuda:sm_90``, ``cuda:h200``, ``h200``, ...

        Raises:
            UnsupportedTarget: the name is unknown.
        """
        lower = name.lower()
        lower = lower if lower == "cpu" or ":" in lower else f"cuda:{lower}"
        if lower not in TARGETS:
            raise UnsupportedTarget(
                site=f"target={name!r}",
                expected=f"one of {', '.join(TARGETS)}",
                got=repr(name),
                remedy="name the architecture or the chip, as in 'cuda:sm_90' or 'cuda:h200'",
            )
        chip = lower.removeprefix("cuda:")
        return Target(lower, "" if lower == "cpu" else ARCHITECTURES.get(chip, chip))

    @property
    def gpu(self) -> GPU | None:
        """The GPU; None for a CPU."""
        return GPUS.get(self.chip)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of a GPU; None for a CPU."""
        return None if self.gpu is None else (self.gpu.major, self.gpu.minor)


CUDA = torch.device("cuda", 0)
# What SDPA computes an unsharded attention by on the CPU.
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# (kind of the graph, the lowered graph, its code, constants by name) => what runs the graph
Load = Callable[[str, fx.GraphModule, str, Mapping[str, Any]], Callable[..., Any]]


def compile_for(
    target: Target,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    mode: str | None,
    *,
    inner_compile: Callable[..., Any],
) -> Callable[..., Any]:
    """Compile a graph of Dynamo, whose inputs are on the CPU, by the settings of `settings_for`.

    Lowered graphs are compiled by `inner_compile`, such as `generates(target, load)`.
    """
    compile_graph = partial(compile_through_inductor, inner_compile=inner_compile)
    if target.gpu is None:
        return compile_graph(gm, example_inputs, settings, mode)
    _check_autocast(gm)
    with fakes_without_devices():
        # Do not decompose yet: `Retarget` applies the GPU's decompositions later.
        return compile_graph(gm, example_inputs, settings, mode, decompositions={})


def generates(target: Target, load: Load) -> Callable[..., Any]:
    """Return what generates the code of lowered graphs, and has `load` make functions of it."""

    def generate(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        graph = fx.GraphModule(gm, deepcopy(gm.graph))
        device: Any = nullcontext()
        if target.gpu is not None:
            device = pretend_gpu(target.gpu)
            inputs = gm.graph.find_nodes(op="placeholder")
            example_inputs = [node.meta["val"] for node in inputs]
        with device, code_loaded_by(partial(load, kind_of(kwargs), graph)):
            return compile_fx_inner(gm, example_inputs, **kwargs)

    return generate


def settings_for(target: Target, settings: Settings, mode: str | None) -> Settings:
    """Return the settings of a compile for a target that need not exist.

    Raises:
        UnsupportedTarget: an option asks for measurements on the device.
    """
    capability = target.capability
    if capability is None:
        return settings
    settings = planned_for(target, settings)
    options = dict(settings.inductor_options)
    tuned = [name for name in options if name.startswith("max_autotune") and options[name]]
    if tuned or "max-autotune" in (mode or ""):
        raise UnsupportedTarget(
            site=f"target={target.name!r}",
            expected="options that need no measurement on the device",
            got=", ".join(tuned) or f"mode={mode!r}",
            remedy="leave it out: it would choose kernels by timing them on the device",
        )
    name = "joint_custom_pre_pass"
    existing = options.get(name, getattr(inductor_config, name))
    # CUDA graphs and the padding of odd matrix sizes need a real device.
    unmeasured = {"shape_padding": False, "triton.cudagraphs": False}
    options |= {name: append_custom_pass(existing, Retarget(capability)), **unmeasured}
    return replace(settings, inductor_options=options)


def planned_for(target: Target, settings: Settings) -> Settings:
    """Return settings whose plans choose kernels for a target."""
    there = replace(settings.plan_options, device="cpu" if target.gpu is None else "cuda")
    return replace(settings, plan_options=replace(there, capability=target.capability))


def _check_autocast(gm: fx.GraphModule) -> None:
    is_entered = any(map(has_autocast, graphs_of(gm)))
    if is_entered or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UnsupportedTarget(
            site="autocast",
            expected="a model that computes in the dtypes of its tensors",
            got="autocast, whose rules on a GPU differ from those on the CPU, where graphs"
            " are traced",
            remedy="cast model and inputs: model.bfloat16()",
        )


def target_for_code(name: str) -> Target:
    """Return a target that code can be generated for here; ask before anything takes time.

    Raises:
        UnsupportedTarget: the name is unknown.
        MissingTriton: it is a GPU, and triton is not installed.
    """
    target = Target.parse(name)
    if target.gpu is not None:
        check_triton()
    return target


def check_triton() -> None:
    """Raise MissingTriton if triton is not installed."""
    if find_spec("triton") is None:
        version = triton_for_this_torch()
        raise MissingTriton(
            site="target='cuda:...'",
            expected=f"triton {version}, which belongs to torch {torch.__version__}",
            got="no triton",
            remedy=f"pip install 'cp-inductor[triton]' (or triton=={version})",
        )


class Retarget(CustomGraphPass):
    """Replace a graph by its trace on fake tensors of a GPU, in place.

    Assumes: runs as Inductor's custom pass before its others over the joint (or inference) graph.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def __call__(self, graph: fx.Graph) -> None:
        """Retarget a joint graph or an inference graph.

        Raises:
            UnsupportedTarget: subgraphs but of nested_compile_region, or what `FLASH` lacks.
        """
        gm = graph.owning_module
        assert gm is not None
        placeholders = graph.find_nodes(op="placeholder")
        for node in placeholders:
            node.meta["val"] = fake_on(node.meta["val"], CUDA)
        values = [node.meta["val"] for node in placeholders]
        traced = retrace(_OnGPU(gm, self.capability).run, values, select_decomp_table())
        traced.graph.eliminate_dead_code()
        for node in traced.graph.find_nodes(op="get_attr"):
            name = f"_retargeted{node.target}"
            setattr(gm, name, getattr(traced, node.target))
            node.target = name
        _replace(graph, traced)

    def uuid(self) -> object | None:
        """Return None, so that code for a pretended device is not cached."""
        return None


class _OnGPU(fx.Interpreter):
    """Runs a graph on fake GPU tensors, with the GPU's devices and attention kernels."""

    def __init__(self, gm: fx.GraphModule, capability: tuple[int, int]) -> None:
        super().__init__(gm)
        self.capability = capability

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        # Move constants to the GPU, except scalars, which may be on the CPU in a GPU graph, too.
        if isinstance(value, Tensor) and value.ndim > 0:
            value = torch.ops.prims.device_put(value, CUDA)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda device: CUDA if device.type == "cpu" else device, (args, kwargs)
        )
        if target is INVOKE_SUBGRAPH:
            body, name, *operands = args
            # Torch traces a name once; here, calls of a name may differ in strides.
            name += str([value.stride() for value in operands if isinstance(value, Tensor)])
            return INVOKE_SUBGRAPH(_OnGPU(body, self.capability).run, name, *operands)
        if isinstance(target, torch._ops.HigherOrderOperator):
            self._refuse(target, "no subgraphs but of nested_compile_region", "one")
        if target not in (FLASH, FLASH_BACKWARD):
            return super().call_function(target, args, kwargs)
        call = bind_arguments(target, args, kwargs)
        if call["attn_mask"] is not None or call["dropout_p"]:
            mask = "a tensor" if call["attn_mask"] is not None else None
            got = f"dropout_p={call['dropout_p']} and attn_mask={mask}"
            self._refuse(target, "unsharded attention without a mask or dropout", got)
        inputs = call["query"], call["key"], call["value"]
        facts: dict[str, Any] = {"site": target.name(), "capability": self.capability}
        name, _ = choose_kernel(*inputs, dtype=inputs[0].dtype, **facts)
        kernel, tile = get_kernel(name), TileCall(*inputs, call["is_causal"], call["scale"])
        if target is FLASH_BACKWARD:
            return kernel.backward(tile, call["grad_out"], Partial(call["out"], call["logsumexp"]))
        partial = kernel.forward(tile)
        return partial.out, partial.lse

    def _refuse(self, target: Any, expected: str, got: str) -> NoReturn:
        raise UnsupportedTarget(
            site=target.name(),
            expected=f"{expected}, because the graph is traced again for the GPU",
            got=got,
            remedy="generate the code on a machine with a GPU, or use target='cpu'",
        )


def _replace(graph: fx.Graph, traced: fx.GraphModule) -> None:
    """Replace the nodes between a graph's placeholders and its output by those of another graph."""
    output = graph.output_node()
    old = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    results, _ = insert_graph(traced, graph.find_nodes(op="placeholder"), before=output)
    structure = pytree.tree_structure(output.args[0])
    output.args = (pytree.tree_unflatten(pytree.tree_leaves(results), structure),)
    for node in reversed(old):
        graph.erase_node(node)
    graph.lint()
