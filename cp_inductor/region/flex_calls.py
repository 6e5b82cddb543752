"""Read a call of flex_attention in a Dynamo graph: its tensors, and its functions as one rule.

    out, lse, _ = flex_attention(q, k, v, score_mod, (..., mask_mod), scale, options, (), (docs,))
        mask_mod:   (q >= k) & (docs[q] == docs[k])
        score_mod:  50 * tanh(s / 50)
      =>
    Rule("(k - q <= 0) & Eq(t0(k) - t0(q), 0); 50*Tanh(0.02*s)"), t0 = docs

Both functions are of one score and its indices, which count from the beginning of the whole
sequence, however it is sharded. They are traced for all scores at once, as torch computes them, and
the trace is read like that of a mask. Nothing else of a BlockMask is used: which blocks are empty
follows from the rule.

What cannot be read is refused: unlike a mask of scaled_dot_product_attention, it exists as no
tensor that could be used as it is.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from cp_inductor.errors import UnsupportedAttention
from cp_inductor.graph.subgraphs import Calls, source_of
from cp_inductor.mask.language import FUNCTIONS, SCORE
from cp_inductor.mask.reader.functions import OPS_OF_SCORES
from cp_inductor.mask.reader.read import known_nodes, read
from cp_inductor.mask.reader.to_rule import Recognized, as_rule_of_scores, misread
from cp_inductor.mask.reader.trace import Scores, Trace, trace_scores
from cp_inductor.mask.reader.values import Value
from cp_inductor.region.regions import MARK
from cp_inductor.torch_private.dtensor import flex_attention_op
from cp_inductor.torch_private.flex import has_blocks, scores_changed

FLEX = flex_attention_op()

# What flex_attention returns, by place.
OUT, LSE, MAX_SCORES = range(3)


@dataclass(frozen=True, slots=True)
class FlexCall:
    """The arguments of a call.

    Attributes:
        query, key, value: its inputs.
        score_mod, mask_mod: of a score, or of none, its four indices, and what they have captured.
        scale: of the scores.
        of_score_mod, of_mask_mod: what they have captured: nodes, or numbers.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    score_mod: fx.GraphModule
    mask_mod: fx.GraphModule
    scale: float
    of_score_mod: tuple[Any, ...]
    of_mask_mod: tuple[Any, ...]


def bind_flex(node: fx.Node, site: str) -> FlexCall:
    """Return the arguments of a call.

    Raises:
        UnsupportedAttention: something is asked for that is not computed along a plan.
    """
    arguments: Any = node.args
    query, key, value, score_mod, block_mask, scale, _, *captured = arguments
    # Dynamo leaves what nobody reads in the body of a checkpoint.
    if any(user.args[1] == MAX_SCORES and user.users for user in node.users):
        raise UnsupportedAttention(
            site=site,
            expected="the output of flex_attention, and its lse if wanted",
            got="max_scores=True",
            remedy="ask for AuxRequest(lse=True) alone",
        )
    if isinstance(scale, fx.Node):
        raise UnsupportedAttention(
            site=site,
            expected="a constant scale",
            got="a value computed in the graph",
            remedy="pass scale as a Python number",
        )
    of_score_mod, of_mask_mod = (*captured, (), ())[:2]
    _check_blocks(block_mask, _body(node, block_mask[-1]), site)
    mods = (_body(node, score_mod), _body(node, block_mask[-1]))
    if query.target is MARK:
        query = query.args[0]
    return FlexCall(query, key, value, *mods, scale, tuple(of_score_mod), tuple(of_mask_mod))


def _check_blocks(block_mask: Sequence[Any], mask_mod: fx.GraphModule, site: str) -> None:
    """Refuse a BlockMask that says by its blocks alone which pairs exist."""
    is_dropped = len(block_mask) == 1
    if is_dropped or not has_blocks(block_mask):
        return
    nodes = mask_mod.graph.nodes
    # `noop_mask`, which `BlockMask.from_kv_blocks` has if it is given none.
    if all(node.op in ("placeholder", "output") or node.target == "new_ones" for node in nodes):
        raise UnsupportedAttention(
            site=site,
            expected="a BlockMask whose mask_mod says which pairs exist",
            got="one without a mask_mod, of which only the blocks could say it",
            remedy="give it a mask_mod, as create_block_mask and BlockMask.from_kv_blocks take it;"
            " pass block_mask=None if all pairs exist",
        )


def has_natural_lse(node: fx.Node) -> bool:
    """Whether a call returns the natural logarithm, and not that to base 2."""
    options = node.args[6]
    return isinstance(options, dict) and options.get("BACKEND") == "FLASH"


def _body(node: fx.Node, attribute: Any) -> fx.GraphModule:
    body = reduce(getattr, str(attribute.target).split("."), node.graph.owning_module)
    assert isinstance(body, fx.GraphModule)
    return body


@dataclass
class FlexMasks:
    """The rules of a graph's calls. Each is read once, as layers share them."""

    calls: Calls
    known: dict[Any, Recognized] = field(default_factory=dict)

    def read(self, call: FlexCall, lengths: tuple[int, int], site: str) -> Recognized:
        """Return what a call's functions say.

        Args:
            call: to read.
            lengths: of the whole sequences of queries and keys.
            site: for errors.

        Raises:
            UnsupportedAttention: one of them cannot be read, or reads what requires a gradient.
        """
        captured = [
            source_of(item, self.calls) if isinstance(item, fx.Node) else item
            for item in (*call.of_score_mod, *call.of_mask_mod)
        ]
        query = call.query.meta["example_value"]
        # Lengths are constants of the graph, as under every mask that is not plain.
        shape = (int(query.shape[0]), int(query.shape[1]), *lengths)
        mods = (call.score_mod, call.mask_mod)
        has_constants = any(mod.graph.find_nodes(op="get_attr") for mod in mods)
        key = (shape, query.dtype, *(mod.code for mod in mods), *captured)
        if key not in self.known or has_constants:
            self.known[key] = _read(call, captured, shape, query.dtype, self.calls, site)
        return self.known[key]


def _read(
    call: FlexCall,
    captured: Sequence[Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    calls: Calls,
    site: str,
) -> Recognized:
    def change(scores: Tensor, known: Mapping[fx.Node, Any]) -> Tensor:
        values = [_value_of(item, known) for item in captured]
        split = len(call.of_score_mod)
        return scores_changed(call.score_mod, call.mask_mod, scores, values[:split], values[split:])

    nodes = [item for item in captured if _is_tensor(item)]
    graph = call.query.graph
    while graph in calls:
        graph = calls[graph].graph
    scores = Scores(graph, nodes, shape, torch.promote_types(dtype, torch.float32), change)
    try:
        trace = trace_scores(scores)
    except Exception as error:
        # A function may call anything, which may raise anything.
        lines = str(error).splitlines() or [""]
        raise _unreadable(site, f"one that raises {type(error).__name__}: {lines[0]}") from error
    recognized = _recognize(trace, shape)
    if recognized is None:
        raise _unreadable(site, _first_unread(trace))
    _check_slope(recognized, site)
    _check_detached(call.score_mod, site)
    _check_gradients(recognized, site)
    return replace(recognized, computed_by=known_nodes(trace))


def _is_tensor(item: Any) -> bool:
    return isinstance(item, fx.Node) and isinstance(item.meta["example_value"], Tensor)


def _value_of(item: Any, known: Mapping[fx.Node, Any]) -> Any:
    if not isinstance(item, fx.Node):
        return item
    return known[item] if item in known else int(item.meta["example_value"])


def _recognize(trace: Trace, shape: tuple[int, ...]) -> Recognized | None:
    reading = read(trace, ops=OPS_OF_SCORES)
    value = reading.values.get(trace.result)
    recognized = None if value is None else as_rule_of_scores(value, reading.tables)
    if recognized is None or misread(recognized, shape, reading.tables):
        return None
    return recognized


def _first_unread(trace: Trace) -> str:
    """Say which op of a trace is the first that the functions call and that was not read."""
    reading = read(trace, ops=OPS_OF_SCORES)
    own = _after(trace)
    for node in trace.gm.graph.nodes:
        if node in own and node not in reading.values:
            return f"one that calls {node.target} on what is not known of every index"
    if SCORE not in _symbols_of(reading.values[trace.result]):
        return "a score_mod whose result does not depend on the score"
    return "one that reads a tensor at indices that are not its own, or is too long"


def _symbols_of(value: Value) -> AbstractSet[sympy.Symbol]:
    """Return what numbers are computed from, where there is a pair."""
    return set[sympy.Symbol]().union(*(number.free_symbols for _, number in value.cases))


def _after(trace: Trace) -> AbstractSet[fx.Node]:
    """Return the nodes that the functions themselves call."""
    return {
        node
        for node in trace.gm.graph.nodes
        if node.op == "call_function" and node not in trace.origins
    }


def _unreadable(site: str, got: str) -> UnsupportedAttention:
    return UnsupportedAttention(
        site=site,
        expected="a mask_mod and a score_mod that compute with indices, and read tensors of the"
        " whole sequence at them",
        got=got,
        remedy="write it with comparisons, arithmetic, torch.where, tanh, exp and sigmoid; over"
        " plain shards, capture the tensors of the whole sequence",
    )


def _check_slope(recognized: Recognized, site: str) -> None:
    """Refuse a score that cannot be differentiated as an expression."""
    known = (*FUNCTIONS, sympy.Piecewise)
    slope = recognized.rule.slope
    unknown = slope.atoms(sympy.Function) - slope.atoms(*known) - set(recognized.rule.reads)
    if slope.has(sympy.Derivative, sympy.Subs) or {part for part in unknown if part.has(SCORE)}:
        raise _unreadable(site, f"a score that becomes {recognized.rule.score}, which has corners")


def _check_detached(score_mod: fx.GraphModule, site: str) -> None:
    """Refuse to differentiate a score that is cut from its gradient: the rule is not."""
    of_score: dict[fx.Node, None] = dict.fromkeys(score_mod.graph.find_nodes(op="placeholder")[:1])
    for node in score_mod.graph.nodes:
        if not of_score.keys().isdisjoint(node.all_input_nodes):
            of_score[node] = None
        name = getattr(node.target, "__name__", str(node.target))
        is_detached = (node in of_score and name == "detach") or name == "_set_grad_enabled"
        if is_detached and torch.is_grad_enabled():
            raise _unreadable(site, "a score_mod that keeps the gradient from the score")


def _check_gradients(recognized: Recognized, site: str) -> None:
    for node in recognized.tables:
        if node.meta["example_value"].requires_grad and torch.is_grad_enabled():
            raise UnsupportedAttention(
                site=site,
                expected="a score_mod that captures tensors without a gradient",
                got=f"{node.name}, which requires one",
                remedy="detach it; a learned bias can be added by scaled_dot_product_attention, as"
                " its attn_mask",
            )
