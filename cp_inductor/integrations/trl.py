"""TRL's SFTTrainer over sequences that ranks share.

    hidden (B, S, H) [Shard(1)] -> hidden[mask], weight.full_tensor() -> log-probabilities (B, S)
      =>
    hidden.to_local(), labels.to_local(), weight.to_local(grad_placements=[Partial()])
      -> TRL's own head, of this rank's tokens -> log-probabilities, gathered: (B, S), whole

SFTTrainer (TRL 1.16) gives a model a head that computes log-probabilities in chunks. It takes the
tokens that count out of a batch, which DTensor cannot do, and which needs no other rank's tokens.
So it runs on each rank's own. It returns numbers per token, which all ranks gather: what
SFTTrainer does with them, it does with those of the whole batch.

SFTTrainer refuses to pack where ranks share a sequence, because torch's context parallelism drops
masks. The compiler reads them, so here it may.

Assumes: `position_ids` say where documents begin. What TRL derives of them for kernels of variable
length (`cu_seq_lens_q`, `seq_idx`, ...) is left out of a batch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
import trl.trainer.sft_trainer as sft
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from trl.trainer.base_trainer import _BaseTrainer

from cp_inductor.dtensor.wrap import whole_tensor, wrap_parts
from cp_inductor.errors import InvalidArgument
from cp_inductor.integrations.methods import HEAD_IS_EAGER, NAME, Method, is_ours, replace_method
from cp_inductor.integrations.trainer import compute_loss

IGNORED = -100  # a label that does not count

# Their shapes and values differ from batch to batch, for each of which a model would be compiled.
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")

PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def register() -> None:
    """Let TRL's classes know this library, once per process."""
    replace_method(_BaseTrainer, "__init__", _base_init)
    replace_method(sft.SFTTrainer, "__init__", _init)
    replace_method(sft.SFTTrainer, "compute_loss", _compute_loss, when=is_ours)
    replace_method(sft, "add_fused_lm_head", _add_fused_lm_head)


def _base_init(original: Method, trainer: Any, *args: Any, **kwargs: Any) -> None:
    original(trainer, *args, **kwargs)
    if not is_ours(trainer):
        return
    if not isinstance(trainer, sft.SFTTrainer):
        raise InvalidArgument(
            site=type(trainer).__name__,
            expected=f"SFTTrainer, of TRL's trainers, with cp_backend={NAME!r}",
            got=type(trainer).__name__,
            remedy="train on one process, or with TRL's own parallelism",
        )
    # SFTTrainer.__init__ goes on, and asks for packing once more, to refuse it. By now the data set
    # is packed.
    asked = {name: getattr(trainer.args, name) for name in ("packing", "eval_packing")}
    trainer._cp_asked = asked
    trainer.args.packing = trainer.args.eval_packing = False


def _init(original: Method, trainer: Any, *args: Any, **kwargs: Any) -> None:
    try:
        original(trainer, *args, **kwargs)
    finally:
        for name, value in trainer.__dict__.pop("_cp_asked", {}).items():
            setattr(trainer.args, name, value)


def _compute_loss(
    original: Method, trainer: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    inputs = {name: value for name, value in inputs.items() if name not in LENGTHS}
    return compute_loss(original, trainer, _of_shifted_labels(model), inputs, *args, **kwargs)


def _of_shifted_labels(model: Callable[..., Any]) -> Callable[..., Any]:
    """Label each token with the next one's, while the batch is whole: shards do not overlap.

    What SFTTrainer passes without labels, to a loss of the user's own, stays as it is.
    """

    def call(*args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is not None:
            kwargs["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        return model(*args, **kwargs)

    return call


def _add_fused_lm_head(original: Method, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    whole = model.forward  # TRL's, for a whole sequence; the model's own without fused_lm_head

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("shift_labels")
        if not kwargs.get("fused_lm_head") or not isinstance(labels, DTensor):
            return whole(*args, **kwargs)
        local = {**kwargs, "shift_labels": labels.to_local()}
        outputs = whole.__func__(_Shard(self), *args, **local)  # type: ignore[attr-defined]
        outputs.loss = None  # it is that of this rank's tokens; SFTTrainer sums log_probs instead
        for name in PER_TOKEN:
            if name in outputs:  # what SFTTrainer asked for
                outputs[name] = _gather(outputs[name], labels)
        return outputs

    forward.__wrapped__ = type(model).forward  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)
    setattr(model, HEAD_IS_EAGER, True)


class _Shard:
    """What TRL's head asks a model for, with this rank's tokens in place of the whole sequence."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def base_model(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model below its head."""
        outputs = self.model.base_model(*args, **kwargs)  # type: ignore[operator]
        outputs.last_hidden_state = outputs.last_hidden_state.to_local()
        return outputs

    def get_output_embeddings(self) -> Any:
        """Return the head's weight and bias, whose gradients are of this rank's tokens."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[operator]
        return types.SimpleNamespace(weight=_local(head.weight), bias=_local(head.bias))


def _local(parameter: Tensor | None) -> Tensor | None:
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def _gather(local: Tensor, like: DTensor) -> Tensor:
    """Return (B, S) of all tokens, on every rank, from (B, s) of this rank's."""
    shape = (*like.shape, *local.shape[like.ndim :])
    return whole_tensor(wrap_parts(local, like.device_mesh, like.placements, shape))
