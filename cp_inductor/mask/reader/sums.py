"""Tell whether what takes the place of scores is a sum of them and of what does not depend on them.

    where(q >= k, s + table[bucket(q - k)], -inf)      yes, whatever `bucket` calls
    s * table[q]    50 * tanh(s / 50)                  no

A sum is f(s) = s + f(0), and f(0) may be computed as a tensor. So what is added need not be read.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from cp_inductor.mask.reader.read import Reading
from cp_inductor.mask.reader.trace import Trace
from cp_inductor.torch_private.arguments import bind_arguments

aten = torch.ops.aten

# What moves numbers, and leaves them as they are.
_MOVES = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.expand.default,
        aten.permute.default,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.view.default,
    }
)


def is_sum_with_score(trace: Trace, reading: Reading) -> bool:
    """Whether a trace of scores adds to them, or removes pairs, and does nothing else.

    Args:
        trace: of what changes scores.
        reading: of the trace; it knows which branches are -oo.
    """
    assert trace.score is not None
    of_score, sums = {trace.score}, {trace.score}
    for node in trace.gm.graph.nodes:
        if node.op != "call_function" or of_score.isdisjoint(node.all_input_nodes):
            continue
        of_score.add(node)
        if _is_sum(node, of_score, sums, reading):
            sums.add(node)
    return trace.result in sums


def _is_sum(node: fx.Node, of_score: set[fx.Node], sums: set[fx.Node], reading: Reading) -> bool:
    op: Any = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return False
    call = bind_arguments(op, node.args, node.kwargs)
    if op in _MOVES:
        return call["self"] in sums
    if op is aten._to_copy.default:
        before, after = call["self"].meta["val"].dtype, node.meta["val"].dtype
        is_wider = after.is_floating_point and after.itemsize >= before.itemsize
        return call["self"] in sums and is_wider
    if op in (aten.add.Tensor, aten.sub.Tensor):
        left, right = call["self"], call["other"]
        if right in sums and op is aten.add.Tensor and call["alpha"] == 1:
            return left not in of_score
        return left in sums and right not in of_score
    if op is aten.where.self:
        branches = (call["self"], call["other"])
        is_kept = all(one in sums or _is_nothing(one, reading) for one in branches)
        return call["condition"] not in of_score and is_kept
    return False


def _is_nothing(node: Any, reading: Reading) -> bool:
    value = reading.values.get(node)
    numbers = getattr(value, "cases", ())
    return bool(numbers) and all(number == sympy.S.NegativeInfinity for _, number in numbers)
