"""Ask what Dynamo compiles, and keep what compiles change. Read in torch 2.13.0 and 2.15.0."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException, TorchRuntimeError
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, GetItemSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, run_node
from torch._guards import Guard, TracingContext
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from cp_inductor.torch_private.leaned_on import GUARD_ON_DATA, INPUT_NOT_FAKED, SIZE_LOST
from cp_inductor.torch_private.sizes import is_number, size_expression, size_hint

ONE_RANK = "compile_on_one_rank"
# Characters of a reason for a graph break.
MAX_REASON = 400

# The lock that Dynamo holds while it traces and compiles (2.13-2.15).
one_compile_at_a_time = compile_lock


def is_capturing_whole() -> bool:
    """Whether the current compile has fullgraph=True; False if none runs (2.13-2.15)."""
    return bool(getattr(_translator(), "one_graph", False))


def is_compiled_ahead() -> bool:
    """Whether `aot_compile` calls the backend: nothing else bypasses a graph's cache key (2.13)."""
    return bool(torch._functorch.config.bypass_autograd_cache_key)


def is_compiled_for_all_ranks() -> bool:
    """Whether the graph of one rank is to run on all.

    `compile_on_one_rank` of torch.distributed.config (2.13), or of torch.compiler.config (pull
    request 187869), where the other is deprecated.
    """
    configs = torch.compiler.config, torch.distributed.config
    return bool(next(getattr(c, ONE_RANK) for c in configs if hasattr(c, ONE_RANK)))


def frame_locals() -> frozenset[str]:
    """Return the names of arguments and closure variables of what is being compiled (2.13)."""
    return frozenset(getattr(_translator(), "f_locals", ()))


def _translator() -> Any:
    with suppress(AttributeError):  # nothing is being compiled
        return InstructionTranslator.current_tx()
    return None


def graph_inputs(graph: fx.Graph) -> Iterator[tuple[fx.Node, str, Any]]:
    """Yield each input of a graph from Dynamo: its node, its name in the model, and its value.

    `meta["grapharg"]` of a placeholder is a `GraphArg` (torch._dynamo.variables.builder,
    2.13-2.15), which knows where its value came from, such as
    ``L['self']._modules['head']._parameters['weight']``. For other graphs nothing is yielded.
    """
    for node in graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is None:
            continue
        source = getattr(argument, "source", None)
        name = str(getattr(source, "name", ""))
        path = re.findall(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", name)
        yield node, ".".join(path) or name or node.name, argument.example


def is_argument(name: str) -> bool:
    """Whether an input with this name, see `graph_inputs`, is neither of a module nor global."""
    return name.startswith("L[") and not name.startswith("L['self']")


def graph_examples(graph: fx.Graph) -> list[Any]:
    """Return the values with which a graph from Dynamo was traced; those of others are missing."""
    examples = {node: example for node, _, example in graph_inputs(graph)}
    return [examples.get(node) for node in graph.find_nodes(op="placeholder")]


def guard_whole_lengths(graph: fx.Graph) -> None:
    """Make Dynamo recompile when a DTensor's whole length changes but this rank's shard does not.

    Example: rank 0 of 2 holds 11 tokens of 21, and of 22. Dynamo (2.13) guards the local shape, the
    placements, and whole lengths that are symbols, but not whole lengths that are numbers, nor
    symbols that became numbers, so it would reuse the graph for 21 tokens. This adds a guard for
    each sharded dim. Dynamo generates code from the guards after it has called the backend.
    """
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
    for value, dim, whole, local in _lengths_of_inputs(graph):
        sizes = zip(value.placements, value.device_mesh.shape, strict=True)
        ranks = math.prod(size for p, size in sizes if isinstance(p, Shard) and p.dim == dim)
        is_dynamic = ranks > 1 and isinstance(whole, torch.SymInt)
        if is_dynamic and size_hint(whole) == ranks * size_hint(local):
            bool(whole == ranks * local)


def settle_local_lengths(graph: fx.Graph) -> None:
    """Make numbers of the local lengths of inputs whose whole lengths have become numbers.

    Example: Dynamo traces s0 tokens of the whole sequence and s1 of this rank as two symbols. What
    reads a mask makes s0 a number. AOTAutograd (2.13) would find out that s1 is one while it traces
    the backward, after it has counted the symbols among the outputs: it fails, or the outputs have
    lengths of None.
    """
    for _, _, whole, local in _lengths_of_inputs(graph):
        if size_expression(whole).is_number:
            int(local)


def _lengths_of_inputs(graph: fx.Graph) -> Iterator[tuple[DTensor, int, Any, Any]]:
    """Yield each DTensor among the inputs with each of its dims, whole length and local length."""
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, DTensor):
            for dim, lengths in enumerate(zip(value.shape, value.to_local().shape, strict=True)):
                yield value, dim, *lengths


def are_gradients_reduced() -> bool:
    """Whether DDP, `fully_shard` or `replicate` is in use, which reduce gradients over ranks.

    `_module_state_mapping` (2.13-2.15) has the modules that the latter two were applied to.
    """
    is_within_ddp = DistributedDataParallel._get_active_ddp_module() is not None
    return is_within_ddp or bool(_module_state_mapping)


def as_backend_error(error: Exception, instead_of: Exception | None = None) -> Exception:
    """Return an error that torch.compile passes on unchanged if a backend raises it.

    Dynamo wraps what a backend raises in BackendCompilerFailed, unless it is a ShortenTraceback
    (torch._dynamo.exc, 2.13-2.15). The returned error is an instance of the given error's class
    and of ShortenTraceback, so users can catch the class they know.

    `ShortenTraceback.remove_dynamo_frames`, which torch.compile calls, drops frames of Dynamo. A
    refusal says where in the model it is; frames of compilers, more than a hundred lines on each
    rank, would hide it. `torch._dynamo.config.verbose` keeps them.

    Args:
        error: what to raise.
        instead_of: torch's error, whose class the returned error has as well.
    """
    cls = type(error)
    torchs = () if instead_of is None else (type(instead_of),)

    def remove_frames(error: Exception) -> Exception:
        return error if torch._dynamo.config.verbose else error.with_traceback(None)

    methods = {"__module__": cls.__module__, "remove_dynamo_frames": remove_frames}
    both: Any = type(cls.__name__, (cls, ShortenTraceback, *torchs), methods)
    raised: Exception = both.__new__(both)
    raised.__dict__.update(error.__dict__, first_useful_frame=None)
    raised.args = error.args
    return raised


@contextmanager
def compile_state_kept() -> Iterator[None]:
    """Compiles within change no counters, use no caches and ignore the stance (2.13-2.15)."""
    before = {name: dict(counter) for name, counter in counters.items()}
    try:
        with (
            compiled_anew(),
            torch._dynamo.config.patch(automatic_dynamic_local_pgo=False),
            torch.compiler.set_stance("default"),
        ):
            yield
    finally:
        counters.clear()
        for name, counter in before.items():
            counters[name].update(counter)


@contextmanager
def compiled_anew() -> Iterator[None]:
    """Graphs are compiled without caches within, a backward with its forward (2.13-2.15)."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        torch._functorch.config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ),
    ):
        yield


def has_failed_to_run(error: Exception) -> bool:
    """Whether Dynamo could not run a call on fake tensors, or not make an input one of these."""
    said = (INPUT_NOT_FAKED, GUARD_ON_DATA, SIZE_LOST)
    return isinstance(error, TorchRuntimeError) or any(words in str(error) for words in said)


def last_call(error: Exception) -> fx.Node | None:
    """Return the last call of the graph as far as Dynamo has traced it; None if that is unknown.

    Dynamo adds `_torch_dynamo_tracer_output` to the error, whose `output_graph_for_cleanup` is the
    graph so far (torch._dynamo.output_graph, 2.13-2.15). A call that fails is erased from it
    (2.14); `run_node` (torch._dynamo.utils), which ran it, has it and its values among its locals.
    """
    tracer = getattr(error, "_torch_dynamo_tracer_output", None)
    graph: Any = getattr(getattr(tracer, "output_graph_for_cleanup", None), "graph", None)
    if graph is None:
        return None
    values = ((node.meta.get("example_value"), node) for node in graph.nodes)
    nodes = {id(value): node for value, node in values if isinstance(value, torch.Tensor)}
    raised: BaseException | None = error
    while raised is not None:
        for frame, _ in traceback.walk_tb(raised.__traceback__):
            if frame.f_code is run_node.__code__ and frame.f_locals["node"] not in graph.nodes:
                node, *arguments = (frame.f_locals[name] for name in ("node", "args", "kwargs"))
                arguments = pytree.tree_map(lambda value: nodes.get(id(value), value), arguments)
                failed: fx.Node = graph.create_node(node.op, node.target, *arguments)
                failed.meta.update(node.meta)
                return failed
        raised = raised.__context__
    return next(iter(reversed(graph.nodes)), None)


def graph_break_reason(error: Exception) -> str | None:
    """Return in one line why Dynamo did not capture a whole function; None for other errors."""
    if not isinstance(error, TorchDynamoException):
        return None
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    explained = [line for line in lines[1:] if line.startswith("Explanation:")]
    reason = ". ".join([*lines[:1], *explained[:1]])
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} ..."
