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

If a function adds something to the score that cannot be read, or that requires a gradient, it is
computed as a tensor of this rank's queries and all keys; see `flex_bias`. Anything else that cannot
be read is refused, because it exists as no tensor that could be used instead. The mask of a
scaled_dot_product_attention does.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from cp_inductor.errors import UnsupportedAttention
from cp_inductor.graph.subgraphs import Calls, body_at, method_of, source_of
from cp_inductor.mask.language import FUNCTIONS, SCORE, number_of, tables_of
from cp_inductor.mask.reader.read import Reading, Recognized, as_rule_of_scores, misread, with_bias
from cp_inductor.mask.reader.scores import OPS_OF_SCORES, is_sum_with_score
from cp_inductor.mask.reader.trace import Scores, as_number, trace_nodes
from cp_inductor.region.flex_bias import reads_batch_and_head
from cp_inductor.region.marks import MARK
from cp_inductor.tiles.block_tables import BLOCK
from cp_inductor.torch_private.flex import TUNING, has_blocks, scores_changed

# Where flex_attention takes its score_mod, and what it returns, by place.
SCORE_MOD = 3
OUT, LSE, MAX_SCORES = range(3)

# The options of varlen_attn that is written as flex_attention: its lse is the natural logarithm.
# Those of a user have torch's defaults among them.
OF_VARLEN = {"BACKEND": "FLASH"}


@dataclass(frozen=True, slots=True)
class FlexCall:
    """The arguments of a call."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    # Functions of four indices and of captured values; ahead of these, score_mod takes the score.
    score_mod: fx.GraphModule
    mask_mod: fx.GraphModule
    scale: float
    # What they captured: nodes, or numbers.
    of_score_mod: tuple[Any, ...]
    of_mask_mod: tuple[Any, ...]
    kernel_options: str  # those that say how a kernel computes, as the text of a dict

    def as_sdpa(self) -> dict[str, Any]:
        """Return the arguments by their names in SDPA."""
        call = {name: getattr(self, name) for name in ("query", "key", "value", "scale")}
        return {**call, "dropout_p": 0, "attn_mask": None}


def bind_flex(node: fx.Node, site: str) -> FlexCall:
    """Return the arguments of a call; refuse what is not computed along a plan."""
    arguments: Any = node.args
    query, key, value, score_mod, block_mask, scale, options, *captured = arguments
    # Dynamo leaves what nobody reads in the body of a checkpoint.
    if any(user.args[1] == MAX_SCORES and user.users for user in node.users):
        raise UnsupportedAttention(
            site=site,
            expected="the output of flex_attention, and its lse if wanted",
            got="max_scores=True",
            remedy="ask for AuxRequest(lse=True) alone",
        )
    scale = constant(scale, "scale", site)
    of_score_mod, of_mask_mod = (*captured, (), ())[:2]
    mods = (body_at(score_mod), body_at(block_mask[-1]))
    _check_blocks(block_mask, mods[1], site)
    if query.target is MARK:
        query = query.args[0]
    tensors, of_mods = (query, key, value), (tuple(of_score_mod), tuple(of_mask_mod))
    return FlexCall(*tensors, *mods, scale, *of_mods, _tuning_of(options, site))


def constant(argument: Any, name: str, site: str) -> Any:
    """Return an argument of an attention that must be a constant; refuse a tensor."""
    if isinstance(argument, fx.Node):
        # With dynamic=True, Dynamo makes symbols of Python's numbers.
        argument = as_number(argument.meta["example_value"])
    if isinstance(argument, Tensor):
        raise UnsupportedAttention(
            site=site,
            expected=f"a constant {name}",
            got="a value computed in the graph",
            remedy=f"pass {name} as a Python number",
        )
    return argument


def _tuning_of(options: Mapping[str, Any], site: str) -> str:
    """Return the options that are passed on to the kernels, "" for none.

    The others describe the blocks of the BlockMask, which are not used, or what is returned.
    """
    if options.get("BACKEND") == "FLASH" and options != OF_VARLEN:
        # Torch 2.13 raises NotImplementedError: see the lowering of flex_attention_backward.
        warnings.warn(
            f"{site}: kernel_options with BACKEND='FLASH' are computed by Triton's templates. The"
            " backward of a tile is given the gradient of its lse, which FLASH does not take",
            stacklevel=2,
        )
    # torch adds defaults to the options of the user. This default changes no code.
    tuning = {
        name: options[name]
        for name in sorted(TUNING & set(options))
        if (name, options[name]) != ("PRESCALE_QK", False)
    }
    for name, value in tuning.items():
        if "BLOCK_" in name and BLOCK % value:
            raise UnsupportedAttention(
                site=site,
                expected=f"{name} to divide {BLOCK}, the size of the blocks that are skipped",
                got=f"kernel_options with {name}={value}",
                remedy="choose a power of 2 up to that, or leave it to the compiler",
            )
    return repr(tuning) if tuning else ""


def _check_blocks(block_mask: Sequence[Any], mask_mod: fx.GraphModule, site: str) -> None:
    """Refuse a BlockMask whose blocks alone say which pairs exist."""
    is_dropped = len(block_mask) == 1
    if is_dropped or not has_blocks(block_mask):
        return
    nodes = mask_mod.graph.nodes
    # `noop_mask`, the default of `BlockMask.from_kv_blocks`, calls nothing but new_ones.
    calls = [node for node in nodes if node.op not in ("placeholder", "output")]
    if all(method_of(node) is Tensor.new_ones for node in calls):
        raise UnsupportedAttention(
            site=site,
            expected="a BlockMask whose mask_mod says which pairs exist",
            got="one without a mask_mod, so that only its blocks say it",
            remedy="give it a mask_mod, as create_block_mask and BlockMask.from_kv_blocks take it;"
            " pass block_mask=None if all pairs exist",
        )


def has_natural_lse(node: fx.Node) -> bool:
    """Whether a call returns lse as a natural logarithm, and not to base 2."""
    options = node.args[6]
    return isinstance(options, dict) and options.get("BACKEND") == "FLASH"


@dataclass
class FlexMasks:
    """The rules of a graph's calls. Each is read once, as layers share them."""

    calls: Calls
    known: dict[Any, Recognized] = field(default_factory=dict)

    def read(self, call: FlexCall, lengths: tuple[int, int], site: str) -> Recognized:
        """Return what a call's functions say, of whole queries and keys of these lengths.

        Refused is what cannot be read, and what does more than add to the scores and depends on a
        tensor that requires a gradient.
        """
        captured = [
            source_of(item, self.calls) if isinstance(item, fx.Node) else item
            for item in (*call.of_score_mod, *call.of_mask_mod)
        ]
        query = call.query.meta["example_value"]
        # Lengths are constants of the graph, as under every mask but causal.
        shape = (int(query.shape[0]), int(query.shape[1]), *lengths)
        mods = (call.score_mod, call.mask_mod)
        has_constants = any(mod.graph.find_nodes(op="get_attr") for mod in mods)
        key = (shape, query.dtype, *(mod.code for mod in mods), *captured)
        if key not in self.known or has_constants:
            graph = call.query.graph
            while graph in self.calls:
                graph = self.calls[graph].graph
            self.known[key] = _read(_Outside(call, captured, graph, shape, site))
        return self.known[key]


@dataclass(frozen=True, slots=True)
class _Outside:
    """A call, seen from outside all bodies."""

    call: FlexCall
    # What its functions captured, score_mod's first: nodes outside bodies, or numbers.
    captured: Sequence[Any]
    graph: fx.Graph  # around all bodies
    shape: tuple[int, ...]  # of the scores, (B, H, S, T)
    site: str


def _read(outside: _Outside) -> Recognized:
    site = outside.site
    _check_detached(outside.call.score_mod, site)
    reading = _trace(outside)
    recognized = _recognize(reading, outside.shape)
    if recognized is None or _learned(recognized):
        read = _recognize_sum(outside, reading, recognized)
        if read is not None:
            return read
    if recognized is None:
        raise _unreadable(site, _first_unread(reading))
    slope, known = recognized.rule.slope, (*FUNCTIONS, sympy.Piecewise)
    unknown = slope.atoms(sympy.Function) - slope.atoms(*known) - set(recognized.rule.reads)
    if slope.has(sympy.Derivative, sympy.Subs) or {part for part in unknown if part.has(SCORE)}:
        raise _unreadable(site, f"a score that becomes {recognized.rule.score}, which has corners")
    for node in _learned(recognized):
        raise UnsupportedAttention(
            site=site,
            expected="a score_mod that adds to the score what it computes from tensors that require"
            " a gradient",
            got=f"a score that becomes {recognized.rule.score}, which reads {node.name}",
            remedy="detach it, or multiply query or key with it instead",
        )
    return replace(recognized, computed_by=reading.trace.computed)


def _trace(outside: _Outside, *, has_scores: bool = True) -> Reading:
    """Trace and read both functions; without scores, the mask_mod alone."""
    call = outside.call

    def change(scores: Tensor, known: Mapping[fx.Node, Any]) -> Tensor:
        values = [_value_of(item, known) for item in outside.captured]
        split = len(call.of_score_mod)
        score_mod = call.score_mod if has_scores else (lambda score, *_: score)
        return scores_changed(score_mod, call.mask_mod, scores, values[:split], values[split:])

    nodes = [item for item in outside.captured if _is_tensor(item)]
    dtype = torch.promote_types(call.query.meta["example_value"].dtype, torch.float32)
    try:
        trace = trace_nodes(nodes, outside.graph, Scores(outside.shape, dtype, change))
    except Exception as error:
        # A user's function may raise anything.
        lines = str(error).splitlines() or [""]
        got = f"one that raises {type(error).__name__}: {lines[0]}"
        raise _unreadable(outside.site, got) from error
    return Reading(trace, ops=OPS_OF_SCORES)


def _recognize_sum(
    outside: _Outside, reading: Reading, recognized: Recognized | None
) -> Recognized | None:
    """Return a rule whose bias is computed as a tensor; None if the score_mod is no sum."""
    if not is_sum_with_score(reading.trace, reading):
        return None
    if recognized is None:
        # The tensor holds all that the score_mod does, so only the mask_mod has to be read.
        recognized = _recognize(_trace(outside, has_scores=False), outside.shape)
    if recognized is None:
        return None
    of_batch, of_head = reads_batch_and_head(outside.call.score_mod)
    captured = outside.captured[: len(outside.call.of_score_mod)]
    is_learned = any(map(_is_learned, captured))
    total = with_bias(recognized, None, of_batch=of_batch, of_head=of_head, has_gradient=is_learned)
    return replace(total, computed_by=reading.trace.computed)


def _is_tensor(item: Any) -> bool:
    return isinstance(item, fx.Node) and isinstance(item.meta["example_value"], Tensor)


def _value_of(item: Any, known: Mapping[fx.Node, Any]) -> Any:
    if not isinstance(item, fx.Node):
        return item
    return known[item] if item in known else int(item.meta["example_value"])


def _recognize(reading: Reading, shape: tuple[int, ...]) -> Recognized | None:
    value = reading.values.get(reading.trace.result)
    recognized = None if value is None else as_rule_of_scores(value, reading.tables)
    if recognized is None or misread(recognized, shape, reading.tables):
        return None
    return recognized


def _first_unread(reading: Reading) -> str:
    """Say which op of a trace is the first that the functions call and that was not read."""
    trace = reading.trace
    for node in trace.gm.graph.nodes:
        is_own = node.op == "call_function" and node not in trace.origins
        if is_own and node not in reading.values:
            return f"one that calls {node.target} on what is not known of every index"
    cases = reading.values[trace.result].cases
    if not any(SCORE in number.free_symbols for _, number in cases):
        return "a score_mod whose result does not depend on the score"
    return "one that reads a tensor at indices that are not its own, or is too long"


def _unreadable(site: str, got: str) -> UnsupportedAttention:
    return UnsupportedAttention(
        site=site,
        expected="a mask_mod and a score_mod that compute with indices, and read tensors of the"
        " whole sequence at them",
        got=got,
        remedy="write it with comparisons, arithmetic, torch.where, tanh, exp and sigmoid; over"
        " plain shards, capture the tensors of the whole sequence",
    )


def _check_detached(score_mod: fx.GraphModule, site: str) -> None:
    """Refuse to differentiate a score that is detached: the rule would not be detached."""
    of_score: dict[fx.Node, None] = dict.fromkeys(score_mod.graph.find_nodes(op="placeholder")[:1])
    for node in score_mod.graph.nodes:
        if not of_score.keys().isdisjoint(node.all_input_nodes):
            of_score[node] = None
        called = method_of(node) if node.op == "call_method" else node.target
        is_detached = node in of_score and called in (torch.detach, Tensor.detach)
        if torch.is_grad_enabled() and (is_detached or called is torch._C._set_grad_enabled):
            raise _unreadable(site, "a score_mod that keeps the gradient from the score")


def _learned(recognized: Recognized) -> list[fx.Node]:
    """Return the tables with a gradient from which scores are computed. Conditions have none."""
    parts = (recognized.rule.bias, recognized.rule.score)
    numbers = sorted({number_of(entry) for part in parts for entry in tables_of(part)})
    return [node for node in map(recognized.tables.__getitem__, numbers) if _is_learned(node)]


def _is_learned(item: Any) -> bool:
    is_tensor = isinstance(item, fx.Node) and _is_tensor(item)
    return is_tensor and item.meta["example_value"].requires_grad and torch.is_grad_enabled()
