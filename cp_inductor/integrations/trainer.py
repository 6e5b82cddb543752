"""Trainer of transformers (5.23) over sequences that ranks share: batches, counts and losses.

Batches and losses are whole on every rank. Trainer multiplies and divides by numbers of ranks,
because it takes each rank's loss for one of its own tokens. What is replaced here undoes that.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from cp_inductor.integrations.methods import Method, attributes_of, is_ours, replace_method
from cp_inductor.integrations.outputs import gather_outputs


def register() -> None:
    """Let Trainer know this library, once per process."""
    from transformers import Trainer

    for name, new in (
        ("_wrap_model", _wrap_model),
        ("_prepare_context_parallel_inputs", _prepare_inputs),
        ("_get_num_items_in_batch", _count_items),
        ("compute_loss", compute_loss),
    ):
        replace_method(Trainer, name, new, when=is_ours)


def num_batches(accelerator: Any) -> int:
    """Return how many ranks have batches of their own."""
    size: int = accelerator.parallelism_config.dp_shard_size
    return size


def compute_loss(original: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute the loss of the whole batch: every rank of a sequence has it.

    The original multiplies by the number of ranks, for gradients that are averaged over them.
    """
    averaging = attributes_of(trainer.args, average_tokens_across_devices=False)
    with averaging, attributes_of(trainer, **_losses_of_whole_outputs(trainer)):
        result = original(trainer, *args, **kwargs)
    # Ranks with other batches do average.
    is_of_all = trainer.args.average_tokens_across_devices and (
        trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    )
    count = kwargs.get("num_items_in_batch", args[3] if len(args) > 3 else None)
    num = num_batches(trainer.accelerator)
    if num == 1 or count is None or not is_of_all:
        return result
    return (result[0] * num, *result[1:]) if isinstance(result, tuple) else result * num


def _prepare_inputs(original: Method, trainer: Any, model: nn.Module, inputs: Any) -> Any:
    # The original refuses attentions and masks. The compiler reads them, so here all are taken.
    return nullcontext, inputs


def _wrap_model(
    original: Method, trainer: Any, model: nn.Module, training: bool = True, **kwargs: Any
) -> Any:
    if not training and model is trainer.model:
        # The original evaluates the model that it has not wrapped, which takes no whole batches.
        return trainer.model_wrapped
    return original(trainer, model, training, **kwargs)


def _count_items(original: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    # The original sums over the ranks and divides by cp_size: each label counts once.
    is_alone = num_batches(trainer.accelerator) == 1
    is_of_all = trainer.args.average_tokens_across_devices or is_alone
    with attributes_of(trainer.args, average_tokens_across_devices=is_of_all):
        count = original(trainer, *args, **kwargs)
    return count if is_of_all or count is None else count * trainer.get_cp_size()


def _losses_of_whole_outputs(trainer: Any) -> dict[str, Any]:
    """Return label smoothing and `compute_loss_func` of whole logits, as their labels are whole."""
    losses = {}
    if trainer.label_smoother is not None:
        smoother = _of_whole_outputs(trainer.label_smoother, **_shift_of(trainer))
        losses["label_smoother"] = smoother
    if trainer.compute_loss_func is not None:
        losses["compute_loss_func"] = _of_whole_outputs(trainer.compute_loss_func)
    return losses


def _of_whole_outputs(function: Any, **more: Any) -> Any:
    def call(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return function(gather_outputs(outputs), *args, **{**kwargs, **more})

    return call


def _shift_of(trainer: Any) -> dict[str, bool]:
    """Return whether labels are the next tokens: Trainer asks the class, and forgets the compile.

    transformers 5.23 compares names, and a compiled model's is OptimizedModule: it would smooth the
    labels of the tokens themselves.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    bare = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    is_causal = type(bare).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {"shift_labels": True} if is_causal else {}
