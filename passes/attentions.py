"""Attention in a Dynamo graph: which functions compute it, and what is known of a call of them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import CPError
from cp_inductor.graph.nodes import nodes_of
from cp_inductor.mask.reader.lengths import MaskOfLengths
from cp_inductor.mask.reader.read import Recognized
from cp_inductor.region.flex_calls import constant
from cp_inductor.region.marks import FLEX, LEFT_ALONE, is_marked
from cp_inductor.region.modes import OPAQUE_ATTENTION
from cp_inductor.run.attention import Attention
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.first_dtensor import FORWARD_OPS
from cp_inductor.torch_private.sizes import size_hint

# As Dynamo captures the call, and as `inline_multi_head` leaves it.
SDPA_OP = torch.ops.aten.scaled_dot_product_attention.default
SDPA = frozenset((torch._C._nn.scaled_dot_product_attention, SDPA_OP.overloadpacket, SDPA_OP))
# What becomes a site.
CAPTURED = SDPA | {FLEX}

# What SDPA comes down to, called by name. DTensor's handlers compute it, plain shards have none.
KERNELS_OF_SDPA = frozenset(
    called
    for op in (*FORWARD_OPS, torch.ops.aten._scaled_dot_product_attention_math.default)
    for called in (op, op.overloadpacket)
)

# All of them, and what `inline_multi_head` takes apart.
ATTENTIONS = CAPTURED | OPAQUE_ATTENTION | KERNELS_OF_SDPA | {F.multi_head_attention_forward}


def has_masks(gm: fx.GraphModule) -> bool:
    """Whether any attention of a Dynamo graph has a mask or dropout, or is flex_attention."""
    calls = (bind_sdpa(node, node.name) for node in nodes_of(gm) if node.target in SDPA)
    is_flex = any(node.target is FLEX for node in nodes_of(gm))
    return is_flex or any(call["attn_mask"] is not None or call["dropout_p"] for call in calls)


def calls_to(gm: fx.GraphModule, functions: Container[Any]) -> list[fx.Node]:
    """Return the calls of some functions, but for those that a region leaves alone."""
    calls = (node for node in nodes_of(gm) if node.op == "call_function")
    return [n for n in calls if n.target in functions and not is_marked(n, LEFT_ALONE)]


def bind_sdpa(node: fx.Node, site: str) -> dict[str, Any]:
    """Return the arguments of an SDPA call by name; those that shape the plan must be constants."""
    # The builtin has no signature; the aten op that it dispatches to has a schema.
    bound = bind_arguments(SDPA_OP, node.args, node.kwargs)
    for name in ("dropout_p", "is_causal", "scale", "enable_gqa"):
        bound[name] = constant(bound[name], name, site)
    return bound


@dataclass(frozen=True, slots=True)
class Site:
    """An attention over a sharded sequence."""

    name: str  # for messages, with the source line
    node: fx.Node  # the call of SDPA, or of flex_attention
    query: fx.Node
    key: fx.Node
    value: fx.Node
    dtype: torch.dtype  # in which it computes; under autocast its inputs may still be wider
    axis: SequenceAxis  # that shards the sequence
    attention: Attention  # what to compute, with the recipe of its plan, or by a plan of its batch
    mask: Recognized  # the tensors that the mask reads
    plan_options: PlanOptions  # the choices that hold for it
    of_lengths: MaskOfLengths | None  # the mask, if only a call gives its lengths numbers
    why_kernel: str  # why its kernel was chosen, for people

    @property
    def is_distributed(self) -> bool:
        """Whether the graph holds DTensors here, rather than this rank's shards."""
        return isinstance(self.query.meta["example_value"], DTensor)

    @property
    def is_flex(self) -> bool:
        """Whether it is flex_attention, which returns more than its output."""
        return self.node.target is FLEX

    @property
    def batch(self) -> int:
        """The number of batch entries on this rank, in the call being compiled."""
        return size_hint(held_by_rank(self.query.meta["example_value"]).shape[0])


# What becomes of an attention: it is rewritten, refused, or not over a sharded sequence.
Verdict = Site | CPError | None
