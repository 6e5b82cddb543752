"""Function and dispatch modes: what they see, and what runs without them.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode


def let_modes_see(function: Callable[..., Any]) -> None:
    """Have Dynamo ask the modes that it traces under about a function of torch.

    It asks about those in a set (`get_overridable_functions`, torch._dynamo.variables.torch, read
    in 2.13) that it makes once per process of what is in torch's namespaces then: if that is
    under torch's `context_parallel`, which replaces scaled_dot_product_attention there, it never
    asks about the function itself again.
    """
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().add(function)


def without_modes() -> Any:
    """Return a context in which tensors are what they say: no fake tensors, no other mode.

    `torch.utils._python_dispatch._disable_current_modes`, 2.11-2.15.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def run_uncompiled(function: Callable[..., Any]) -> None:
    """Have Dynamo leave a function, and what it calls, alone when they run in eager.

    Where a graph breaks, Dynamo compiles every function that eager code calls, `__torch_function__`
    and handlers of DTensor among them. There it takes one property of a tensor for another: of the
    getters that a mode is called with, its guards (torch 2.13) do not know one from the other.
    What it meets while it traces it still traces.

    `torch._C._dynamo.eval_frame.set_code_exec_strategy`, 2.11-2.15.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))


def function_modes() -> list[Any]:
    """Return the modes for torch functions that this thread is in, the innermost last.

    `torch.overrides._get_current_function_mode_stack`, 2.11-2.15.
    """
    from torch.overrides import _get_current_function_mode_stack

    return _get_current_function_mode_stack()


def is_in_backward() -> bool:
    """Whether autograd runs on this thread: a backward, a hook, a checkpoint that runs again.

    `torch._C._current_graph_task_id`, 2.11-2.15.
    """
    return torch._C._current_graph_task_id() != -1


def is_transforming() -> bool:
    """Whether a transform of torch.func (vmap, grad, ...) runs on this thread.

    `torch._C._are_functorch_transforms_active`, 2.11-2.15.
    """
    return torch._C._are_functorch_transforms_active()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one that a transform of torch.func has wrapped.

    `torch._C._functorch.is_functorch_wrapped_tensor`, 2.11-2.15.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def name_of_function(function: object) -> str:
    """Return what people call a function of torch: of a builtin, `str` says where it lies."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(function)
    return str(getattr(function, "__name__", function))


class OpWatcher(TorchDispatchMode):
    """Calls `meet(op, args, kwargs, out)` behind every op that tensors go through inside.

    `TorchDispatchMode` (torch.utils._python_dispatch, 2.11-2.15).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):
            self.meet(func, args, kwargs, out)
        return out

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Note an op."""
        raise NotImplementedError


@contextmanager
def autocast_restored() -> Iterator[list[Any]]:
    """Leave the autocasts that a graph is in where its run ends, in a list that it keeps.

    `_enter_autocast` and `_exit_autocast` (torch.amp, 2.11-2.15).
    """
    entered: list[Any] = []
    try:
        yield entered
    finally:
        for mode in reversed(entered):
            torch.amp._exit_autocast(mode)


def has_autocast(graph: fx.Graph) -> bool:
    """Whether a Dynamo graph enters autocast (`_enter_autocast`, torch.amp, 2.11-2.15)."""
    return any(node.target is torch.amp._enter_autocast for node in graph.nodes)
