"""Name the exchange at which a compiled graph failed, by the labels of `label_exchanges`.

    # Topologically Sorted Source Nodes: [cp_attention_1_backward_exchange_2_of_4], ...
    torch.ops._c10d_functional.wait_tensor.default(buf29)                      generated code
      => ExchangeFailed: sdpa_1 (model.py:41), exchange 2 of 4 of its backward

Where an exchange fails, torch raises from that line. Nothing is done at run time: the traceback of
the error leads to the line. An interpreted graph has the labels in its nodes.

Assumes: generated code is Python, whose comments above collectives name their origins; the errors
of other code are raised as they came.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from types import FrameType
from typing import Any

from torch import fx

from cp_inductor.passes.verify_graph import LABEL
from cp_inductor.torch_private.inductor import label_of
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.trust.claims import Planned
from cp_inductor.trust.exchanges import exchanging

COLLECTIVE = re.compile(
    r"torch\.ops\.(?:_c10d_functional\.|cp_inductor\.(?=exchange_rows))(\w+)\.default\("
)


def with_steps_named(
    function: Callable[..., Any], attentions: Sequence[Planned], direction: str
) -> Callable[..., Any]:
    """Have errors of exchanges, in a direction of a compiled graph, say which it was."""
    if not attentions:
        return function
    where = f"the {direction} of a graph of attention at {attentions[0].site}"
    groups = {attention.attention.group_name for attention in attentions}
    name_of = partial(_name_of, attentions, direction)
    step_of = partial(_find, attentions, direction)

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with exchanging(groups, where, name_of, step_of):
            return function(*args, **kwargs)

    run_uncompiled(run)
    return run


def _find(
    attentions: Sequence[Planned], direction: str, error: BaseException
) -> tuple[str, str, str] | None:
    """Return the group, attention and step of the exchange that raised an error, if one did."""
    failed = None
    traceback = error.__traceback__
    while traceback is not None:
        line = linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        collective = COLLECTIVE.search(line)
        if collective is not None:
            failed = (collective[1], _label_at(traceback.tb_frame, traceback.tb_lineno, line))
        traceback = traceback.tb_next
    if failed is None:
        return None
    name, label = failed
    group_name = attentions[0].attention.group_name
    if label is None or label[3] != "exchange":
        site = f"a compiled graph of {len(attentions)} attentions"
        return group_name, site, f"{name} of its {direction}, which no attention started,"
    place, direction, _, number, num_steps = label.groups()
    if place == "unknown" or int(place) >= len(attentions):
        site = f"one of {len(attentions)} attentions of a compiled graph"
    else:
        captured = attentions[int(place)]
        group_name, site = captured.attention.group_name, captured.site
        if len({other.site for other in attentions}) < len(attentions):
            site = f"{site}, number {int(place) + 1} of the {len(attentions)} in the graph"
    return group_name, site, f"exchange {number} of {num_steps} of its {direction}"


def _name_of(attentions: Sequence[Planned], direction: str, func: Any) -> tuple[str, int] | None:
    """Return which exchange or tile an op is that compiled code calls right now."""
    call, frame = f"torch.ops.{func}(", sys._getframe(1)
    while frame is not None:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if call in line:
            label = _label_at(frame, frame.f_lineno, line)
            if label is None:
                return None
            place, number = label[1], int(label[4])
            if place == "unknown":
                return f"an attention of unknown place, {direction}", number
            return f"{attentions[int(place)].site}, {label[2]}", number
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _label_at(frame: FrameType, number: int, line: str) -> re.Match[str] | None:
    """Return the label of the collective in a line of generated code."""
    module = frame.f_locals.get("self")
    if isinstance(module, fx.GraphModule):
        name = line.split("=")[0].strip()
        labels = [label_of(node) for node in module.graph.nodes if node.name == name]
        return LABEL.search(labels[0] or "") if labels else None
    return label_above(partial(linecache.getline, frame.f_code.co_filename), number)


def label_above(line_at: Callable[[int], str], number: int) -> re.Match[str] | None:
    """Return the label in the comments right above a line of generated code; None without one.

    Args:
        line_at: returns a line by its number, from 1 on.
        number: of the line.
    """
    while number > 1:
        number -= 1
        above = line_at(number).strip()
        if not above.startswith("#"):
            return None
        label = LABEL.search(above)
        if label is not None:
            return label
    return None


def exchanges_in(code: str) -> list[str | None]:
    """Return the label of each collective in generated code, None for one that has none."""
    lines = code.splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if COLLECTIVE.search(line)]
    labels = [label_above(lambda number: lines[number - 1], number) for number in numbers]
    return [label[0] if label else None for label in labels]
