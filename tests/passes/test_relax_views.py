"""Views in interpreted graphs, of tensors whose strides are not those that were traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from cp_inductor.passes.pin_order import relax_views


def flattened_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.softplus_backward(grad, x, 1, 20).reshape(-1, 4)


def graph_and_inputs() -> tuple[fx.GraphModule, tuple[Tensor, Tensor]]:
    """Return a graph whose view does not fit what the kernel of the CPU returns."""
    inputs = torch.randn(2, 4, 33).transpose(1, 2), torch.randn(2, 33, 4)
    return make_fx(flattened_gradient, tracing_mode="fake")(*inputs), inputs


def test_a_view_that_does_not_fit_is_copied() -> None:
    gm, inputs = graph_and_inputs()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        gm(*inputs)  # when it does not, the pass can go
    relax_views(gm)
    assert torch.equal(gm(*inputs), flattened_gradient(*inputs))
    gm.graph.lint()


def test_a_second_run_and_a_graph_without_views_change_nothing() -> None:
    gm, _ = graph_and_inputs()
    relax_views(gm)
    code = gm.code
    relax_views(gm)
    assert gm.code == code
    other = make_fx(lambda x: x + 1)(torch.ones(2))
    code = other.code
    relax_views(other)
    assert other.code == code
