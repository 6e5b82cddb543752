"""Get at the graphs of a compile, and print them one node per line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.graph import GraphLowering
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor.backend
from cp_inductor.backend import captured
from cp_inductor.graph.collectives import START, is_start
from cp_inductor.passes.capture_attention import list_attentions
from cp_inductor.passes.pipeline import Capture, Lowering
from cp_inductor.passes.settings import Settings
from cp_inductor.sequence.eager import TRUST
from cp_inductor.torch_private.sizes import size_hint


def attend_causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The smallest model: one causal attention."""
    return _attend(query, key, value, is_causal=True)


def attend_full(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One attention to everything."""
    return _attend(query, key, value, is_causal=False)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=is_grouped
    )


class Attention(nn.Module):
    """A module of one causal attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_causal(query, key, value)


class AttentionBlock(nn.Module):
    """One causal attention between linear layers, perhaps behind a norm."""

    def __init__(self, width: int = 32, heads: int = 2, *, has_norm: bool = False) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width) if has_norm else nn.Identity()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        return self.out(attend_causal(query, key, value).transpose(1, 2).flatten(2)) + x


class Layer(nn.Module):
    """Causal attention between linear layers that each have weights of their own; and an MLP."""

    def __init__(
        self, dim: int, heads: int, kv_heads: int, head_dim: int, wide: int, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.query = nn.Linear(dim, heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, dim, bias=bias)
        self.up, self.down = nn.Linear(dim, wide, bias=bias), nn.Linear(wide, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        x = x + self.out(attend_causal(query, key, value).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


@contextmanager
def recorded_lowering() -> Iterator[dict[str, fx.GraphModule]]:
    """Collect the lowered graphs of what is compiled inside: by "forward", "backward", ..."""
    graphs: dict[str, fx.GraphModule] = {}
    original = cp_inductor.backend.captured.lower

    def record(lowering: Lowering) -> None:
        original(lowering)
        assert lowering.kind not in graphs
        graphs[lowering.kind] = lowering.gm

    with mock.patch.object(cp_inductor.backend.captured, "lower", record):
        yield graphs


def lowered_graphs(
    function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None
) -> dict[str, fx.GraphModule]:
    """Return the graphs that a first call, and its backward, would run under cp_aot_eager."""
    original = cp_inductor.backend.compile.make_boxed_func

    def pretend(forward: Any) -> Any:
        return original(partial(_pretend, forward.__self__))

    with (
        recorded_lowering() as graphs,
        mock.patch.object(cp_inductor.backend.compile, "make_boxed_func", pretend),
    ):
        compiled = torch.compile(function, backend="cp_aot_eager", fullgraph=True, options=options)
        _run_backward(compiled(*args))
    return graphs


def collectives_of(gm: fx.GraphModule) -> list[dict[str, Any]]:
    """Return what a graph starts, in order: by name, what is said of it, and the splits."""
    found = []
    for node in gm.graph.nodes:
        if not is_start(node):
            continue
        given: list[Any] = [one for one in node.args if not isinstance(one, fx.Node)]
        splits = {}
        if node.target is START:
            splits = {"receives": given.pop(0), "sends": given.pop(0)}
        dtype = str(node.meta["val"].dtype)
        found.append({"what": [str(node.target), dtype, *map(str, given)], **splits})
    return found


def disagreements(programs: dict[int, list[dict[str, Any]]]) -> list[str]:
    """Return in which collectives ranks disagree.

    Args:
        programs: the collectives of each rank, in order.
    """
    lengths = {rank: len(program) for rank, program in programs.items()}
    if len(set(lengths.values())) > 1:
        return [f"collectives of ranks: {lengths}"]
    found = []
    for number, step in enumerate(zip(*programs.values(), strict=True)):
        of_rank = dict(zip(programs, step, strict=True))
        kinds = {rank: one["what"] for rank, one in of_rank.items()}
        if any(kind != step[0]["what"] for kind in kinds.values()):
            found.append(f"collective {number} of ranks: {kinds}")
        elif "sends" in step[0]:
            for source, one in of_rank.items():
                for destination, other in of_rank.items():
                    sent, received = one["sends"][destination], other["receives"][source]
                    if sent != received:
                        pair = f"rank {source} sends {sent} to rank {destination}, which"
                        found.append(f"collective {number}: {pair} receives {received}")
    return found


def generate_code(
    function: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None
) -> list[str]:
    """Return the code that Inductor generates for a first call and its backward; run none of it."""
    codes: list[str] = []

    def generate_only(self: GraphLowering) -> SimpleNamespace:
        code, _ = self.codegen()
        codes.append(code.value)
        call = partial(_pretend_boxed, self.module)
        return SimpleNamespace(call=call, runner=None, __file__="never_compiled.py")

    with (
        mock.patch.object(GraphLowering, "compile_to_module", generate_only),
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        compiled = torch.compile(function, backend="cp_inductor", fullgraph=True, options=options)
        _run_backward(compiled(*args))
    return codes


def _run_backward(out: Any) -> None:
    if out.requires_grad:
        out.backward(torch.ones_like(out))


def _pretend_boxed(gm: fx.GraphModule, args: list[Any]) -> list[Any]:
    TRUST.depth += 1  # what compiled code returns is not followed
    try:
        return _pretend(gm, *args)
    finally:
        TRUST.depth -= 1


def _pretend(gm: fx.GraphModule, *args: Any) -> list[Any]:
    """Return zeros of the shapes a graph returns: a fake group fills no buffers worth computing."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, args, strict=True))
    (outputs,) = gm.graph.output_node().args
    return [given[node] if node in given else _zeros(node) for node in outputs]


def _zeros(node: Any) -> Any:
    if not isinstance(node, fx.Node):
        return node
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return size_hint(value)
    shape, stride = (tuple(map(size_hint, sizes)) for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype).zero_()


@contextmanager
def recorded_capture() -> Iterator[list[fx.GraphModule]]:
    """Collect the Dynamo graphs of what is compiled inside, after capture."""
    graphs: list[fx.GraphModule] = []
    original = captured.capture

    def record(gm: fx.GraphModule, settings: Settings) -> Capture:
        done = original(gm, settings)
        graphs.append(gm)
        return done

    with mock.patch.object(captured, "capture", record):
        yield graphs


def captured_graph(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """Return the only Dynamo graph of a call under cp_aot_eager, after capture."""
    with recorded_capture() as graphs, implicit_replication():
        torch.compile(function, backend="cp_aot_eager", fullgraph=True, dynamic=False)(*args)
    (graph,) = graphs
    return graph


def rules_of(graph: fx.GraphModule) -> list[str]:
    """Return the rule of each attention that was captured."""
    return [planned.attention.rule.format() for planned in list_attentions(graph)]


def codes_of_pass(
    run_pass: Callable[[fx.GraphModule], Any], function: Callable[..., Any], *inputs: Tensor
) -> list[str]:
    """Return the code of a Dynamo graph before a pass, after it, and after it ran again."""
    codes: list[str] = []

    def backend(gm: fx.GraphModule, _: object) -> Any:
        codes.append(gm.code)
        for _ in range(2):
            run_pass(gm)
            gm.graph.lint()
            codes.append(gm.code)
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    return codes


def format_graph(graph: fx.Graph) -> str:
    """Print `name = op(arguments)` per node, sizes of inputs included, plumbing left out."""
    lines = []
    for node in graph.nodes:
        arguments = ", ".join(
            [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
        )
        if node.op == "placeholder":
            value = node.meta.get("val", node.meta.get("example_value"))
            shape = f" {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            lines.append(f"{node.name}: input{shape}")
        elif node.op == "output":
            lines.append(f"return {arguments}")
        else:
            lines.append(f"{node.name} = {_format_target(node)}({arguments})")
    return "\n".join(lines)


def _format_target(node: fx.Node) -> str:
    if isinstance(node.target, (str, torch._ops.OpOverload)):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def targets(graph: fx.Graph) -> list[str]:
    """The ops of a graph, in order, by their full names."""
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]
