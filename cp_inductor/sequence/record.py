"""Record which ops tensors go through, and what each does along their dims.

    with recorder:                    x [b s d], met before, or as an input
        y = x.cumsum(1)                 => a step: cumsum mixes along s; y [b s d]

The runner says where it is: a graph on fake tensors (`passes.check_sequence`), or a program in
eager code (`sequence.eager`). The record is judged afterwards (`sequence.judge`).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.graph.collectives import COLLECTIVE_NAMESPACES, WAIT
from cp_inductor.sequence import follow_ops
from cp_inductor.sequence.follow_ops import Call, Step, Value, find_rule, sizes_of
from cp_inductor.sequence.tracks import COMPUTED, FREE, Born, Dim, Part, fresh, rescale, unite
from cp_inductor.torch_private.modes import OpWatcher

aten = torch.ops.aten


class Record:
    """The ops of a graph in order, with their inputs and outputs."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.given: list[Value] = []
        self.returned: list[tuple[Value, int]] = []
        # Of buffers that were sharded: what is the sequence where no attention is met.
        self.sequences: list[Dim] = []


def dims_of(tensor: Tensor, born: Born) -> tuple[Dim, ...]:
    """Return dims along new tracks."""
    return tuple(fresh(size, born) for size in sizes_of(tensor))


class Recorder(OpWatcher):
    """Applies the rule of every op that tensors go through inside.

    Attributes:
        is_explicit: the current function slices and names its start, which may come from the rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = Record()
        self.values: MutableMapping[Tensor, Value] = WeakTensorKeyDictionary()
        self.is_explicit = False

    def locate(self) -> tuple[str, bool]:
        """Return where the current function is, and whether the user asked for what it does."""
        raise NotImplementedError

    def meet_first(self, tensor: Tensor) -> Value:
        """Record a tensor that no op inside has made."""
        raise NotImplementedError

    def set(self, tensor: Tensor, dims: tuple[Dim, ...], **kwargs: Any) -> Value:
        """Record a tensor and its dims."""
        value = self.values[tensor] = Value(dims, **kwargs)
        assert len(dims) == tensor.ndim, f"{dims} for {tuple(tensor.shape)}"
        return value

    def value_of(self, tensor: Tensor) -> Value:
        """Return the value of a tensor."""
        known = self.values.get(tensor)
        return self.meet_first(tensor) if known is None else known

    def new_step(self, op: object) -> Step:
        """Record an op."""
        site, is_allowed = self.locate()
        step = Step(site, op, is_allowed=is_allowed)
        self.record.steps.append(step)
        return step

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Apply the rule of an op to its tensors."""
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            return
        step = self.new_step(op)
        call = Call(op, args, kwargs, out, step, self.value_of, is_explicit=self.is_explicit)
        inputs = [self.value_of(tensor) for tensor in call.tensors]
        if op.namespace in COLLECTIVE_NAMESPACES and op is not WAIT:
            # Who communicates knows that there are ranks.
            for tensor in call.outs:
                self.set(tensor, dims_of(tensor, COMPUTED))
            return
        rule = follow_ops.pointwise if op is WAIT else find_rule(op)
        results = None if rule is None else rule(call)
        step.inputs = inputs
        step.is_counting = not any(
            tensor.is_floating_point() or tensor.is_complex() for tensor in call.outs
        )
        if results is None:
            step.is_unknown = True
            results = [dims_of(tensor, COMPUTED) for tensor in call.outs]
        is_position = _counts_positions(op, rule, inputs)
        origin = next((value.picked_of for value in inputs if value.picked_of), ())
        view_of = inputs[0] if inputs and _is_view(op) else None
        for tensor, dims in zip(call.outs, results, strict=True):
            known = self.values.get(tensor)
            if known is not None:
                if torch.Tag.inplace_view in op.tags:
                    known.dims = dims
                else:
                    _write(known, dims)
                    step.written += [(dims, base.dims) for base in _bases(known)]
                step.outputs.append(known)
            else:
                value = self.set(tensor, dims, base=view_of, is_position=is_position)
                value.picked_of = origin
                step.outputs.append(value)
        for number, _, dim in step.picked:
            step.outputs[number].picked_of = dim

    def attend(
        self,
        op: object,
        tensors: Sequence[Tensor],
        out: Tensor,
        lengths: tuple[int, int] | None,
    ) -> None:
        """Follow an attention, whatever computes it.

        Args:
            op: the function that was called.
            tensors: query, key and value (B, H, S, D).
            out: (B, H, S, E).
            lengths: how many queries and keys of a sharded sequence this rank has.
        """
        values = [self.value_of(tensor) for tensor in tensors]
        query, key, value = (value.dims for value in values)
        step = self.new_step(op)
        step.inputs = values
        for one, other in ((key[2], value[2]), (query[0], key[0]), (key[0], value[0])):
            unite(one, other)
        if lengths is not None:
            step.heads.append((query[1], key[1]))
            # Of DTensors that were made for the attention, what this rank has.
            own_query, own_key = (
                rescale(dim, length)
                for dim, length in zip((query[2], key[2]), lengths, strict=True)
            )
            step.sequences.append(own_key)
            if not all(part.born.is_constant for part in own_query):
                step.sequences.append(own_query)
            step.keys.append(key[2])
        step.outputs.append(self.set(out, (*query[:3], value[3])))


def _write(value: Value, dims: tuple[Dim, ...]) -> None:
    """Write to a value in place: it, and its base, are no longer equal everywhere."""
    value.is_position = False
    for mine, other in zip(value.dims, dims, strict=True):
        if mine and other and mine is not other:
            unite(mine, other)
    value.dims = dims
    for base in _bases(value):
        base.dims = tuple(
            tuple(Part(p.track, p.size, COMPUTED if p.born is FREE else p.born) for p in dim)
            for dim in base.dims
        )


def _bases(value: Value) -> Iterator[Value]:
    """Yield what a value is a view of, the innermost first."""
    base = value.base
    while base is not None:
        yield base
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
