"""Refuse operations other than attention that mix tokens of plain shards.

    y = x.cumsum(1)                        x (B, S, D): this rank's shard
    out = attention(split(linear(y)))      dim 2 of q, k, v: the sequence; and so dim 1 of x
      => SequenceMixed: cumsum (model.py:12): ... mixes along the sequence ...

Nothing about a plain tensor says that it is a shard, but the attentions tell which of its dims is
the sequence. The graph is run once on fake tensors. Every aten op unites the tracks that run along
the dims of its tensors (`follow_ops`). The track along dim 2 of an attention is the sequence, on
every other tensor as well. Then each op is judged: an op that mixes along the sequence computes
something else on a shard than on the whole. These are allowed:

- Operations on each position alone: over features, heads and batch, and views of any kind.
- A sum, mean, maximum or product over tokens, if its result is a loss or a metric: it may be added
  to, scaled, divided and returned, but may not meet the tokens again, nor weights, nor a norm.
- Patches of adjacent tokens, if no shard boundary cuts them.
- Positions that are an input, or that begin where the shard begins.

What cannot be decided gets a `SequenceWarning`. This pass changes nothing.

Assumes: a graph from Dynamo whose attentions were found; ranks hold contiguous shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.axis import is_sequence_sharded
from cp_inductor.errors import CPError, SequenceWarning
from cp_inductor.graph.subgraphs import method_of
from cp_inductor.passes.find_attention import CAPTURED, Site, is_left_alone, source_line
from cp_inductor.region.flex_calls import FLEX
from cp_inductor.run.dims import SEQUENCE_DIM
from cp_inductor.sequence.follow_ops import Value, sizes_of
from cp_inductor.sequence.judge import Judge, warn
from cp_inductor.sequence.record import Record, Recorder, dims_of
from cp_inductor.sequence.tracks import COMPUTED, GIVEN, Born, Kind, rescale, unite
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.modes import autocast_restored
from cp_inductor.torch_private.tracing import fake_copy, fake_mode_of, unbacked_ignored

aten = torch.ops.aten


def check_sequence(gm: fx.GraphModule, sites: Sequence[Site], layout: str) -> None:
    """Check a Dynamo graph over plain shards.

    Args:
        gm: the graph.
        sites: all its attentions over a sharded sequence. Those over plain tensors, or over
            DTensors that wrap plain shards for the attention only, tell which dims are the
            sequence.
        layout: of the shards, "contiguous" or "zigzag".

    Raises:
        SequenceMixed: an op mixes along the sequence, or a rank would count its tokens from 0.
    """
    sites = [site for site in sites if site.axis.world_size > 1 and _is_of_shards(site)]
    if not sites:
        return
    axis = sites[0].axis
    try:
        record = _follow(gm, sites)
        Judge(record, axis.rank, layout).judge()
    except (CPError, SequenceWarning):
        raise
    except Exception as error:
        # An analysis must not keep a model from running that is right.
        warn(
            f"{sites[0].name}: could not check whether anything but attention mixes tokens"
            f" ({type(error).__name__}: {str(error).splitlines()[0]})"
        )


def _is_of_shards(site: Site) -> bool:
    """Whether an attention is over plain shards, or over DTensors that only wrap plain shards."""
    return site.query.target is DTensor.from_local or not is_sequence_sharded(
        site.query.meta["example_value"]
    )


def _follow(gm: fx.GraphModule, sites: Sequence[Site]) -> Record:
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    lengths = {site.node: (_length(site.query), _length(site.key)) for site in sites}
    mode = _GraphRecorder(lengths)
    arguments = []
    query = sites[0].query.meta["example_value"]
    local = query.to_local() if isinstance(query, DTensor) else query
    with (
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        fake_mode_of(local),
        unbacked_ignored(local),
        autocast_restored() as entered,
    ):
        for value in inputs:
            argument = fake_copy(value) if isinstance(value, Tensor) else value
            arguments.append(argument)
            if isinstance(argument, Tensor):
                born = Born(Kind.WEIGHT) if isinstance(value, nn.Parameter) else GIVEN
                mode.record.given.append(mode.set(argument, dims_of(argument, born)))
        follower = _Follower(gm, mode, entered)
        returned = follower.run(*arguments)
    for leaf in pytree.tree_leaves(returned):
        if isinstance(leaf, Tensor):
            mode.record.returned.append((mode.value_of(leaf), leaf.ndim))
    return mode.record


def _length(node: fx.Node) -> int:
    """Return how many tokens of a query, key or value this rank has."""
    value = node.meta["example_value"]
    local = value.to_local() if isinstance(value, DTensor) else value
    return sizes_of(local)[SEQUENCE_DIM]


class _GraphRecorder(Recorder):
    """Records the nodes of a graph.

    Args:
        lengths: for each attention over shards, how many queries and keys this rank has.
    """

    def __init__(self, lengths: Mapping[fx.Node, tuple[int, int]]) -> None:
        super().__init__()
        self.lengths = lengths
        self.node: fx.Node | None = None

    def at(self, node: fx.Node) -> None:
        """Set the node that runs next."""
        self.node = node
        self.is_explicit = _is_explicit(node)

    def locate(self) -> tuple[str, bool]:
        """Return the name and source line of the node."""
        assert self.node is not None
        return f"{self.node.name} ({source_line(self.node)})", is_left_alone(self.node)

    def meet_first(self, tensor: Tensor) -> Value:
        """Record a constant of the graph."""
        return self.set(tensor, dims_of(tensor, COMPUTED))


def _is_explicit(node: fx.Node) -> bool:
    """Whether a slice names its start: the model may have computed it from the rank."""
    if node.target is getitem:
        index = node.args[1]
        given = index if isinstance(index, tuple) else (index,)
        return any(isinstance(item, slice) and item.start is not None for item in given)
    return node.target is torch.narrow or method_of(node) is Tensor.narrow


class _Follower(fx.Interpreter):
    """Runs a Dynamo graph on fake tensors; handles attentions and the making of DTensors itself."""

    def __init__(self, gm: fx.GraphModule, mode: _GraphRecorder, entered: list[Any]) -> None:
        super().__init__(gm)
        self.mode = mode
        self.entered = entered

    def run_node(self, n: fx.Node) -> Any:
        self.mode.at(n)
        if n.op in ("call_function", "call_method"):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            by_hand = self._by_hand(n)
            if by_hand is not None:
                return by_hand(n, args, kwargs)
            with self.mode:
                return getattr(self, n.op)(n.target, args, kwargs)
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        constant = fake_copy(value)
        self.mode.set(constant, dims_of(constant, Born(Kind.CONSTANT)))
        return constant

    def _by_hand(self, node: fx.Node) -> Callable[..., Any] | None:
        if node.op == "call_method":
            return self._rewrap if method_of(node) in _REWRAPPING else None
        if node.target in CAPTURED and not is_left_alone(node):
            return self._attend
        if node.target in (torch.amp._enter_autocast, torch.amp._exit_autocast):
            return self._autocast
        if node.target in _REWRAPPING:
            return self._rewrap
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._call_body
        return None

    def _attend(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is FLEX:
            tensors = args[:3]
        else:
            bound = bind_arguments(aten.scaled_dot_product_attention.default, args, kwargs)
            tensors = [bound[name] for name in ("query", "key", "value")]
        example = node.meta["example_value"]
        results = [fake_copy(part) for part in (example if node.target is FLEX else (example,))]
        self.mode.attend(node.target, tensors, results[0], self.mode.lengths.get(node))
        # Of every query, a number beside its output.
        dims = self.mode.value_of(results[0]).dims
        for statistic in results[1:]:
            self.mode.new_step(node.target).outputs.append(self.mode.set(statistic, dims[:3]))
        return tuple(results) if node.target is FLEX else results[0]

    def _rewrap(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Convert between a local tensor and a DTensor: the dims keep their tracks."""
        before = self.mode.value_of(args[0])
        out = fake_copy(node.meta["example_value"])
        dims = tuple(
            rescale(dim, size) for dim, size in zip(before.dims, sizes_of(out), strict=True)
        )
        step = self.mode.new_step(node.target)
        step.inputs = [before]
        step.outputs = [self.mode.set(out, dims)]
        return out

    def _autocast(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is torch.amp._enter_autocast:
            self.entered.append(torch.amp._enter_autocast(*args, **kwargs))
            return self.entered[-1]
        self.entered.remove(args[0])
        return torch.amp._exit_autocast(*args, **kwargs)

    def _call_body(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run the body of a higher-order op, if it is called once with the operands."""
        bodies = [arg for arg in args if isinstance(arg, fx.GraphModule)]
        operands = [] if not bodies else list(args[1 + args.index(bodies[-1]) :])
        # Some are named, some are given their operands as one.
        operands = [operand for operand in operands if not isinstance(operand, str)]
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = list(operands[0])
        if node.target is torch.ops.higher_order.autograd_function_apply:
            bodies = bodies[:1]
        is_known = len(bodies) == 1 or node.target is torch.ops.higher_order.cond
        counts = {len(body.graph.find_nodes(op="placeholder")) for body in bodies}
        if not is_known or counts != {len(operands)}:
            return self._lose(node, args)
        results = [_Follower(body, self.mode, self.entered).run(*operands) for body in bodies]
        self.mode.at(node)
        for other in results[1:]:
            self._unite(results[0], other)
        if node.target is torch.ops.higher_order.autograd_function_apply:
            # And what the backward needs.
            return results[0][0]
        return results[0]

    def _unite(self, one: Any, other: Any) -> None:
        """Unite the tracks of what two branches return."""
        leaves = (pytree.tree_leaves(one), pytree.tree_leaves(other))
        for left, right in zip(*leaves, strict=True):
            if isinstance(left, Tensor):
                pairs = (self.mode.value_of(left).dims, self.mode.value_of(right).dims)
                for pair in zip(*pairs, strict=True):
                    unite(*pair)

    def _lose(self, node: fx.Node, args: Any) -> Any:
        step = self.mode.new_step(node.target)
        step.is_unknown = True
        leaves = pytree.tree_leaves(args)
        step.inputs = [self.mode.value_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        out = pytree.tree_map_only(Tensor, fake_copy, node.meta["example_value"])
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor):
                step.outputs.append(self.mode.set(leaf, dims_of(leaf, COMPUTED)))
        return out


_REWRAPPING = frozenset(
    {DTensor.from_local, DTensor.to_local, DTensor.redistribute, DTensor.full_tensor}
)
