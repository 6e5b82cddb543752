"""What is known of an attention that was found, before it is rewritten."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import CPError
from cp_inductor.mask.reader.to_rule import Recognized
from cp_inductor.passes.recognize_mask import MaskOfLengths
from cp_inductor.region.flex_calls import FLEX
from cp_inductor.run.attention import Attention
from cp_inductor.torch_private.sizes import size_hint


@dataclass(frozen=True, slots=True)
class Site:
    """An attention over a sharded sequence.

    Attributes:
        name: for messages, with the source line.
        node: the call of SDPA, or of flex_attention.
        query, key, value: its inputs.
        dtype: in which it computes; under autocast its inputs may still be wider.
        axis: the mesh axis that shards the sequence.
        attention: what to compute, with the recipe of its plan, or by a plan of its batch.
        mask: the tensors that the mask reads.
        plan_options: the choices that hold for it.
        of_lengths: the mask, if its lengths are symbols that only a call gives numbers.
        why_kernel: why its kernel was chosen, for people.
    """

    name: str
    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    dtype: torch.dtype
    axis: SequenceAxis
    attention: Attention
    mask: Recognized
    plan_options: PlanOptions
    of_lengths: MaskOfLengths | None
    why_kernel: str

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
