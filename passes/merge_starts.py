"""Start a collective once where a graph starts it twice, so that the graphs of all ranks are alike.

    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]))
    b = all_gather(constant_pad_nd(x, [0, n - (s - n)]))
      =>
    a = all_gather(constant_pad_nd(x, [0, 2 * n - s]));  b = a

The shards of other ranks may need no padding. There nothing is computed of sizes, so AOTAutograd
finds the two gathers equal, and starts one.
"""

from __future__ import annotations

import torch
from torch import fx

from cp_inductor.graph.collectives import STARTS, WAIT, is_collective
from cp_inductor.passes.nodes import merge_equal

PAD = torch.ops.aten.constant_pad_nd.default


def merge_starts(graph: fx.Graph) -> None:
    """Merge equal collectives, what pads their inputs, and their waits; in place."""
    merge_equal(
        graph,
        lambda node: (
            node.target in (PAD, WAIT) or (is_collective(node) and node.target not in STARTS)
        ),
    )
