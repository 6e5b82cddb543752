"""Refuse what takes the tokens of plain shards together, and is not attention.

    y = x.cumsum(1)                        x (B, S, D): this rank's shard
    out = attention(split(linear(y)))      dim 2 of q, k, v: the sequence; and so dim 1 of x
      => SequenceMixed: cumsum (model.py:12): ... mixes along the sequence ...

About a plain tensor nothing says that it is a shard. Which of its dims is the sequence follows from
the attentions: the graph is run once on fake tensors, every aten op unites what runs along the dims
of its tensors (`follow_ops`), and what runs along dim 2 of an attention is the sequence, wherever
else it runs. Then each op is judged: one that mixes along the sequence computes something else on a
shard than on the whole. What may stand there:

- Position by position, over features, heads and batch, views of any kind: all of it.
- A sum, mean, maximum or product over tokens, if what comes of it is a loss or a metric: added to,
  scaled, divided, and returned. Not if it meets the tokens again, nor weights, nor a norm.
- Patches of tokens side by side, which no shard cuts through.
- Positions that are an input, or that begin where the shard begins.

What is not known is said in a `SequenceWarning`. Changes nothing.

Assumes: a graph from Dynamo whose attentions were found; ranks hold contiguous shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor.errors import CPError, SequenceMixed, SequenceWarning
from cp_inductor.nodes import COLLECTIVE_NAMESPACES, WAIT
from cp_inductor.passes.find_attention import SDPA, Site, is_left_alone, source_line
from cp_inductor.sequence import follow_ops
from cp_inductor.sequence.follow_ops import Call, Step, Value, find_rule, sizes_of
from cp_inductor.sequence.tracks import (
    COMPUTED,
    FREE,
    GIVEN,
    Born,
    Dim,
    Kind,
    Part,
    Track,
    United,
    expand,
    fresh,
    rescale,
    unite,
)
from cp_inductor.sharding import SEQUENCE_DIM, is_sequence_sharded
from cp_inductor.subgraphs import method_of
from cp_inductor.torch_private import (
    OpWatcher,
    autocast_restored,
    bind_arguments,
    fake_copy,
    fake_mode_of,
    unbacked_ignored,
)

__all__ = ["check_sequence"]

aten = torch.ops.aten

REMEDY = (
    "compute it before the sequence is sharded, pass DTensors, which know that they are, or, if it"
    " is meant to be within the shard, set cp_inductor.config.check_sequence to False"
)
REMEDY_POSITIONS = (
    "pass the positions as an input, sharded as the tokens are, or begin them at rank * length;"
    " cp_inductor.config.check_sequence = False takes the model as it is"
)


def check_sequence(gm: fx.GraphModule, sites: Sequence[Site], layout: str) -> None:
    """Check a Dynamo graph over plain shards.

    Args:
        gm: the graph.
        sites: all its attentions over a sharded sequence; of those, the ones over plain tensors,
            or over DTensors made of plain shards for them, say what the sequence is.
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
        _Judge(record, axis.rank, layout).judge()
    except (CPError, SequenceWarning):
        raise
    except Exception as error:
        # An analysis must not keep a model from running that is right.
        _warn(
            f"{sites[0].name}: it could not be followed whether anything but attention mixes along"
            f" the sequence ({type(error).__name__}: {str(error).splitlines()[0]})"
        )


def _is_of_shards(site: Site) -> bool:
    """Whether an attention is over plain shards, or over DTensors made of such for it alone."""
    return site.query.target is DTensor.from_local or not is_sequence_sharded(
        site.query.meta["example_value"]
    )


def _warn(text: str) -> None:
    warnings.warn(text, SequenceWarning, stacklevel=2)


# Following.


class _Record:
    """What was met in a graph: the ops in order, inputs and outputs."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.given: list[Value] = []
        self.returned: list[tuple[Value, int]] = []


def _follow(gm: fx.GraphModule, sites: Sequence[Site]) -> _Record:
    inputs = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    lengths = {site.node: (_length(site.query), _length(site.key)) for site in sites}
    mode = _Following(lengths)
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
                mode.record.given.append(mode.set(argument, _dims(argument, born)))
        mode.kept += arguments
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


def _dims(tensor: Tensor, born: Born) -> tuple[Dim, ...]:
    return tuple(fresh(size, born) for size in sizes_of(tensor))


class _Following(OpWatcher):
    """Meets every op that fake tensors go through, and applies its rule.

    Args:
        lengths: of each attention over shards, how many queries and keys this rank has.
    """

    def __init__(self, lengths: Mapping[fx.Node, tuple[int, int]]) -> None:
        super().__init__()
        self.record = _Record()
        self.lengths = lengths
        self.node: fx.Node | None = None
        self.values: dict[int, Value] = {}
        # Or another tensor would take the id of one.
        self.kept: list[Any] = []

    def set(self, tensor: Tensor, dims: tuple[Dim, ...], **kwargs: Any) -> Value:
        """Note a tensor."""
        value = self.values[id(tensor)] = Value(dims, **kwargs)
        self.kept.append(tensor)
        assert len(dims) == tensor.ndim, f"{dims} for {tuple(tensor.shape)}"
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor; one that was not met is a constant of the graph."""
        known = self.values.get(id(tensor))
        return self.set(tensor, _dims(tensor, COMPUTED)) if known is None else known

    def new_step(self, op: object) -> Step:
        """Note an op."""
        node = self.node
        assert node is not None
        site = f"{node.name} ({source_line(node)})"
        step = Step(site, op, is_allowed=is_left_alone(node))
        self.record.steps.append(step)
        return step

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Follow what an op does to its tensors."""
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            return
        step = self.new_step(op)
        call = Call(op, args, kwargs, out, step, self.value_of, is_explicit=_is_explicit(self.node))
        inputs = [self.value_of(tensor) for tensor in call.tensors]
        if op.namespace in COLLECTIVE_NAMESPACES and op is not WAIT:
            # Who communicates knows that there are ranks.
            for tensor in call.outs:
                self.set(tensor, _dims(tensor, COMPUTED))
            return
        rule = follow_ops.pointwise if op is WAIT else find_rule(op)
        results = None if rule is None else rule(call)
        step.inputs = inputs
        step.is_counting = not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in call.outs
        )
        if results is None:
            step.is_unknown = True
            results = [_dims(tensor, COMPUTED) for tensor in call.outs]
        is_position = _counts_positions(op, rule, inputs)
        origin = next((value.picked_of for value in inputs if value.picked_of), ())
        view_of = inputs[0] if inputs and _is_view(op) else None
        for tensor, dims in zip(call.outs, results, strict=True):
            known = self.values.get(id(tensor))
            if known is not None:
                if torch.Tag.inplace_view in op.tags:
                    known.dims = dims
                else:
                    _write(known, dims)
                step.outputs.append(known)
            else:
                value = self.set(tensor, dims, base=view_of, is_position=is_position)
                value.picked_of = origin
                step.outputs.append(value)
        for number, _, dim in step.picked:
            step.outputs[number].picked_of = dim


def _write(value: Value, dims: tuple[Dim, ...]) -> None:
    """Change a value in place: what was alike everywhere in it, and its base, is no longer."""
    value.is_position = False
    for mine, other in zip(value.dims, dims, strict=True):
        if mine and other and mine is not other:
            unite(mine, other)
    value.dims = dims
    base = value.base
    while base is not None:
        base.dims = tuple(
            tuple(Part(p.track, p.size, COMPUTED if p.born is FREE else p.born) for p in dim)
            for dim in base.dims
        )
        base = base.base


def _is_view(op: torch._ops.OpOverload) -> bool:
    return any(
        returned.alias_info is not None and not returned.alias_info.is_write
        for returned in op._schema.returns
    )


_MOVES = frozenset(
    {
        follow_ops.view,
        follow_ops.stretch,
        follow_ops.unsqueeze,
        follow_ops.squeeze,
        follow_ops.permute,
        follow_ops.transpose,
        follow_ops.cut,
        follow_ops.mix_dim,
        follow_ops.add,
    }
)
_COPIES = frozenset(
    {aten._to_copy.default, aten.clone.default, aten.alias.default, aten.detach.default}
)


def _counts_positions(op: torch._ops.OpOverload, rule: Any, inputs: Sequence[Value]) -> bool:
    if rule is follow_ops.count:
        return True
    if rule is follow_ops.mix_dim:
        return op is aten.cumsum.default and all(
            part.born is FREE for value in inputs for dim in value.dims for part in dim
        )
    if rule not in _MOVES and op not in _COPIES:
        return False
    return [value.is_position for value in inputs] == [True]


def _is_explicit(node: fx.Node | None) -> bool:
    """Whether a node that slices says where from: it may have counted the ranks before."""
    if node is None:
        return False
    if node.target is getitem:
        index = node.args[1]
        given = index if isinstance(index, tuple) else (index,)
        return any(isinstance(item, slice) and item.start is not None for item in given)
    return node.target is torch.narrow or method_of(node) is Tensor.narrow


class _Follower(fx.Interpreter):
    """Runs a Dynamo graph on fake tensors, attentions and what DTensors are made of by hand."""

    def __init__(self, gm: fx.GraphModule, mode: _Following, entered: list[Any]) -> None:
        super().__init__(gm)
        self.mode = mode
        self.entered = entered

    def run_node(self, n: fx.Node) -> Any:
        self.mode.node = n
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
        self.mode.set(constant, _dims(constant, Born(Kind.CONSTANT)))
        return constant

    def _by_hand(self, node: fx.Node) -> Callable[..., Any] | None:
        if node.op == "call_method":
            return self._rewrap if method_of(node) in _REWRAPPING else None
        if node.target in SDPA and not is_left_alone(node):
            return self._attend
        if node.target in (torch.amp._enter_autocast, torch.amp._exit_autocast):
            return self._autocast
        if node.target in _REWRAPPING:
            return self._rewrap
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._call_body
        return None

    def _attend(self, node: fx.Node, args: Any, kwargs: Any) -> Tensor:
        bound = bind_arguments(aten.scaled_dot_product_attention.default, args, kwargs)
        values = [self.mode.value_of(bound[name]) for name in ("query", "key", "value")]
        query, key, value = (value.dims for value in values)
        step = self.mode.new_step(node.target)
        step.inputs = values
        for one, other in ((key[2], value[2]), (query[0], key[0]), (key[0], value[0])):
            unite(one, other)
        if node in self.mode.lengths:
            step.heads.append((query[1], key[1]))
            lengths = self.mode.lengths[node]
            # Of DTensors that were made for the attention, what this rank has.
            own_query, own_key = (
                rescale(dim, length)
                for dim, length in zip((query[2], key[2]), lengths, strict=True)
            )
            step.sequences.append(own_key)
            if not all(part.born.is_constant for part in own_query):
                step.sequences.append(own_query)
            step.keys.append(key[2])
        out = fake_copy(node.meta["example_value"])
        step.outputs.append(self.mode.set(out, (*query[:3], value[3])))
        return out

    def _rewrap(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Make a DTensor of a local tensor, or the other way round: dims stay what they are."""
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
        self.mode.node = node
        for other in results[1:]:
            self._unite(results[0], other)
        if node.target is torch.ops.higher_order.autograd_function_apply:
            # And what the backward needs.
            return results[0][0]
        return results[0]

    def _unite(self, one: Any, other: Any) -> None:
        """Have what two branches return run along the same."""
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
                step.outputs.append(self.mode.set(leaf, _dims(leaf, COMPUTED)))
        return out


_REWRAPPING = frozenset(
    {DTensor.from_local, DTensor.to_local, DTensor.redistribute, DTensor.full_tensor}
)


# Judging.

_STACKS = frozenset({aten.stack.default, aten.cat.default})


@dataclass(frozen=True, slots=True)
class _Label:
    """What a value is made of that is less than the sequence.

    Attributes:
        step: where.
        picked: the track and the number of the token that was picked; None: all were reduced.

    Tokens that are counted (those of an expert, say) may decide where others go, and back: whether
    that mixes cannot be seen.
    """

    step: Step
    picked: tuple[Track, int] | None = None


class _Judge:
    """Reads a record: which tracks are the sequence, and what each op does along them."""

    def __init__(self, record: _Record, rank: int, layout: str) -> None:
        self.record = record
        self.rank = rank
        self.layout = layout
        self.sequences = {
            part.track.outermost()
            for step in record.steps
            for dim in step.sequences
            for part in expand(dim)[:1]
        }
        self.labels: dict[Value, frozenset[_Label]] = {}
        self.warned = set[str]()
        self.attended = self._ranges(dim for step in record.steps for dim in step.sequences)
        self.given = self._ranges(
            dim for value in record.given for dim in value.dims if dim and dim[0].born is GIVEN
        )

    def _ranges(self, dims: Iterable[Dim]) -> dict[Track, tuple[int, int]]:
        """Return from where to where dims reach along each track of the sequence."""
        ranges: dict[Track, tuple[int, int]] = {}
        for dim in dims:
            for part in expand(dim):
                root, shift = part.track.find()
                if root in self.sequences:
                    low, high = ranges.get(root, (shift, shift + part.size))
                    ranges[root] = (min(low, shift), max(high, shift + part.size))
        return ranges

    def judge(self) -> None:
        """Go through all ops in order."""
        self._check_given()
        for step in self.record.steps:
            if not step.is_allowed:
                self._check_attention(step)
                self._check_mixing(step)
                self._check_positions(step)
                self._check_windows(step)
                self._warn_of_unknown(step)
            self._spread_labels(step)
        self._warn_of_returned()

    def _is_sequence(self, dim: Dim) -> bool:
        return any(part.track.outermost() in self.sequences for part in expand(dim))

    def _check_attention(self, step: Step) -> None:
        for dim, (_, beside) in zip(step.keys, step.heads, strict=True):
            # A key may be a parameter, or what is computed of one; but not beside the tokens.
            is_beside = any(part.born in (GIVEN, COMPUTED) for part in expand(beside))
            if is_beside and any(part.born.is_constant for part in expand(dim)[:1]):
                born = expand(dim)[0].born
                raise SequenceMixed(
                    site=step.site,
                    expected="query, key and value of shape (batch, heads, tokens, features)",
                    got=f"a dim 2 that comes from {born.kind.value} and not from the tokens",
                    remedy="transpose(1, 2) what was split into heads",
                )
        if any(self._is_sequence(query) for query, _ in step.heads):
            raise SequenceMixed(
                site=step.site,
                expected="query, key and value of shape (batch, heads, tokens, features)",
                got="a dim 1 along which there are tokens, too",
                remedy="transpose(1, 2) what was split into heads",
            )
        for dim in step.sequences:
            for part in expand(dim)[:1]:
                root, shift = part.track.find()
                low, high = self.given.get(root, (shift, shift + part.size))
                if shift < low or shift + part.size > high:
                    raise SequenceMixed(
                        site=step.site,
                        expected=f"the {high - low} tokens that this rank was given",
                        got=f"{part.size}: every rank would add some to its shard",
                        remedy=REMEDY,
                    )

    def _check_given(self) -> None:
        """Refuse inputs that go with other tokens than those they are given with."""
        for value in self.record.given:
            for part in (part for dim in value.dims for part in expand(dim)):
                root, shift = part.track.find()
                low, high = self.attended.get(root, (shift, shift + part.size))
                is_inside = low <= shift and shift + part.size <= high
                # One that is longer is a table; what is cut from it, `_check_windows` judges.
                if part.born is GIVEN and not is_inside and part.size <= high - low:
                    step = next(step for step in self.record.steps if value in step.inputs)
                    self._refuse(step, "an input whose tokens are shifted against those attended")

    def _check_mixing(self, step: Step) -> None:
        for dim in step.mixed:
            if self._is_sequence(dim):
                self._refuse(step, f"{step.op}, which mixes along it")
        for outcome, dim in step.united:
            if outcome is United.SHIFTED and self._is_sequence(dim):
                self._refuse(step, f"{step.op} of tokens with others that stand beside them")
        for dim in step.reduced:
            if self._is_sequence(dim) and self._has_sequence(step.outputs):
                self._refuse(step, f"{step.op}, which adds up along it for every token")

    def _has_sequence(self, values: Iterable[Value]) -> bool:
        return any(self._is_sequence(dim) for value in values for dim in value.dims)

    def _check_positions(self, step: Step) -> None:
        for dims in step.aligned:
            parts = [part for dim in dims for part in expand(dim)]
            parts = [part for part in parts if part.track.outermost() in self.sequences]
            if all(part.born.is_constant for part in parts):
                continue
            for part in parts:
                if part.born.is_constant and not self._may_begin(part.born, part.size):
                    raise SequenceMixed(
                        site=step.site,
                        expected="what goes with a token to know where this rank's tokens stand",
                        got=f"{part.born.kind.value}, from number {part.born.start} on",
                        remedy=REMEDY_POSITIONS,
                    )

    def _may_begin(self, born: Born, size: int) -> bool:
        """Whether numbers can be those of this rank's tokens."""
        if born.start is None:
            return True
        if self.layout != "contiguous":
            return False
        return born.is_explicit if self.rank == 0 else born.start >= self.rank * size

    def _check_windows(self, step: Step) -> None:
        for dim, start, is_explicit in step.windows:
            for part in expand(dim)[:1]:
                root, shift = part.track.find()
                low, high = self.attended.get(root, (shift, shift + part.size))
                is_inside = low <= shift and shift + part.size <= high
                born = Born(Kind.GIVEN, start, is_explicit)
                if part.born is GIVEN and not is_inside and not self._may_begin(born, high - low):
                    raise SequenceMixed(
                        site=step.site,
                        expected=f"an input with this rank's {high - low} tokens",
                        got=f"one of {part.size}, cut from number {start} on",
                        remedy=REMEDY_POSITIONS,
                    )

    def _warn_of_unknown(self, step: Step) -> None:
        lost = [dim for outcome, dim in step.united if outcome is United.APART]
        if step.is_unknown:
            lost += [dim for value in (*step.inputs, *step.outputs) for dim in value.dims]
        if any(map(self._is_sequence, lost)):
            self._warn_of(
                step,
                f"it is not known whether {step.op} mixes along the sequence, of which it has this"
                f" rank's shard alone; {REMEDY}",
            )

    def _warn_of(self, step: Step, text: str) -> None:
        if step.site not in self.warned:
            self.warned.add(step.site)
            _warn(f"{step.site}: {text}")

    def _spread_labels(self, step: Step) -> None:
        labels = frozenset().union(
            *(self.labels.get(value, frozenset()) for value in (*step.inputs, *step.outputs))
        )
        if self._puts_together(step):
            labels = frozenset()
        if labels and not step.is_allowed:
            self._check_labels(step, labels)
            if self._has_sequence(step.outputs):
                # It was said.
                labels = frozenset()
        if any(map(self._is_sequence, step.reduced)):
            labels |= {_Label(step)}
        for number, value in enumerate(step.outputs):
            picked = {
                _Label(step, part.track.find())
                for of, dim, _ in step.picked
                for part in expand(dim)[:1]
                if of == number and part.track.outermost() in self.sequences
            }
            changed: Value | None = value
            while changed is not None:
                self.labels[changed] = self.labels.get(changed, frozenset()) | labels | picked
                changed = changed.base if value in step.inputs else None

    def _puts_together(self, step: Step) -> bool:
        """Whether an op puts tokens together that were taken apart, in their order."""
        if step.op not in _STACKS or not self._has_sequence(step.outputs):
            return False
        labels = [self.labels.get(value, frozenset()) for value in step.inputs]
        if any(len(own) != 1 for own in labels):
            return False
        picked = [label.picked for own in labels for label in own]
        first = picked[0]
        return first is not None and picked == [
            (first[0], first[1] + index) for index in range(len(picked))
        ]

    def _check_labels(self, step: Step, labels: frozenset[_Label]) -> None:
        reduced = [label for label in labels if label.picked is None]
        computed = [label for label in reduced if not label.step.is_counting]
        picked = {label.picked: label for label in labels if label.picked is not None}
        if self._has_sequence((*step.inputs, *step.outputs)):
            for label in (*computed, *picked.values()):
                self._refuse(label.step, f"{label.step.op}, which meets the tokens in {step.site}")
            self._warn_of(
                reduced[0].step,
                f"it is not known whether what {reduced[0].step.op} counts mixes the tokens that it"
                f" meets in {step.site}: it has counted this rank's shard alone; {REMEDY}",
            )
        if computed and (step.is_learned or step.keys):
            self._refuse(
                computed[0].step,
                f"{computed[0].step.op}, which is no loss: {step.op} in {step.site} goes on with"
                " it",
            )
        if len(picked) > 1 and step.op not in _STACKS:
            (_, label), *_ = picked.items()
            self._refuse(label.step, f"single tokens, which meet in {step.site}")

    def _warn_of_returned(self) -> None:
        for value, ndim in self.record.returned:
            for label in self.labels.get(value, ()):
                if label.picked is not None or ndim > 1:
                    kind = "one token" if label.picked is not None else "a sum or mean of tokens"
                    _warn(
                        f"{label.step.site}: the model returns what comes of {kind}"
                        f" ({label.step.op}): on every rank of its own shard; {REMEDY}"
                    )
                    return

    def _refuse(self, step: Step, got: str) -> None:
        raise SequenceMixed(
            site=step.site,
            expected="nothing but attention to take tokens of plain shards together",
            got=got,
            remedy=REMEDY,
        )
