"""Ask what Dynamo is compiling and for which backend; keep the state that compiles change.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Shard

from cp_inductor.torch_private.shardings import RememberedShardings
from cp_inductor.torch_private.sizes import is_number, size_expression, size_hint
from cp_inductor.torch_private.symbolic_dtensor import SymbolicLengths


def backend_compiled_for() -> Any:
    """Return the backend of the compile that runs now, without wrappers; None if none runs.

    `InstructionTranslator.current_tx().output.compiler_fn` (torch._dynamo.symbolic_convert). Its
    wrappers are `torch._TorchCompileWrapper`, and functions with `_torchdynamo_orig_backend`
    (torch._dynamo.eval_frame) (read in 2.13).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    return _unwrapped(backend)


def _unwrapped(backend: Any) -> Any:
    while True:
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif isinstance(backend, torch._TorchCompileWrapper):
            backend = backend.compiler_fn
        else:
            return backend


def is_capturing_whole() -> bool:
    """Whether the current compile has fullgraph=True; False if none runs or that is unknown.

    `InstructionTranslator.current_tx().one_graph` (torch._dynamo.symbolic_convert, 2.11-2.15).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(getattr(InstructionTranslator.current_tx(), "one_graph", False))
    except AttributeError:
        return False


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, Any]]:
    """Yield each input of a graph from Dynamo: its node, its name in the model, and its value.

    `meta["grapharg"]` of a placeholder is a `GraphArg` (torch._dynamo.variables.builder,
    2.11-2.15), which knows where its value came from, such as
    ``L['self']._modules['head']._parameters['weight']``. For other graphs nothing is yielded.
    """
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is None:
            continue
        source = getattr(argument, "source", None)
        # `name` is a method before 2.13, and a property since.
        name = getattr(source, "name", "")
        name = str(name() if callable(name) else name)
        path = re.findall(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", name)
        yield node, ".".join(path) or name or node.name, argument.example


def guard_whole_lengths(graph: fx.Graph) -> None:
    """Make Dynamo recompile when a DTensor's whole length changes but this rank's shard does not.

    Example: rank 0 of 2 holds 11 tokens of 21, and of 22. Dynamo (2.13) guards the local shape, the
    placements, and whole lengths that are symbols, but not whole lengths that are numbers, nor
    symbols that became numbers, so it would reuse the graph for 21 tokens. This adds a guard for
    each sharded dim. Dynamo generates code from the guards after it has called the backend.

    `TracingContext.guards_context.dynamo_guards`, `Guard` (torch._guards), `AttrSource`,
    `GetItemSource` (torch._dynamo.source), `GuardBuilder.EQUALS_MATCH` (torch._dynamo.guards).
    """
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource, GetItemSource
    from torch._guards import Guard, TracingContext

    context = TracingContext.try_get()
    if context is None:
        return
    for node in graph.find_nodes(op="placeholder"):
        value, argument = node.meta.get("example_value"), node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        if source is None or not isinstance(value, DTensor) or isinstance(value, nn.Parameter):
            continue
        for dim in {p.dim for p in value.placements if isinstance(p, Shard)}:
            if is_number(value.shape[dim]):
                length = GetItemSource(AttrSource(source, "shape"), dim)
                guard = Guard(length, GuardBuilder.EQUALS_MATCH)
                context.guards_context.dynamo_guards.add(guard)


def relate_local_lengths(graph: fx.Graph) -> None:
    """Say of inputs whose symbolic lengths divide by the ranks that they do, as a guard of Dynamo.

    Example: of s0 tokens of the whole sequence, this rank has s1. Then s0 becomes 2 * s1, of which
    compilers can say more than of two symbols. Calls with other lengths are compiled once more.
    """
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if not isinstance(value, DTensor):
            continue
        local = value.to_local()
        for dim, (whole, part) in enumerate(zip(value.shape, local.shape, strict=True)):
            sizes = zip(value.placements, value.device_mesh.shape, strict=True)
            ranks = math.prod(
                size for one, size in sizes if isinstance(one, Shard) and one.dim == dim
            )
            is_dynamic = ranks > 1 and isinstance(whole, torch.SymInt)
            if is_dynamic and size_hint(whole) == ranks * size_hint(part):
                bool(whole == ranks * part)


def settle_local_lengths(graph: fx.Graph) -> None:
    """Make numbers of the local lengths of inputs whose whole lengths have become numbers.

    Example: Dynamo traces s0 tokens of the whole sequence and s1 of this rank as two symbols. What
    reads a mask makes s0 a number. AOTAutograd (2.13) would find out that s1 is one while it traces
    the backward, after it has counted the symbols among the outputs: it fails, or the outputs have
    lengths of None.
    """
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, DTensor):
            for whole, local in zip(value.shape, value.to_local().shape, strict=True):
                if size_expression(whole).is_number:
                    int(local)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether the gradient of a tensor has hooks.

    `_backward_hooks`, `_post_accumulate_grad_hooks` of a tensor (2.11-2.15): dicts, or None.
    """
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(tensor, name, None) for name in names)


def is_splitting_for_ddp() -> bool:
    """Whether Dynamo will split the graph into DDP's buckets: the model runs within DDP.

    `DistributedDataParallel._get_active_ddp_module` (torch.nn.parallel, 2.11-2.15).
    """
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None


def are_gradients_reduced() -> bool:
    """Whether DDP, `fully_shard` or `replicate` is in use, which reduce gradients over ranks.

    `_module_state_mapping` (torch.distributed._composable_state, 2.11-2.15) has the modules that
    the latter two were applied to.
    """
    from torch.distributed._composable_state import _module_state_mapping

    return is_splitting_for_ddp() or bool(_module_state_mapping)


def as_backend_error(error: Exception) -> Exception:
    """Return an error that torch.compile passes on unchanged if a backend raises it.

    Dynamo wraps what a backend raises in BackendCompilerFailed, unless it is a ShortenTraceback
    (torch._dynamo.exc, 2.11-2.15). The returned error is an instance of the given error's class
    and of ShortenTraceback, so users can catch the class they know.

    `ShortenTraceback.remove_dynamo_frames`, which torch.compile calls, drops frames of Dynamo. A
    refusal says where in the model it is; frames of compilers, more than a hundred lines on each
    rank, would hide it. `torch._dynamo.config.verbose` keeps them.
    """
    from torch._dynamo.exc import ShortenTraceback

    cls = type(error)
    both: Any = _refusal(cls.__name__, (cls, ShortenTraceback), cls.__module__)
    raised: Exception = both.__new__(both)
    raised.__dict__.update(error.__dict__, first_useful_frame=None)
    raised.args = error.args
    return raised


def _refusal(name: str, bases: tuple[type, ...], module: str) -> type:
    return type(name, bases, {"__module__": module, "remove_dynamo_frames": _remove_frames})


def _remove_frames(error: Exception) -> Exception:
    return error if torch._dynamo.config.verbose else error.with_traceback(None)


@contextmanager
def compile_state_kept() -> Iterator[None]:
    """Within this context, compiles change no counters, use no caches and ignore the stance.

    `torch._dynamo.utils.counters`; `AOT_COUNTER` (torch._functorch.aot_autograd), which numbers
    generated code; the caches' switches in torch._inductor.config and torch._functorch.config
    (2.11-2.15).
    """
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config
    from torch._dynamo.utils import counters
    from torch._functorch import aot_autograd

    before = {name: dict(counter) for name, counter in counters.items()}
    try:
        with (
            torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
            mock.patch.object(aot_autograd, "AOT_COUNTER", itertools.count()),
            torch._functorch.config.patch(
                enable_autograd_cache=False, force_non_lazy_backward_lowering=True
            ),
            torch.compiler.set_stance("default"),
        ):
            yield
    finally:
        counters.clear()
        for name, counter in before.items():
            counters[name].update(counter)


# An AssertionError of torch._subclasses.meta_utils (2.11-2.15) for a plain tensor whose `grad` is
# of a subclass: Dynamo makes the fakes of both in the way of the first.
INPUT_NOT_FAKED = "Expected SubclassSymbolicContext or None"


@dataclass(frozen=True)
class FailedTrace:
    """A call that Dynamo could not run on fake tensors, or an input that it could not make one of.

    Attributes:
        backend: of torch.compile, without wrappers; None if that is unknown.
        node: the call, last of the graph as far as it was traced; None if that is unknown.
        text: torch's error.
    """

    backend: Any
    node: fx.Node | None
    text: str

    @staticmethod
    def of(error: BaseException | None) -> FailedTrace | None:
        """Return what failed, from an error of Dynamo's; None if it is about something else.

        While it traces, Dynamo adds `_torch_dynamo_tracer_output` to the error, whose
        `output_graph_for_cleanup` is the graph so far (torch._dynamo.output_graph, 2.13).
        """
        from torch._dynamo.exc import TorchRuntimeError

        is_of_input = isinstance(error, AssertionError) and INPUT_NOT_FAKED in str(error)
        if not isinstance(error, TorchRuntimeError) and not is_of_input:
            return None
        tracer = getattr(error, "_torch_dynamo_tracer_output", None)
        output = getattr(tracer, "output_graph_for_cleanup", None)
        graph = getattr(output, "graph", None)
        node = next(iter(reversed(graph.nodes)), None) if graph is not None else None
        return FailedTrace(_unwrapped(getattr(output, "compiler_fn", None)), node, str(error))


NameOf = Callable[[FailedTrace], Exception | None]

_names: list[NameOf] = []
symbolic_lengths, shardings = SymbolicLengths(), RememberedShardings()


def on_failed_trace(name: NameOf) -> None:
    """Let a function name errors of Dynamo's fake tensors; where it returns None, they stay."""
    _names.append(name)
    watch_compiles()


class _Kept(list[Callable[[Any], None]]):
    """Callbacks, of which `torch._dynamo.reset` forgets all but these."""

    kept: tuple[Callable[[Any], None], ...] = ()

    def clear(self) -> None:
        """Keep them."""
        self[:] = self.kept


def watch_compiles() -> None:
    """Watch what Dynamo compiles from now on; a second call changes nothing.

    Failed traces are named, and DTensors may have lengths that are symbols.
    `callback_handler.start_callbacks`, `end_callbacks` (torch._dynamo.callback, 2.11-2.15): lists.
    """
    from torch._dynamo.callback import callback_handler

    ours = {
        "start": (symbolic_lengths.start, shardings.start),
        "end": (shardings.end, symbolic_lengths.end, _rename),
    }
    for when, callbacks in ours.items():
        known = getattr(callback_handler, f"{when}_callbacks")
        if not isinstance(known, _Kept):
            kept = _Kept([*known, *callbacks])
            kept.kept = callbacks
            setattr(callback_handler, f"{when}_callbacks", kept)


def _rename(_: object) -> None:
    """Turn the error that passes at the end of a compile into the one that names it.

    A callback must not raise, because torch would then count the compile as pending for ever. So
    the error stays the same object, and changes its class and what it says. The new class inherits
    from the old one, because Python 3.11 keeps the class of a passing error beside it.
    """
    error = sys.exc_info()[1]
    failed = FailedTrace.of(error)
    if error is None or failed is None:
        return
    for name in _names:
        named = name(failed)
        if named is not None and type(error) is AssertionError:
            # Python's own classes cannot be exchanged.
            error.args = (str(named),)
            return
        if named is not None:
            other = as_backend_error(named)
            both = (type(named), *type(other).__bases__[1:], type(error))
            error.__class__ = _refusal(type(named).__name__, both, type(named).__module__)
            error.__dict__.update(other.__dict__, msg=str(named))
            error.args = other.args
            error.__cause__, error.__suppress_context__ = None, True
            return


def graph_break_reason(error: Exception) -> str | None:
    """Return in one line why Dynamo did not capture a whole function; None for other errors.

    `TorchDynamoException` (torch._dynamo.exc, 2.11-2.15), whose text has an "Explanation:".
    """
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line for line in lines[1:] if line.startswith("Explanation:")]
    reason = ". ".join([*lines[:1], *explained[:1]])
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."


MAX_REASON = 400
