"""Function and dispatch modes, transforms and autocast. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Ops of these talk to other ranks.
COLLECTIVES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
)

# Returns a context without modes: new tensors are real, not fake (2.13-2.15).
without_modes = _disable_current_modes
# Returns the function modes that are active on this thread, innermost last (2.13-2.15).
function_modes = _get_current_function_mode_stack
# Whether a transform of torch.func (vmap, grad, ...) is active on this thread (2.13-2.15).
is_transforming = torch._C._are_functorch_transforms_active
# Whether a tensor is wrapped by a transform of torch.func (2.13-2.15).
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def let_modes_see(function: Callable[..., Any]) -> None:
    """Make Dynamo call the function modes that it traces under for a function of torch.

    Dynamo calls modes for the functions in a set (`get_overridable_functions`,
    torch._dynamo.variables.torch, read in 2.13), which it collects once per process from torch's
    namespaces. If it does so within torch's `context_parallel`, which replaces
    scaled_dot_product_attention there, the set lacks the real function. This adds it.
    """
    from torch._dynamo.variables.torch import get_overridable_functions

    get_overridable_functions().add(function)


def note_parameters(note: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Call `note(parameter, tensor)` when a parameter is made of a tensor, which no mode sees.

    `nn.Parameter` calls `torch.Tensor._make_subclass` (torch.nn.parameter, 2.13-2.15).
    """
    make = torch.Tensor._make_subclass

    def make_subclass(cls: type, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made: Any = make(cls, data, *args, **kwargs)
        if issubclass(cls, nn.Parameter):
            note(made, data)
        return made

    run_uncompiled(make_subclass)
    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[method-assign]


def run_uncompiled(function: Callable[..., Any]) -> None:
    """Stop Dynamo from compiling a function, and what it calls, when eager code calls it.

    After a graph break, Dynamo compiles every function that eager code calls, such as
    `__torch_function__` and handlers of DTensor. Its guards (torch 2.13) do not distinguish the
    property getters that a mode is called with, so code of one property would run for another.
    Within a graph the function is still traced. An object's `__call__` is stopped (2.13-2.15).
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    code = getattr(function, "__code__", None) or type(function).__call__.__code__
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))


def function_modes_of_program() -> list[Any]:
    """Return the function modes that the program is in, also while Dynamo compiles a part of it.

    Dynamo sets them aside (2.13-2.15), on a stack that is empty otherwise.
    """
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr

    return [*torch_function_mode_stack_state_mgr.stack, *function_modes()]


def is_in_backward() -> bool:
    """Whether autograd runs on this thread: a backward, hook or recomputation (2.13-2.15)."""
    return torch._C._current_graph_task_id() != -1


def is_backward_compiled() -> bool:
    """Whether compiled autograd, which compiles under no mode for ops, is on (2.13-2.15)."""
    from torch._dynamo import compiled_autograd

    return compiled_autograd.compiled_autograd_enabled


def name_of_function(function: object) -> str:
    """Return the name of a torch function for messages. The `str` of a builtin has an address."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(function)
    return str(getattr(function, "__name__", function))


def is_profiling() -> bool:
    """Whether a profiler of torch is running (`_is_profiler_enabled`, torch.autograd.profiler)."""
    return torch.autograd.profiler._is_profiler_enabled


class OpWatcher(TorchDispatchMode):
    """A mode that runs every op by `call`, and calls `meet(op, args, kwargs, out)` after it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = self.call(func, args, kwargs)
        if isinstance(func, torch._ops.OpOverload):
            self.meet(func, args, kwargs, out)
        return out

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Take note of an op that has run."""

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op."""
        return op(*args, **kwargs)


class OnlyComputes(OpWatcher):
    """Refuses random numbers and collectives, and makes on the CPU what is made elsewhere."""

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on the CPU."""
        if torch.Tag.nondeterministic_seeded in op.tags or op.namespace in COLLECTIVES:
            raise RuntimeError(f"{op} is not a function of a batch")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return op(*args, **kwargs)


@contextmanager
def autocast_restored() -> Iterator[list[Any]]:
    """Exit the autocasts in the yielded list at the end, also if a run fails (2.13-2.15)."""
    entered: list[Any] = []
    try:
        yield entered
    finally:
        for mode in reversed(entered):
            torch.amp._exit_autocast(mode)


def has_autocast(graph: fx.Graph) -> bool:
    """Whether a Dynamo graph turns autocast on (`_enter_autocast`, torch.amp, 2.13-2.15)."""
    entered = (node for node in graph.nodes if node.target is torch.amp._enter_autocast)
    return any(node.args[2] is not False for node in entered)  # device, dtype, enabled, cache


_NEED_WEIGHTS = list(signature(F.multi_head_attention_forward).parameters).index("need_weights")


def needs_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of F.multi_head_attention_forward asks for the weights of its attention."""
    is_given = len(args) > _NEED_WEIGHTS
    return bool(args[_NEED_WEIGHTS] if is_given else kwargs.get("need_weights", True))


# Multi-head attention whose inner functions, SDPA among them, call the modes. F's function calls
# `has_torch_function`, a global of its module, which is true in every mode, and then calls the mode
# with itself. No argument stops that, and with the mode left, nothing in the body would call it. So
# this is its code with other globals. They have no module name, so that Dynamo looks them up where
# they are. To be removed once torch lets a mode call a function within itself.
_torchs: Any = F.multi_head_attention_forward
_globals = {
    **_torchs.__globals__,
    "has_torch_function": lambda tensors: False,
    # F has another function in its place while torch's context_parallel is entered.
    "scaled_dot_product_attention": torch._C._nn.scaled_dot_product_attention,
}
del _globals["__name__"]
multi_head_attention = FunctionType(
    _torchs.__code__, _globals, _torchs.__name__, _torchs.__defaults__, _torchs.__closure__
)
