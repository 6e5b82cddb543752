"""Refuse losses that are averaged over what ranks hold each for itself.

    loss = cross_entropy(logits [Shard(0)], target)      loss: DTensor [Partial("avg")]

Such an average is the mean over all tokens only if every rank counts as many: ignored targets,
which padding and the last token of a sequence are, make it silently wrong. `cp_inductor.loss` has
DTensor compute the mean; whatever else has its place, or took it, is caught here. Changes nothing.

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

from torch import fx

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.loss import is_averaged
from cp_inductor.passes.find_attention import source_line

__all__ = ["check_loss"]

LOSSES = ("cross_entropy", "nll_loss")


def check_loss(gm: fx.GraphModule) -> None:
    """Check every loss of a Dynamo graph.

    Raises:
        UnsupportedPlacement: one is the average of the ranks' own means.
    """
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            is_loss = getattr(node.target, "__name__", "") in LOSSES
            if is_loss and is_averaged(node.meta.get("example_value")):
                raise UnsupportedPlacement(
                    site=f"{node.name} ({source_line(node)})",
                    expected="the mean loss over the tokens of all ranks",
                    got="DTensor's rule of nll_loss: the average of what ranks compute of their own"
                    " tokens, of which they may count unequally many",
                    remedy="leave torch.distributed.tensor.parallel.loss_parallel, which removes"
                    " rules that cp_inductor has registered, or use reduction='sum' and divide",
                )
