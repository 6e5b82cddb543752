"""What Dynamo is compiling, for whom, and the state that a compile leaves behind.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor, Shard


def backend_compiled_for() -> Any:
    """Return the backend for which Dynamo is tracing, or which it has called; None if none.

    `InstructionTranslator.current_tx().output.compiler_fn` (torch._dynamo.symbolic_convert),
    wrapped as `_torchdynamo_orig_backend` (torch._dynamo.eval_frame) and in
    `torch._TorchCompileWrapper` say (read in 2.13).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        return None
    while True:
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif isinstance(backend, torch._TorchCompileWrapper):
            backend = backend.compiler_fn
        else:
            return backend


def is_capturing_whole() -> bool:
    """Whether the model being compiled was given fullgraph=True; False if that cannot be told.

    `InstructionTranslator.current_tx().one_graph` (torch._dynamo.symbolic_convert, 2.11-2.15).
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return bool(getattr(InstructionTranslator.current_tx(), "one_graph", False))
    except AttributeError:
        return False


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, Any]]:
    """Yield each input of a graph from Dynamo, its name in the model, and its value.

    `GraphArg` (torch._dynamo.variables.builder, 2.11-2.15), in the "grapharg" of a placeholder's
    meta, knows where a value came from: ``L['self']._modules['head']._parameters['weight']``. Of
    graphs that Dynamo did not make there is nothing to yield.
    """
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is None:
            continue
        source = getattr(argument, "source", None)
        # A method before 2.13.
        name = getattr(source, "name", "")
        name = str(name() if callable(name) else name)
        path = re.findall(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", name)
        yield node, ".".join(path) or name or node.name, argument.example


def guard_whole_lengths(graph: fx.Graph) -> None:
    """Have Dynamo compile again for another whole length, also if this rank holds as many tokens.

    Of 21 and 22 tokens rank 0 of 2 holds 11. Dynamo (2.13) guards pieces, their placements, and
    whole lengths that are symbols, but no whole length that is a number: it would go on with 21.
    For each sharded dim a guard is added to those that Dynamo makes into code behind the backend:
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
            if isinstance(value.shape[dim], int):
                length = GetItemSource(AttrSource(source, "shape"), dim)
                guard = Guard(length, GuardBuilder.EQUALS_MATCH)
                context.guards_context.dynamo_guards.add(guard)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether somebody hooked into the gradient of a tensor.

    `_backward_hooks`, `_post_accumulate_grad_hooks` of a tensor (2.11-2.15): dicts, None as long as
    there are none.
    """
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(tensor, name, None) for name in names)


def is_splitting_for_ddp() -> bool:
    """Whether a model in DistributedDataParallel is compiled, whose graph Dynamo cuts into buckets.

    `DistributedDataParallel._get_active_ddp_module` (torch.nn.parallel, 2.11-2.15).
    """
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._get_active_ddp_module() is not None


def as_backend_error(error: Exception) -> Exception:
    """Return an error that a backend can raise and torch.compile passes on unchanged.

    Dynamo wraps whatever a backend raises in BackendCompilerFailed, except a ShortenTraceback
    (torch._dynamo.exc, 2.11-2.15). The error returned is an instance of both classes, so that
    users catch the one they know.
    """
    from torch._dynamo.exc import ShortenTraceback

    cls = type(error)
    both: Any = type(cls.__name__, (cls, ShortenTraceback), {"__module__": cls.__module__})
    raised: Exception = both.__new__(both)
    raised.__dict__.update(error.__dict__, first_useful_frame=None)
    raised.args = error.args
    return raised


@contextmanager
def compile_state_kept() -> Iterator[None]:
    """Count nothing, cache nothing and follow no stance of the caller's in the compiles inside.

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


def graph_break_reason(error: Exception) -> str | None:
    """Say in a line why Dynamo did not capture a function whole; None if the error is another's.

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
