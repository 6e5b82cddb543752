"""Find what ranks exchange for recurrences, in a graph of Dynamo.

    whole = redistribute(shards)     # of a mixer, in SharedSequence.gather
      =>
    ScanReport("layers.0.mixer", "MyMixer", ranks=4, gathers=2, received_bytes=98304)

Beyond `MOST_GATHERED` ranks, exchanges of (rows, ...) from all ranks take the place of gathers.

Assumes: the graph is of one shape, so that sizes are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.graph.nodes import graphs_of
from cp_inductor.modules.along_sequence import GATHERS


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What one module exchanges to compute its own tokens of a recurrence.

    Attributes:
        path: of the module in the model.
        kind: its class.
        ranks: how many share the sequence.
        gathers: how many gathers or other exchanges its forward has. Its backward has as many, of
            the same bytes.
        received_bytes: by this rank in the forward, whatever the length of the sequence.
    """

    path: str
    kind: str
    ranks: int
    gathers: int
    received_bytes: int

    def __str__(self) -> str:
        """Return the report as text."""
        times = "exchange" if self.gathers == 1 else "exchanges"
        return (
            f"{self.path} ({self.kind})  computes its own tokens\n"
            f"  exchange   {self.gathers} {times} over {self.ranks} ranks, receives"
            f" {self.received_bytes / 1e6:.3f} MB, and as much in the backward"
        )


def find_scans(gm: fx.GraphModule) -> list[ScanReport]:
    """Return the recurrences that ranks share, in the order of the graph."""
    reports: dict[tuple[str, str], ScanReport] = {}
    for node, world_size, share in _exchanges(gm):
        arrives: Any = node.meta["example_value"]
        num_bytes = round(share * arrives.numel() * arrives.element_size())
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, cls = stack[-1] if stack else ("the model", "a function")
        site = path, getattr(cls, "__name__", str(cls))
        last = reports.get(site, ScanReport(*site, world_size, 0, 0))
        gathers, received = last.gathers + 1, last.received_bytes + num_bytes
        reports[site] = ScanReport(*site, world_size, gathers, received)
    return list(reports.values())


def _exchanges(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, int, float]]:
    """Yield each node that receives parts, how many ranks there are, and the share of others."""
    for node in (node for graph in graphs_of(gm) for node in graph.nodes):
        if GATHERS not in node.meta.get("custom", {}):
            continue
        if isinstance(node.meta.get("example_value"), DTensor):
            world_size = node.meta["example_value"].shape[0]
            yield node, world_size, 1 - 1 / world_size
        elif node.target is torch.ops._c10d_functional.all_to_all_single:
            parts: Any = node.args[1]
            is_from_all = len(set(parts)) == 1  # and not from the rank before alone
            yield node, len(parts), 1 - 1 / len(parts) if is_from_all else 1.0
