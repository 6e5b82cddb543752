"""Name the exchange at which a compiled graph failed: label exchanges, and read the labels again.

    wait_tensor_3 = _c10d_functional::wait_tensor(all_to_all_single_3)         lowered graph
      => its "from_node" is cp_attention_1_backward_exchange_2_of_4, and Inductor writes
    # Topologically Sorted Source Nodes: [cp_attention_1_backward_exchange_2_of_4], ...
    torch.ops._c10d_functional.wait_tensor.default(buf29)                      generated code

Where an exchange fails, torch raises from that line. The labels are in the code that Inductor keeps
in its cache. They name attentions by their place in the graph, and not by their source line: two
graphs that differ in nothing else share code. An interpreted graph has the labels in its nodes.

Nothing is done at run time: the traceback of the error leads to the line.

Assumes: Inductor writes the origins of collectives into comments above them, and generated code is
Python; of other code the error is raised as it came.
"""

from __future__ import annotations

import linecache
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from types import FrameType
from typing import Any

from torch import Tensor, fx

from cp_inductor.errors import CPError
from cp_inductor.graph.collectives import is_collective
from cp_inductor.graph.nodes import graphs_of
from cp_inductor.passes.lower_attention import EXPANSIONS, IS_OURS
from cp_inductor.torch_private.inductor import label_of, put_label
from cp_inductor.torch_private.modes import run_uncompiled
from cp_inductor.torch_private.tracing import replace_backward
from cp_inductor.trust.course import waiting_in
from cp_inductor.trust.failures import Step, failure, step_of
from cp_inductor.trust.graph_agreement import Planned

# In the meta of an attention, which its expansion shares: (its place in the graph, direction).
PLACE = "cp_inductor_place"

LABEL = re.compile(r"cp_attention_(\d+|unknown)_(forward|backward)_exchange_(\d+)_of_(\d+)")
COLLECTIVE = re.compile(
    r"torch\.ops\.(?:_c10d_functional\.|cp_inductor\.(?=exchange_rows))(\w+)\.default\("
)


class Steps:
    """Labels the exchanges of the graphs of one compile."""

    def __init__(self) -> None:
        # Of a forward's autograd node, which a backward's has as well: the place of the attention.
        self.place_of: dict[Any, int] = {}

    def number_attentions(self, gm: fx.GraphModule, kind: str) -> list[fx.Node]:
        """Note of each attention which it is, in its `PLACE`, and return them unlowered."""
        nodes = [n for graph in graphs_of(gm) for n in graph.nodes if n.target in EXPANSIONS]
        if kind != "backward":
            self.place_of = {n.meta.get("seq_nr"): place for place, n in enumerate(nodes)}
        for place, node in enumerate(nodes):
            direction = "forward" if EXPANSIONS[node.target].is_forward else "backward"
            in_forward = self.place_of.get(node.meta.get("seq_nr"), "unknown")
            node.meta[PLACE] = (place if kind != "backward" else in_forward, direction)
        return nodes

    def label_exchanges(self, gm: fx.GraphModule) -> None:
        """Label the exchanges of a lowered graph."""
        for graph in graphs_of(gm):
            ours = [n for n in graph.nodes if is_collective(n) and n.meta.get(IS_OURS, False)]
            starts = [n for n in ours if not _is_wait(n)]
            totals = Counter(n.meta.get(PLACE) for n in starts)
            numbers = Counter[Any]()
            label_of_start: dict[fx.Node, str] = {}
            for start in starts:
                place = start.meta.get(PLACE)
                if place is not None:
                    numbers[place] += 1
                    step = f"exchange_{numbers[place]}_of_{totals[place]}"
                    label_of_start[start] = f"cp_attention_{place[0]}_{place[1]}_{step}"
            for start, label in label_of_start.items():
                put_label(start, label)
            for node in ours:
                source = node.args[0] if _is_wait(node) else None
                if isinstance(source, fx.Node) and source in label_of_start:
                    put_label(node, label_of_start[source])


def _is_wait(node: fx.Node) -> bool:
    return "wait_tensor" in str(node.target)


def with_steps_named(
    compiled: Callable[..., Any], attentions: Sequence[Planned]
) -> Callable[..., Any]:
    """Have errors of exchanges, in forward and backward of a compiled graph, say which it was."""
    if not attentions:
        return compiled
    run_forward = _named(compiled, attentions, "forward")
    has_backward = False

    @wraps(compiled)
    def run(*args: Any) -> Any:
        nonlocal has_backward
        outputs = run_forward(*args)
        if not has_backward:
            leaves = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            nodes = [output.grad_fn for output in leaves if isinstance(output, Tensor)]
            has_backward = replace_backward(
                nodes, lambda backward: _named(backward, attentions, "backward")
            )
        return outputs

    return run


def _named(
    function: Callable[..., Any], attentions: Sequence[Planned], direction: str
) -> Callable[..., Any]:
    where = f"the {direction} of a graph of attention at {attentions[0].site}"

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        try:
            with waiting_in(attentions[0].attention.group_name, where):
                return function(*args, **kwargs)
        except CPError:
            raise
        except RuntimeError as error:
            found = _find(error, attentions, direction)
            if found is None:
                raise
            group_name, step = found
            named = failure(group_name, step, error, time.monotonic() - started)
            raise named from error

    run_uncompiled(run)
    return run


def _find(
    error: BaseException, attentions: Sequence[Planned], direction: str
) -> tuple[str, Step] | None:
    """Return the group and the step of the exchange that raised an error; None if none did."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        line = linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        collective = COLLECTIVE.search(line)
        if collective is not None:
            found = (collective[1], _label_at(traceback.tb_frame, traceback.tb_lineno, line))
        traceback = traceback.tb_next
    if found is None:
        return None
    name, label = found
    group_name = attentions[0].attention.group_name
    if label is None:
        site = f"a compiled graph of {len(attentions)} attentions"
        return group_name, Step(site, f"{name} of its {direction}, which no attention started,")
    place, direction, number, num_steps = label.groups()
    if place == "unknown" or int(place) >= len(attentions):
        site = f"one of {len(attentions)} attentions of a compiled graph"
    else:
        one = attentions[int(place)]
        group_name, site = one.attention.group_name, one.site
        if len({other.site for other in attentions}) < len(attentions):
            site = f"{site}, number {int(place) + 1} of the {len(attentions)} in the graph"
    return group_name, step_of(site, direction, int(number), int(num_steps))


def _label_at(frame: FrameType, number: int, line: str) -> re.Match[str] | None:
    """Return the label of the collective in a line of generated code."""
    module = frame.f_locals.get("self")
    if isinstance(module, fx.GraphModule):
        name = line.split("=")[0].strip()
        labels = [label_of(node) for node in module.graph.nodes if node.name == name]
        return LABEL.search(labels[0] or "") if labels else None
    while number > 1:
        number -= 1
        above = linecache.getline(frame.f_code.co_filename, number).strip()
        if not above.startswith("#"):
            return None
        label = LABEL.search(above)
        if label is not None:
            return label
    return None
