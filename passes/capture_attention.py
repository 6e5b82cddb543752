"""Replace the attentions that were found by the op that stands for a whole plan.

    out = scaled_dot_product_attention(q, k, v, is_causal=True)
      =>
    q_local, k_local, v_local = q.to_local(), k.to_local(), v.to_local()
    out_local, lse = cp_inductor::attention(q_local, k_local, v_local, recipe, None, kernel, group)
    out = from_local_like(out_local, q)

Plain tensors, under a mesh the user named, are local already and need no wrapping. Where autocast
would have cast the inputs of SDPA, the casts are written out.

Assumes: a graph from Dynamo, before AOTAutograd; sites of this very graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from cp_inductor.passes.find_attention import Site
from cp_inductor.plan import backward_plan, forward_plan
from cp_inductor.sharding import from_local_like
from cp_inductor.torch_private import fake_mode_of

__all__ = ["bytes_sent", "capture_attention"]


def capture_attention(gm: fx.GraphModule, sites: Sequence[Site]) -> None:
    """Rewrite every site in place."""
    for site in sites:
        _capture(site)
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            module.graph.lint()
            module.recompile()


def _capture(site: Site) -> None:
    graph = site.node.graph
    with graph.inserting_before(site.node):
        local = [_to_local(site, node) for node in (site.query, site.key, site.value)]
        arguments = site.attention.arguments
        result = _call(site, torch.ops.cp_inductor.attention.default, (*local, [], *arguments))
        out = _call(site, getitem, (result, 0))
        if site.is_distributed:
            out = _call(site, from_local_like, (out, site.query))
    site.node.replace_all_uses_with(out)
    graph.erase_node(site.node)


def _to_local(site: Site, node: fx.Node) -> fx.Node:
    if isinstance(node.meta["example_value"], DTensor):
        node = _call(site, "to_local", (node,))
    if node.meta["example_value"].dtype != site.dtype:
        node = _call(site, "to", (node, site.dtype))
    return node


def _call(site: Site, target: str | Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """Insert a call of a function, or of a method by its name, with its value on fakes."""
    values: Any = fx.map_arg(args, lambda arg: arg.meta["example_value"])
    with torch.no_grad(), fake_mode_of(_local(site.query)):
        if isinstance(target, str):
            node = site.node.graph.call_method(target, args)
            value = getattr(values[0], target)(*values[1:])
        else:
            node = site.node.graph.call_function(target, args)
            value = target(*values)
    node.meta["example_value"] = value
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if key in site.node.meta:
            node.meta[key] = site.node.meta[key]
    return node


def _local(node: fx.Node) -> Tensor:
    tensor: Tensor = node.meta["example_value"]
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_sent(site: Site) -> int:
    """Return the bytes that this rank sends per run of a site, forward and, with grad, backward.

    Lengths that are dynamic count as they are in the call being compiled.
    """
    recipe, rank = site.attention.recipe, site.axis.rank
    plans = [forward_plan(recipe)] + [backward_plan(recipe)] * torch.is_grad_enabled()
    return site.batch * sum(plan.bytes_sent(rank) for plan in plans)
