"""Let interpreted graphs copy where a view does not fit the strides that a kernel returned.

    grad = softplus_backward(...)             strides as the kernel has them
    flat = view(grad, [66, 4])                of strides as they were traced: fails
      =>
    flat = reshape(grad, [66, 4])             a view where possible, else a copy

Some of torch's kernels return other strides than their fake ones (`softplus_backward` of tensors
that differ in strides, read in torch 2.13). AOTAutograd has made `view` of every reshape that was
one when traced. Inductor generates these kernels itself, with the strides that were traced.

Assumes: a functional graph from AOTAutograd: nothing writes to a tensor that a view is made of, so
that a copy says the same.
"""

from __future__ import annotations

import torch
from torch import fx

VIEW, RESHAPE = torch.ops.aten.view.default, torch.ops.aten.reshape.default


def relax_views(gm: fx.GraphModule) -> None:
    """Replace views to a shape by reshapes, in place."""
    nodes = gm.graph.find_nodes(op="call_function", target=VIEW)
    for node in nodes:
        node.target = RESHAPE
    if nodes:
        gm.recompile()
