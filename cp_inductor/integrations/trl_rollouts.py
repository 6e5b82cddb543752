"""TRL's GRPOTrainer and RLOOTrainer over sequences that ranks share: each prompt is stored once.

    rows of a micro-batch, padded       p a1 .    p a2 a2    q b1 b1
      =>
    one row of prefix trees             p a1 p' a2 a2 q b1 b1       over all ranks
    log-probabilities of its tokens     back to the rows, (B, completion), whole on every rank

Both trainers (TRL 1.16) compute log-probabilities in one method, which is replaced: policy, old
policy and reference model all come through it. Rewards, advantages, clipping, the KL term and the
loss stay TRL's, and run on every rank, on the same numbers.

Ranks that share sequences must have the same completions, in the same order. TRL draws both from
generators that differ by process, so what it generates, and each micro-batch, is the first rank's.
Its generation runs on every rank, in eager code, over whole sequences; vLLM and `rollout_func` run
as ever.

Assumes: text alone, and a model that `accept_prefix_trees` takes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from trl.trainer import grpo_config, grpo_trainer, rloo_config, rloo_trainer

from cp_inductor.batches.trees import SPANS, pack_prefix_trees
from cp_inductor.dtensor.pad import pad_packed
from cp_inductor.errors import InvalidArgument
from cp_inductor.integrations.methods import NAME, Method, is_ours, replace_method
from cp_inductor.integrations.replicas import computing_whole
from cp_inductor.integrations.trainer import num_batches
from cp_inductor.integrations.transformers_trees import accept_prefix_trees

TRAINERS = (grpo_trainer.GRPOTrainer, rloo_trainer.RLOOTrainer)

# Settings whose numbers count every sample, which here are there once for each rank of a sequence;
# and the value of each that is computed.
REFUSED = {
    "scale_rewards": ("batch", "group"),
    "multi_objective_aggregation": ("normalize_then_sum", "sum_then_normalize"),
    "normalize_advantages": (True, False),
}


def register(add_fused_lm_head: Method) -> None:
    """Let both trainers know this library, once per process.

    Args:
        add_fused_lm_head: takes TRL's function of this name, and what that takes.
    """
    for config in (grpo_config.GRPOConfig, rloo_config.RLOOConfig):
        replace_method(config, "__post_init__", _post_init)
    for module, trainer in zip((grpo_trainer, rloo_trainer), TRAINERS, strict=True):
        replace_method(module, "add_fused_lm_head", add_fused_lm_head)
        replace_method(trainer, "__init__", _init)
        replace_method(trainer, "_generate", _generate, when=is_ours)
        replace_method(trainer, "_prepare_inputs", _prepare_inputs, when=is_ours)
        replace_method(
            trainer, "_get_per_token_logps_and_entropies", log_probs_of_trees, when=is_ours
        )


def _post_init(original: Method, config: Any) -> None:
    # The original refuses every cp_size, because inputs are made behind the place that shards them.
    axes = config.parallelism_config
    is_named = getattr(axes, "cp_backend", None) == NAME
    if is_named:
        config.parallelism_config = None
    original(config)
    if is_named:
        config.parallelism_config = axes


def _init(original: Method, trainer: Any, *args: Any, **kwargs: Any) -> None:
    original(trainer, *args, **kwargs)
    if not is_ours(trainer):
        return
    _check(trainer)
    settings, num = trainer.args, num_batches(trainer.accelerator)
    samples = settings.per_device_train_batch_size * settings.steps_per_generation * num
    if samples % trainer.num_generations:
        raise _refusal(
            trainer,
            f"a multiple of num_generations={trainer.num_generations} samples",
            f"{samples}, of per_device_train_batch_size and steps_per_generation",
            "make it a multiple: ranks that share sequences have the same samples",
        )
    settings.generation_batch_size = samples  # TRL's counts those of each process
    for model in (trainer.model, trainer.ref_model):
        if model is not None:
            accept_prefix_trees(trainer.accelerator.unwrap_model(model))


def _check(trainer: Any) -> None:
    for name, (refused, taken) in REFUSED.items():
        if getattr(trainer.args, name, taken) == refused:
            raise _refusal(trainer, f"{name}={taken!r}", f"{name}={refused!r}", "set it so")
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        raise _refusal(trainer, "top_entropy_quantile=1.0", "less", "set it so")
    if getattr(trainer, "aux_loss_enabled", False):
        remedy = "set router_aux_loss_coef=0: experts are balanced over the tokens of a batch"
        raise _refusal(trainer, "no loss that balances experts", "one", remedy)
    if hasattr(trainer.model, "peft_config"):
        raise _refusal(trainer, "a model without adapters", "a PEFT model", "train all weights")


def _refusal(trainer: Any, expected: str, got: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        site=type(trainer).__name__,
        expected=f"{expected}, with cp_backend={NAME!r}",
        got=got,
        remedy=remedy,
    )


def _axis(trainer: Any) -> DeviceMesh:
    mesh: DeviceMesh = trainer.accelerator.torch_device_mesh["cp"]
    return mesh


def _generate(original: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate on every rank, and take what the first rank of the sequence has."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    with computing_whole(model), torch.compiler.set_stance("force_eager"):
        generated = [original(trainer, *args, **kwargs)]
    axis = _axis(trainer)
    dist.broadcast_object_list(generated, group=axis.get_group(), group_src=0)
    return generated[0]


def _prepare_inputs(original: Method, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the micro-batch of the first rank: TRL shuffles, and rewards may be drawn."""
    inputs = original(trainer, *args, **kwargs)
    if not isinstance(inputs, dict):
        return inputs
    group = _axis(trainer).get_group()
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, Tensor):
            value = value.contiguous().clone()
            dist.broadcast(value, group=group, group_src=0)
            inputs[name] = value
    return inputs


def log_probs_of_trees(
    original: Method,
    trainer: Any,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Compute what TRL's method does, of rows whose prompts are stored once.

    Returns:
        Log-probabilities and entropies (B, logits_to_keep), 0 where the mask is.
    """
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise _refusal(trainer, "text alone", ", ".join(given), "leave images out")
    size = batch_size or len(input_ids)
    parts = [
        _of_rows(trainer, model, ids, mask, logits_to_keep)
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True)
    ]
    log_probs, entropies = (torch.cat(one) for one in zip(*parts, strict=True))
    return log_probs, entropies if compute_entropy else None, None


def _of_rows(
    trainer: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, num_kept: int
) -> tuple[Tensor, Tensor]:
    ids, mask = input_ids.cpu(), attention_mask.cpu().bool()
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(ids)):
        prompt = ids[row, :-num_kept][mask[row, :-num_kept]]
        rows_of.setdefault(tuple(prompt.tolist()), []).append(row)
    kept, is_kept = ids[:, -num_kept:], mask[:, -num_kept:]
    trees = [
        (list(prompt), [kept[row][is_kept[row]] for row in rows])
        for prompt, rows in rows_of.items()
    ]
    embedding = trainer.accelerator.unwrap_model(model).get_input_embeddings()
    packed = pad_packed(pack_prefix_trees(trees, vocab_size=embedding.num_embeddings))
    spans = packed.pop(SPANS)
    del packed["weights"]
    is_answer = spans[:, 1] > 0
    order = torch.tensor([row for rows in rows_of.values() for row in rows]).argsort()
    places = torch.cat([torch.arange(*span) for span in spans[is_answer][order, 2:].tolist()])
    labels = packed.pop("labels")
    following = F.pad(labels[:, 1:], (0, 1), value=-100)
    device = input_ids.device
    packed = {name: value.to(device) for name, value in packed.items()}
    with trainer.accelerator.autocast():
        outputs = model(**packed, shift_labels=following.to(device), fused_lm_head=True)
    is_kept, places = is_kept.to(device), places.to(device)

    def to_rows(of_next: Tensor | None) -> Tensor:
        if of_next is None:
            return torch.zeros(is_kept.shape, device=device)
        found = of_next[0, places - 1]
        return found.new_zeros(is_kept.shape).masked_scatter(is_kept, found)

    return to_rows(outputs.log_probs), to_rows(outputs.entropy)
