"""Models of transformers that are rehearsed: unmodified, one layer, tiny and random."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.utils import ModelOutput

from cp_inductor.inspect.rehearsal.rank import Job
from cp_inductor.integrations.sinks import flex_sinks_on_cpu
from tests.support.models import MODELS, has_flex, inputs_of, make, make_reference

MIXER = {
    **{"hidden_size": 8, "num_heads": 4, "head_dim": 4, "state_size": 4, "n_groups": 2},
    **{"chunk_size": 4, "expand": 2, "num_hidden_layers": 1},
}
NAMES = ("Llama", "Mistral", "Qwen3", "GptOss")


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


class Mixing(nn.Module):
    """A mixer of Mamba 2 alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixer = Mamba2Mixer(Mamba2Config(**MIXER), 0)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.mixer(tokens)
        return mixed


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
        placements=[Shard(1)],
        loss=own_loss,
        within=as_on_a_gpu,
        reference=reference,
    )
