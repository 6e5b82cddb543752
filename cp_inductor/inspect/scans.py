"""Find what ranks exchange for recurrences, in a graph of Dynamo.

    whole = redistribute(shards)     # of a mixer, in SharedSequence.gather
      =>
    ScanReport("layers.0.mixer", "MyMixer", ranks=4, gathers=2, received_bytes=98304)

Assumes: the graph is of one shape, so that sizes are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.modules.along_sequence import GATHERS


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What one module exchanges to compute its own tokens of a recurrence.

    Attributes:
        path: of the module in the model.
        kind: its class.
        ranks: how many share the sequence.
        gathers: how many exchanges its forward has. Its backward has as many, of the same bytes.
        received_bytes: by this rank in the forward, whatever the length of the sequence.
    """

    path: str
    kind: str
    ranks: int
    gathers: int
    received_bytes: int

    def __str__(self) -> str:
        """Return the report as text."""
        times = "gather" if self.gathers == 1 else "gathers"
        return (
            f"{self.path} ({self.kind})  computes its own tokens\n"
            f"  exchange   {self.gathers} {times} over {self.ranks} ranks, receives"
            f" {self.received_bytes / 1e6:.3f} MB, and as much in the backward"
        )


def find_scans(gm: fx.GraphModule) -> list[ScanReport]:
    """Return the recurrences that ranks share, in the order of the graph."""
    found: dict[tuple[str, str], list[int]] = {}
    ranks: dict[tuple[str, str], int] = {}
    for node in _gathers(gm):
        whole: Any = node.meta["example_value"]
        here = whole.numel() * whole.element_size() // whole.shape[0]
        stack = list(node.meta.get("nn_module_stack", {}).values())
        path, cls = stack[-1] if stack else ("the model", "a function")
        site = path, getattr(cls, "__name__", str(cls))
        found.setdefault(site, []).append(here * (whole.shape[0] - 1))
        ranks[site] = whole.shape[0]
    return [
        ScanReport(*site, ranks[site], len(received), sum(received))
        for site, received in found.items()
    ]


def _gathers(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for inner in gm.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                is_marked = GATHERS in node.meta.get("custom", {})
                if is_marked and isinstance(node.meta.get("example_value"), DTensor):
                    yield node
