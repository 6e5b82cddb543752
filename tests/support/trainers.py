"""Stock Trainer runs of tiny models, on one process or with the sequence sharded over ranks.

run_ranks(1, train, "Llama", folder, {})   the same numbers as   run_ranks(2, train, ...)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.support.combinations import plain_name, whole
from tests.support.models import VOCABULARY, make
from tests.support.ranks import run_ranks
from tests.support.reference import assert_within

LENGTH = 33
DOCUMENTS = 9  # of which the last batch has one

# What a batch of each model has besides tokens.
MODELS = {"Llama": "padding", "Mistral": "", "Qwen3": "packed", "Qwen3Moe": "packed"}
CAUSAL = "Llama, causal"  # whose attention needs no compile


assert_close = partial(assert_within, least=1e-3)
# float32, relative to the largest of a tensor.
LOSS_TOLERANCE = 2e-6
GRADIENT_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 1e-4

# A second layer is compiled as the first one is.
COMPILED = {
    "torch_compile": True,
    "torch_compile_backend": "cp_aot_eager",
    "sizes": {"num_hidden_layers": 1},
}
CHECKPOINTED = {"fsdp_config": {"activation_checkpointing": True}}
OFFLOADED = {"fsdp_config": {"cpu_offload": True}}


@dataclass(frozen=True)
class Result:
    """What a run logged, the gradients of each step, the weights at its end, and its graphs."""

    logs: list[dict[str, float]]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    logits: Tensor | None = None
    graphs: int = 0


def documents(kind: str) -> list[dict[str, Tensor]]:
    """Return the data set: tokens, labels, and positions or padding.

    Those of "flattened" all have other lengths, and no positions: a collator packs them.
    """
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(DOCUMENTS):
        length = LENGTH - (3 * index if kind == "flattened" else 0)
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        row = {"input_ids": ids, "labels": ids.clone()}
        if kind == "packed":
            first = 11 + index
            row["position_ids"] = torch.cat([torch.arange(first), torch.arange(LENGTH - first)])
        if kind == "padding":
            mask = torch.ones_like(ids)
            mask[LENGTH - index :] = 0
            row["attention_mask"] = mask
            row["labels"] = ids.masked_fill(mask == 0, -100)
        rows.append(row)
    return rows


def check_same(actual: Result, expected: Result, *, exactly: bool = False) -> None:
    assert len(actual.logs) == len(expected.logs)
    for one, other in zip(actual.logs, expected.logs, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"total_flos"}:  # Trainer adds up those of all ranks
            assert one[name] == pytest.approx(other[name], rel=0 if exactly else 1e-5), name
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=LOSS_TOLERANCE)
    assert len(actual.gradients) == len(expected.gradients) > 0
    for step, (found, right) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert found.keys() == right.keys()
        for name in found:
            what = f"gradient {name} of step {step}"
            assert_close(found[name], right[name], GRADIENT_TOLERANCE, what)
    for name, weight in expected.weights.items():
        assert_close(actual.weights[name], weight, WEIGHT_TOLERANCE, name)
    assert (actual.logits is None) == (expected.logits is None)
    if actual.logits is not None and expected.logits is not None:
        assert len(actual.logits) == DOCUMENTS
        assert_close(actual.logits, expected.logits, WEIGHT_TOLERANCE, "logits")


@contextmanager
def launched() -> Iterator[None]:
    """Set what torchrun sets, and forget afterwards what accelerate keeps for the process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, size = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    before = dict(os.environ)
    if size > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
        os.environ.clear()
        os.environ.update(before)


# Arguments of Trainer that all runs have; adam_epsilon of 1e-8 makes large steps of rounding in
# gradients near zero.
ARGUMENTS = {
    "use_cpu": True,
    "ddp_backend": "gloo",
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-3,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def with_axes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the axes of the ranks there are, or those of one process."""
    from accelerate import ParallelismConfig

    from cp_inductor.integrations.accelerate import register

    ranks = dist.get_world_size()
    if ranks == 1:
        return alone(settings)
    register()
    batches = settings.pop("dp_shard_size", 1)
    axes = ParallelismConfig(
        cp_size=ranks // batches, dp_shard_size=batches, cp_backend="cp_inductor"
    )
    return {**settings, "parallelism_config": axes}


def train_on(ranks: int, *args: Any, by: Callable[..., Result] | None = None) -> Result:
    """Call `train`, or another, on ranks, of which all get the same."""
    results = run_ranks(ranks, by or train, *args)
    for other in results[1:]:
        check_same(results[0], other, exactly=True)
    return results[0]


@launched()
def train(name: str, folder: str, settings: Mapping[str, Any]) -> Result:
    """Train a model with Trainer as it is documented.

    Args:
        name: of MODELS.
        folder: of checkpoints, the same on all ranks.
        settings: fields of TrainingArguments; "resume" is a step to resume from, "metrics" whether
            evaluation returns logits, "own_loss" whether a `compute_loss_func` is given, "sizes"
            are the model's.
    """
    own = dict(settings)
    resume = own.pop("resume", None)
    trainer, kept = _trainer(name, folder, own)
    result = _run(trainer, folder, resume)
    return replace(result, logits=kept[-1]) if kept else result


def squares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss of our own: logits of labels should be 1, and no token is shifted."""
    found = outputs.logits.gather(2, labels.clamp(min=0)[..., None])[..., 0]
    total = ((found - 1).square() * (labels >= 0)).sum()
    return total / (labels.numel() if num_items_in_batch is None else num_items_in_batch)


@launched()
def evaluate(name: str, folder: str, settings: Mapping[str, Any]) -> tuple[float, Tensor]:
    """Evaluate a model that is not trained; return the loss and the logits of `predict`."""
    trainer, _ = _trainer(name, folder, dict(settings))
    loss = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset)
    assert predicted.metrics["test_loss"] == loss
    return loss, torch.tensor(predicted.predictions)


def _trainer(name: str, folder: str, settings: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Return a trainer, and the list of logits that its evaluations will fill."""
    import transformers

    name, _, kind = name.partition(", ")
    kind = {"": MODELS[name], "causal": ""}.get(kind, kind)
    transformers.set_seed(0)
    routed = {"output_router_logits": True} if name == "Qwen3Moe" else {}
    model = make(name, **routed, **settings.pop("sizes", {}))
    settings = with_axes(settings)
    metrics, own_loss = settings.pop("metrics", False), settings.pop("own_loss", False)
    stream = settings.pop("stream", False)
    own = {"per_device_train_batch_size": 2, "num_train_epochs": 1}
    arguments = transformers.TrainingArguments(str(folder), **{**ARGUMENTS, **own, **settings})
    kept: list[Tensor] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        kept.append(torch.tensor(prediction.predictions))
        assert len(prediction.label_ids) == DOCUMENTS
        return {}

    rows = documents(kind)
    flatten = transformers.DataCollatorWithFlattening()
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=Stream(rows) if stream else rows,
        eval_dataset=rows,
        data_collator=flatten if kind == "flattened" else None,
        compute_metrics=compute_metrics if metrics else None,
        compute_loss_func=squares if own_loss else None,
    )
    return trainer, kept


class Stream(IterableDataset[dict[str, Tensor]]):
    """A data set without a length, of which accelerate dispatches batches unless told otherwise."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


def alone(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one process that has the batches of all ranks."""
    names = ("torch_compile", "fsdp", "dp_shard_size")
    kept = {name: value for name, value in settings.items() if not name.startswith(names)}
    batches = settings.get("dp_shard_size", 1)
    if batches > 1:
        kept["per_device_train_batch_size"] = batches * settings["per_device_train_batch_size"]
    return kept


@launched()
def train_sft(folder: str, given: Mapping[str, Any]) -> Result:
    """Train a Qwen3 with TRL's SFTTrainer as it is documented; arguments as of train."""
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    transformers.set_seed(0)
    settings = dict(given)
    model = make("Qwen3", **settings.pop("sizes", {}))
    settings = with_axes(settings)
    own_loss = settings.pop("own_loss", False)
    adapters = None
    if settings.pop("adapters", False):
        import peft

        linear = ["q_proj", "v_proj"]
        adapters = peft.LoraConfig(r=4, target_modules=linear, init_lora_weights="gaussian")
    arguments = {
        **ARGUMENTS,
        "bf16": False,
        "packing": True,
        "max_length": LENGTH,
        "pad_to_multiple_of": LENGTH,
        "per_device_train_batch_size": 1,
        "max_steps": 2,
        **settings,
    }
    rows = datasets.Dataset.from_list(texts())
    trainer = SFTTrainer(
        model,
        SFTConfig(str(folder), **arguments),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=letters(),
        compute_loss_func=squares if own_loss else None,
        peft_config=adapters,
    )
    assert trainer.args.packing is arguments["packing"]
    result = _run(trainer, folder)
    assert result.graphs or dist.get_world_size() == 1
    return result


def texts() -> list[dict[str, list[int]]]:
    """Return documents of 4 to 24 tokens, of which the first two tokens do not count."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in torch.randint(4, 25, (24,), generator=generator).tolist():
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return rows


def letters() -> Any:
    """Return a tokenizer of as many words as the models know."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(3, VOCABULARY))]
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>")
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _run(trainer: Any, folder: str, resume: int | None = None) -> Result:
    """Train and save."""
    import transformers

    gradients: list[dict[str, Tensor]] = []

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            found = kwargs["model"].named_parameters()
            gradients.append(
                {plain_name(name): whole(p.grad) for name, p in found if p.grad is not None}
            )

    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{resume}" if resume else None)
    trainer.save_model(f"{folder}/saved-{dist.get_world_size()}")
    timed = ("runtime", "per_second")
    logs = [
        {k: v for k, v in entry.items() if not any(word in k for word in timed)}
        for entry in trainer.state.log_history
    ]
    weights = {plain_name(n): whole(p.detach()) for n, p in trainer.model.named_parameters()}
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return Result(logs, gradients, weights, graphs=graphs)
