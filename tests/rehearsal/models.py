"""Models of transformers that are rehearsed: unmodified, one layer, tiny and random."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from transformers.utils import ModelOutput

from cp_inductor.integrations.sinks import flex_sinks_on_cpu
from tests.rehearsal.rank import Job
from tests.support.models import MODELS, has_flex, inputs_of, make, make_reference


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within this context, gpt_oss computes its sinks as on a GPU, and its mask is traced."""
    # transformers makes a BlockMask with an option that torch warns of.
    ignored = torch._dynamo.config.patch(ignore_logging_functions={warnings.warn})
    with flex_sinks_on_cpu(), ignored:
        yield


def own_loss(outputs: ModelOutput) -> Tensor:
    loss: Tensor = outputs["loss"]
    return loss


def job_of(name: str, dtype: torch.dtype, world_size: int) -> Job:
    """Return the rehearsal of a model: its logits, its own loss, the gradients of its weights."""
    # Of a hybrid, the recurrence.
    types = MODELS[name].get("layer_types")
    model = make(name, num_hidden_layers=1, **({"layer_types": types[:1]} if types else {}))
    model = model.to(dtype)
    reference = None
    if has_flex(name):
        reference = make_reference(name, num_hidden_layers=1).to(dtype)
        # Its experts multiply in groups, for which torch has no float64.
        reference.set_experts_implementation("eager")
    return Job(
        model=model,
        kwargs={**inputs_of(model), "use_cache": False},
        world_size=world_size,
        placement=Shard(1),
        loss=own_loss,
        within=as_on_a_gpu,
        reference=reference,
    )
