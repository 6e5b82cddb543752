"""Read the mask that a graph computes for an attention, as a function of indices.

    kv_idx <= q_idx, of two aranges                        =>  k - q <= 0
    docs[b, q_idx] == docs[b, kv_idx], docs an input       =>  Eq(t0(b, k), t0(b, q)), t0 = docs

The slice of the graph that the mask depends on is traced in core aten ops, and each op is read by
its row of a table (`cp_inductor.mask`). A value that depends on run-time tensors stays a table of
which only the indices and the range are known. So does a value that cannot be read, which may be
the whole mask; it is then used as it is. A rule holds for every index and for whatever the tables
may hold.

Assumes: a graph from Dynamo, whose nodes carry `example_value`; shapes are of whole tensors.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from cp_inductor.mask.language import FULL
from cp_inductor.mask.reader.read import known_nodes, read
from cp_inductor.mask.reader.to_rule import Recognized, as_it_is, as_rule, misread, with_bias
from cp_inductor.mask.reader.trace import Trace, trace_mask
from cp_inductor.mask.rule import Rule


def recognize_mask(mask: fx.Node) -> Recognized:
    """Return what a mask is.

    Args:
        mask: bool, or added to the scores; of up to 4 dims that broadcast to (B, H, S, T).
    """
    trace = trace_mask(mask)
    recognized = _recognize(trace)
    example = mask.meta["example_value"]
    if example.requires_grad and (recognized is None or recognized.rule.bias):
        # Its gradient is the bias's as a whole; what does not exist is known nevertheless.
        recognized = with_bias(recognized or Recognized(Rule(FULL)), mask)
    elif recognized is None:
        recognized = as_it_is(mask)
    return replace(recognized, computed_by=known_nodes(trace))


def _recognize(trace: Trace) -> Recognized | None:
    """Return a mask as a rule; None if no rule is known."""
    held: set[fx.Node] = set()
    while True:
        reading = read(trace, held)
        value = reading.values.get(trace.result)
        recognized = None if value is None else as_rule(value, reading.tables)
        if value is None or recognized is None:
            return None
        # Slices of a table that cannot be read at other indices are tables of their own.
        misread_tables = misread(recognized, value.shape, reading.tables)
        if misread_tables <= held:
            return None if misread_tables else recognized
        held |= misread_tables
