"""Keep the order of starts, tiles and waits through Inductor, which would otherwise undo it.

    start_0 . tile_0 . wait_0 . start_1 . tile_1     =>     each depends on those before it

Inductor's scheduler moves a start to just before its wait when nothing forbids it, and then nothing
overlaps; the order of collectives would differ between ranks, whose graphs differ, and that is a
hang. So every collective of the graph is in the chain, also those of DTensor and data parallelism,
in the order that the graph had when it was lowered and all ranks agreed on it. So is what they are
to hide behind: tiles, and matrix multiplications that stand between a start and its wait.

Two halves: `number_nodes` writes the order down in the graph that was lowered; `PinOrder`, as
Inductor's last custom pass after its own rewrites, turns the numbers into dependencies.
"""

from __future__ import annotations

from bisect import bisect
from itertools import chain

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from cp_inductor.kernels import TILE_OPS
from cp_inductor.nodes import WAIT, is_collective, is_heavy
from cp_inductor.torch_private import pin_order

__all__ = ["PinOrder", "number_nodes"]

META_KEY = "cp_inductor_order"


def number_nodes(graph: fx.Graph) -> None:
    """Write down the order of collectives, and of the compute between their starts and waits."""
    number, num_in_flight = 0, 0
    for node in graph.nodes:
        if is_collective(node):
            num_in_flight = max(0, num_in_flight + (-1 if node.target is WAIT else 1))
        elif node.target not in TILE_OPS and not (num_in_flight > 0 and is_heavy(node)):
            continue
        node.meta[META_KEY] = number
        number += 1


class PinOrder(CustomGraphPass):
    """Inductor's custom post-grad pass: chain what `number_nodes` numbered.

    Args:
        key: identifies this compile in Inductor's cache keys: with a pass that has no `uuid`,
            nothing is cached; with one that leaves out the rank, ranks load each other's graphs.
    """

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, graph: fx.Graph) -> None:
        """Add the dependencies to a graph that was lowered, numbered and since rewritten."""
        latest: dict[object, fx.Node] = {}
        earlier_of = {}
        for node in _in_order(graph):
            # After the latest of every op, not the last node alone: in Inductor's eyes a wait
            # returns the buffer of its start, so that whoever depends on a wait may overtake it.
            earlier_of[node] = list(latest.values())
            latest[node.target] = node
        pin_order(graph, earlier_of)

    def uuid(self) -> object | None:
        """Return the key."""
        return self.key


def _in_order(graph: fx.Graph) -> list[fx.Node]:
    """Sort by number; a collective made since (buckets of DDP) stays behind its neighbour."""
    _forget_what_changed(graph)
    numbered = [node for node in graph.nodes if META_KEY in node.meta]
    if not numbered:
        return []
    numbered.sort(key=lambda node: node.meta[META_KEY])
    later: dict[int, list[fx.Node]] = {}
    previous = -1
    for node in graph.nodes:
        if META_KEY in node.meta:
            previous = node.meta[META_KEY]
        elif is_collective(node):
            later.setdefault(previous, []).append(node)
    numbers = [node.meta[META_KEY] for node in numbered]
    groups: list[list[fx.Node]] = [[] for _ in range(len(numbered) + 1)]
    for number, nodes in later.items():
        groups[bisect(numbers, number)].extend(nodes)
    heads: list[list[fx.Node]] = [[], *([node] for node in numbered)]
    return list(chain.from_iterable(chain.from_iterable(zip(heads, groups, strict=True))))


def _forget_what_changed(graph: fx.Graph) -> None:
    """Drop numbers that Inductor's rewrites handed on to other nodes, or that data contradicts.

    Of a sum and a matrix multiplication it makes one node, which depends on all that both did.
    """
    latest: dict[fx.Node, int] = {}
    for node in graph.nodes:
        before = max((latest[source] for source in node.all_input_nodes), default=-1)
        number = node.meta.get(META_KEY, -1)
        is_fixed = is_collective(node) or node.target in TILE_OPS
        if number >= 0 and not is_fixed and not (is_heavy(node) and number > before):
            del node.meta[META_KEY]
            number = -1
        latest[node] = max(before, number)
