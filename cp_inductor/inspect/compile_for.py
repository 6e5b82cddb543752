"""Compile a Dynamo graph for a target that need not exist, up to its generated code.

    compile_for(target, gm, inputs, settings, mode, inner_compile=generates(target, load))
      =>  load("forward", graph, code, constants), load("backward", ...)      what runs the graphs

AOTAutograd traces on the CPU, and its joint graph is moved to the target by `Retarget`. What `load`
makes of the code is called as Inductor's own module would be: `cross_compile` only keeps the text,
and the rehearsal in `tests/rehearsal` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner

from cp_inductor.backend.compile import compile_through_inductor, kind_of
from cp_inductor.errors import MissingTriton, UnsupportedTarget
from cp_inductor.inspect.pretend import code_loaded_by, fakes_without_devices, pretend_gpu
from cp_inductor.inspect.retarget import Retarget
from cp_inductor.inspect.targets import Target
from cp_inductor.passes.settings import Settings
from cp_inductor.torch_private.inductor import append_custom_pass, triton_for_this_torch
from cp_inductor.torch_private.modes import has_autocast

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
    """Compile a graph of Dynamo, whose inputs are on the CPU, for a target.

    Args:
        target: to generate code for.
        gm, example_inputs, mode: as a backend of torch.compile has them.
        settings: from `settings_for`.
        inner_compile: what compiles the lowered graphs, such as `generates(target, load)`.
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
    if target.gpu is None:
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
    options |= {name: append_custom_pass(existing, Retarget(target)), **unmeasured}
    return replace(settings, inductor_options=options)


def planned_for(target: Target, settings: Settings) -> Settings:
    """Return settings whose plans choose kernels for a target."""
    there: dict[str, Any] = {"device": target.device_type, "capability": target.capability}
    return replace(settings, plan_options=replace(settings.plan_options, **there))


def _check_autocast(gm: fx.GraphModule) -> None:
    entered = any(
        has_autocast(part.graph) for part in gm.modules() if isinstance(part, fx.GraphModule)
    )
    if entered or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
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
