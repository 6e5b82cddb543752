"""Pretend to compilers that a device exists, or that process groups do not.

Read in torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cp_inductor.torch_private.leaned_on import C10D_TABLES
from cp_inductor.torch_private.shardings import forget_shardings


@contextmanager
def fakes_without_devices() -> Iterator[None]:
    """Within this context, make fake tensors and constants work whose device does not exist.

    Some methods of Tensor switch to the tensor's device before they dispatch (THPVariable_getitem,
    and those with an OptionalDeviceGuard in torch/csrc/autograd/python_variable_methods.cpp,
    2.13-2.15). The ops behind them do not, so fake tensors get methods that call the ops.

    `UniformValueConstantFolder` (torch._inductor.fx_passes.joint_graph, 2.13-2.15) evaluates ops
    that make uniform tensors on the device that the graph names: here on the CPU.
    """
    from torch._inductor.fx_passes import joint_graph
    from torch._subclasses.fake_tensor import FakeTensor

    class OnCPU(joint_graph.UniformValueConstantFolder):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with _DevicesAreCPU():
                super().__init__(*args, **kwargs)

        def run(self, *args: Any, **kwargs: Any) -> Any:
            with _DevicesAreCPU():
                return super().run(*args, **kwargs)

    aten = torch.ops.aten
    methods: dict[str, Any] = {
        "contiguous": lambda tensor, memory_format=torch.contiguous_format: aten.contiguous(
            tensor, memory_format=memory_format
        ),
        "copy_": lambda tensor, source, non_blocking=False: aten.copy_(
            tensor, source, non_blocking
        ),
        "__invert__": lambda tensor: aten.bitwise_not(tensor),
        "__getitem__": _index,
    }
    folder = mock.patch.object(joint_graph, "UniformValueConstantFolder", OnCPU)
    with mock.patch.multiple(FakeTensor, **methods), folder:
        yield


class _DevicesAreCPU(TorchFunctionMode):
    """A mode that replaces every device among the arguments of functions and ops by the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        cpu = torch.device("cpu")
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: cpu, (args, kwargs or {}))
        return func(*args, **kwargs)


def _index(tensor: Tensor, index: Any) -> Tensor:
    """Return tensor[index], by ops; the index has integers, slices, None, Ellipsis and tensors."""
    aten = torch.ops.aten
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    used += sum(part.ndim - 1 for part in parts if _is_mask(part))
    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    at = next(place for place, part in enumerate(parts) if part is Ellipsis)
    parts[at : at + 1] = [slice(None)] * (tensor.ndim - used)
    dim, tensors = 0, {}
    for part in parts:
        if part is None:
            tensor = aten.unsqueeze(tensor, dim)
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, Tensor):
            tensors[dim] = part
            dim += part.ndim - 1 if _is_mask(part) else 0
        elif isinstance(part, (int, torch.SymInt)) and not isinstance(part, bool):
            tensor = aten.select(tensor, dim, part)
            continue
        else:
            raise NotImplementedError(f"indexing a fake tensor by {part!r}")
        dim += 1
    if not tensors:
        return tensor
    result: Tensor = aten.index(tensor, [tensors.get(place) for place in range(max(tensors) + 1)])
    return result


def _is_mask(part: object) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool


@contextmanager
def stashed_process_groups() -> Iterator[None]:
    """Within this context, hide all process groups; afterwards, restore them.

    New groups within it can have the same names as the hidden ones; names are part of generated
    code. The tables of `torch.distributed.distributed_c10d._world` and the C++ registry of names
    (`_register_process_group`; 2.13-2.15) are emptied and refilled; the groups themselves are not
    destroyed. `sys.excepthook` is restored, too, because `init_process_group` replaces it.
    """
    c10d = dist.distributed_c10d
    world = c10d._world
    tables = [getattr(world, name) for name in C10D_TABLES if hasattr(world, name)]
    saved = [dict(table) for table in tables]
    registered = dict(world.pg_names)
    default, count = world.default_pg, world.group_count
    method, hook = c10d._default_pg_init_method, sys.excepthook

    def swap(contents: Sequence[Mapping[Any, Any]]) -> None:
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)

    for name in registered.values():
        c10d._unregister_process_group(name)
    swap([{}] * len(tables))
    c10d._update_default_pg(None)
    world.group_count = 0
    forget_shardings()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        swap(saved)
        for group, name in registered.items():
            c10d._register_process_group(name, group)
        c10d._update_default_pg(default)
        world.group_count, c10d._default_pg_init_method = count, method
        sys.excepthook = hook
        forget_shardings()  # entries depend on the rank, but their keys do not


@contextmanager
def code_loaded_by(load: Callable[[str, Mapping[str, Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within this context, let `load` make functions of the code that Inductor generates.

    It takes the code, and the constants that the code reads by name, and returns what runs the
    graph. `GraphLowering.compile_to_module` (torch._inductor.graph, 2.13-2.15) is replaced.
    """
    from torch._inductor.graph import GraphLowering

    def generate(self: GraphLowering) -> SimpleNamespace:
        code, _ = self.codegen_with_cpp_wrapper() if self.cpp_wrapper else self.codegen()
        constants = {**self.constants, **self.torchbind_constants}
        call = load(code.value, constants)
        return SimpleNamespace(call=call, runner=None, __file__="loaded_by_us.py")

    with mock.patch.object(GraphLowering, "compile_to_module", generate):
        yield


# Modules and classes with functions that cache what they know about devices and Triton.
_DEVICE_CACHES = (
    "torch.utils._triton",
    "torch._inductor.utils",
    "torch._inductor.codegen.cuda.cuda_env",
    "torch._inductor.runtime.hints:DeviceProperties",
    "torch._inductor.codecache:CacheBase",
)


def _clear_device_caches() -> None:
    for place in _DEVICE_CACHES:
        module, _, name = place.partition(":")
        try:
            owner: Any = import_module(module)
        except ImportError:  # not every supported release has cuda_env
            continue
        for value in list(vars(getattr(owner, name) if name else owner).values()):
            function = getattr(value, "__func__", value)
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@contextmanager
def pretend_gpu(properties: Any) -> Iterator[None]:
    """Within this context, Inductor and Triton generate code for a GPU that need not exist.

    Inductor asks three places about the device: a `DeviceInterface` (torch._dynamo.
    device_interface, 2.13-2.15), torch.cuda, and Triton's active driver (triton.runtime.driver,
    3.7-3.9). All three answer for the pretended GPU, whose properties are named as in
    `torch.cuda.get_device_properties`. The generated code cannot be run.
    """
    from torch._dynamo import device_interface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    capability = (properties.major, properties.minor)
    arch = 10 * properties.major + properties.minor
    target = GPUTarget("cuda", arch, properties.warp_size)
    # Make torch register its own interfaces first.
    dict(device_interface.get_registered_device_interfaces())
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: capability,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
    }
    methods = {
        **answers,
        "set_device": lambda device: None,
        "is_available": lambda: True,
        "get_raw_stream": lambda device_idx: 0,
        "get_compute_capability": lambda device=None: arch,
        "is_bf16_supported": lambda including_emulation=False: arch >= 80,
        "is_triton_capable": lambda device=None: True,
    }
    members = {name: staticmethod(method) for name, method in methods.items()}
    interface = device_interface.DeviceInterface
    worker = type("Pretended", (interface.Worker,), members)
    pretended = type("Pretended", (interface,), {**members, "Worker": worker})
    interfaces = {"cuda": pretended, "cuda:0": pretended}
    compiler = SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    with ExitStack() as stack:
        stack.callback(_clear_device_caches)
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, interfaces))
        stack.enter_context(mock.patch.multiple(torch.cuda, **answers))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "13.0"))
        stack.enter_context(mock.patch.object(driver, "_active", compiler))
        # Generated kernels would replace Triton's active driver by that of a real GPU.
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        _clear_device_caches()
        yield
