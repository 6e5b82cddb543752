"""accelerate and Trainer with this library as their context parallelism, beside one process.

More than 90 s of CPU: Trainer runs on two ranks or four, with whole weights and under FSDP2, which
has settings of its own, and each run is compared with one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cp_inductor.errors import InvalidArgument, UnsupportedPlacement
from tests.support.processes import run_python
from tests.support.ranks import on_ranks, run_ranks
from tests.support.trainers import (
    CAUSAL,
    CHECKPOINTED,
    COMPILED,
    GRADIENT_TOLERANCE,
    LOSS_TOLERANCE,
    OFFLOADED,
    WEIGHT_TOLERANCE,
    Result,
    assert_close,
    check_same,
    evaluate,
    launched,
    train_on,
)

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.utils import (  # noqa: E402
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    TorchContextParallelConfig,
)

from cp_inductor.integrations.accelerate import register  # noqa: E402
from tests.support.models import make  # noqa: E402


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mistral", {"sizes": {}}),  # two layers
        ("Llama", {"average_tokens_across_devices": False, "max_grad_norm": 0.1}),
        ("Llama", {"gradient_checkpointing": True, "label_smoothing_factor": 0.1}),
        ("Llama", {"own_loss": True, "weight_decay": 0.1}),
    ],
    ids=["window", "averages", "checkpointed, smoothed", "own loss"],
)
def test_trainer_computes_what_one_process_does(
    name: str, settings: Mapping[str, Any], tmp_path: Path
) -> None:
    """Two steps of two batches each, at a length that is odd."""
    settings = {**COMPILED, "max_steps": 2, **settings}
    two = train_on(2, name, tmp_path / "two", settings)
    check_same(two, train_on(1, name, tmp_path / "one", settings))
    check_saved(tmp_path / "two" / "saved-2", two)


def check_saved(folder: Path, result: Result) -> None:
    """The model that was saved is that of the end."""
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in saved.named_parameters():
        assert torch.equal(weight, result.weights[name]), name


@pytest.mark.long
def test_evaluation_of_a_model_that_is_not_trained(tmp_path: Path) -> None:
    (one,) = run_ranks(1, evaluate, "Qwen3", str(tmp_path), COMPILED)
    for loss, logits in run_ranks(2, evaluate, "Qwen3", str(tmp_path), COMPILED):
        assert loss == pytest.approx(one[0], rel=LOSS_TOLERANCE)
        assert_close(logits, one[1], WEIGHT_TOLERANCE, "logits")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"fsdp": True, "dp_shard_size": 2}, marks=pytest.mark.long)],
    ids=["shared", "also others"],
)
def test_a_data_set_without_a_length(settings: Mapping[str, Any], tmp_path: Path) -> None:
    """Every sample counts once; four steps go through the data set and begin again."""
    batches = settings.get("dp_shard_size", 1)
    settings = {**settings, "stream": True, "max_steps": 4, "gradient_accumulation_steps": 1}
    settings["per_device_train_batch_size"] = 3 if batches == 1 else 1
    many = train_on(2 * batches, CAUSAL, tmp_path / "many", settings)
    check_same(many, train_on(1, CAUSAL, tmp_path / "one", settings))


@pytest.mark.long
def test_packed_batches_of_many_lengths(tmp_path: Path) -> None:
    """A graph for the first length, and one each for all that divide by two and all others."""
    name, settings = "Llama, flattened", {**COMPILED, "fsdp": True, "num_train_epochs": 2}
    settings |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    two = train_on(2, name, tmp_path / "two", settings)
    check_same(two, train_on(1, name, tmp_path / "one", settings))
    assert two.graphs == 3


def sharded(batches: int, **settings: Any) -> dict[str, Any]:
    """Return settings of FSDP2, for as many ranks with batches of their own."""
    return {
        "fsdp": True,
        "dp_shard_size": batches,
        "per_device_train_batch_size": 2 // batches,
        "max_steps": 2,
        **settings,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "batches", "settings"),
    [
        (CAUSAL, 2, 1, {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("Qwen3", 2, 1, {**COMPILED, **CHECKPOINTED}),
                (CAUSAL, 2, 1, OFFLOADED),
                ("Qwen3Moe, causal", 2, 1, CHECKPOINTED),  # and the loss that balances experts
                ("Llama", 4, 2, COMPILED),
                (CAUSAL, 2, 1, {**COMPILED, "torch_compile_backend": "cp_inductor"}),
                (CAUSAL, 4, 2, {"average_tokens_across_devices": False}),
            )
        ),
    ],
)
def test_trainer_shards_weights(
    name: str, ranks: int, batches: int, settings: Mapping[str, Any], tmp_path: Path
) -> None:
    """FSDP2: the same losses, norms, gradients and weights as one process with all batches."""
    settings = sharded(batches, **settings)
    many = train_on(ranks, name, tmp_path / "many", settings)
    check_same(many, train_on(1, name, tmp_path / "one", settings))
    check_saved(tmp_path / "many" / f"saved-{ranks}", many)


def sharded_as(kind: str) -> dict[str, Any]:
    return sharded(2, fsdp_config={"state_dict_type": kind})


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "settings", "steps"),
    [
        (CAUSAL, 2, {}, 2),
        (CAUSAL, 4, sharded_as("FULL_STATE_DICT"), 1),
        (CAUSAL, 4, sharded_as("SHARDED_STATE_DICT"), 1),
    ],
    ids=["whole weights", "FULL_STATE_DICT", "SHARDED_STATE_DICT"],
)
def test_trainer_saves_and_resumes(
    name: str, ranks: int, settings: Mapping[str, Any], steps: int, tmp_path: Path
) -> None:
    """A checkpoint goes on, on as many ranks; if weights are whole, on one as well."""
    one = train_on(1, name, tmp_path / "one", settings)
    saving = {**settings, "save_strategy": "steps", "save_steps": steps}
    check_same(train_on(ranks, name, tmp_path / "many", saving), one)
    for resuming in (ranks, 1) if ranks == 2 else (ranks,):
        again = train_on(resuming, name, tmp_path / "many", {**settings, "resume": steps})
        assert len(again.gradients) == 1
        for key, weight in one.weights.items():
            assert_close(again.weights[key], weight, WEIGHT_TOLERANCE, key)


# In batches of one where batches are shared: Trainer completes a smaller last batch by samples of
# the first, which count in the mean of that batch, with or without this library.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("Llama", 2, {**COMPILED, "max_steps": 2}),
        (CAUSAL, 4, {**sharded(2), "per_device_eval_batch_size": 1}),
    ],
    ids=["whole weights", "FSDP2"],
)
def test_evaluation_while_training(
    name: str, ranks: int, settings: Mapping[str, Any], tmp_path: Path
) -> None:
    """The last batch has one sample, each counts once, and every rank has the logits of all."""
    settings = {**settings, "eval_strategy": "steps", "eval_steps": 1, "metrics": True}
    many = train_on(ranks, name, tmp_path / "many", settings)
    check_same(many, train_on(1, name, tmp_path / "one", settings))
    assert sum("eval_loss" in entry for entry in many.logs) == 2
    assert many.logits is not None


IDS = torch.arange(2 * 33).reshape(2, 33) % 61


def make_accelerator(fsdp: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """Return an accelerator whose ranks share each sequence, perhaps under FSDP."""
    plugin = None
    if dist.get_world_size() > 1:
        register()
        axes = accelerate.ParallelismConfig(cp_size=2, cp_backend="cp_inductor")
        more = {"parallelism_config": axes, **more}
        plugin = fsdp and FullyShardedDataParallelPlugin(**fsdp)
    return accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, **more)


def take_step(accelerator: Any, model: Any, optimizer: Any) -> torch.Tensor:
    with accelerator.maybe_context_parallel(buffers=[IDS], buffer_seq_dims=[1]):
        loss = model(IDS, labels=IDS, use_cache=False).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def hold_shards(precision: str) -> tuple[float, float, set[torch.dtype]]:
    """Train two steps; return a rank's share of the weights, the loss, and dtypes of weights."""
    with launched():
        accelerator = make_accelerator({"fsdp_version": 2}, mixed_precision=precision)
        model = make("Llama")
        whole = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        loss = [take_step(accelerator, model, optimizer) for _ in range(2)][-1]
        held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        states = [state for kept in optimizer.state.values() for state in kept.values()]
        sizes = sum(s.to_local().numel() for s in states if isinstance(s, DTensor))
        if dist.get_world_size() > 1:
            assert sizes == 2 * sum(p.numel() for p in held)
        return sum(p.numel() for p in held) / whole, loss.item(), {p.dtype for p in held}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # Weights and activations in bfloat16, 2^-9 each.
    [("no", LOSS_TOLERANCE), pytest.param("bf16", 5e-3, marks=pytest.mark.long)],
)
def test_ranks_hold_their_part_of_the_weights(precision: str, tolerance: float) -> None:
    ((_, loss, _),) = run_ranks(1, hold_shards, "no")
    for share, found, dtypes in run_ranks(2, hold_shards, precision):
        assert share < 0.55
        assert found == pytest.approx(loss, rel=tolerance)
        assert dtypes == {torch.float32}


@pytest.mark.slow
@on_ranks(2)
def test_what_is_recomputed_drops_what_was_dropped() -> None:
    """accelerate's checkpoints draw random numbers anew, and so have gradients of another loss."""
    results = []
    for is_checkpointed in (True, False):
        with launched():
            plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
            accelerator = make_accelerator({**plugin, "activation_checkpointing": is_checkpointed})
            sizes = {"resid_pdrop": 0.5, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
            model = make("GPT2LMHeadModel", **sizes).train()
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(2):
                model, _ = accelerator.prepare(model, optimizer)
            transformers.set_seed(3)
            loss = model(IDS, labels=IDS, use_cache=False).loss
            accelerator.backward(loss)
        layers = sum("Checkpoint" in type(module).__name__ for module in model.modules())
        assert layers == (2 if is_checkpointed else 0)
        results.append((loss, [p.grad.full_tensor() for p in model.parameters()]))
    (loss, found), (expected, right) = results
    assert loss == expected
    for gradient, one in zip(found, right, strict=True):
        assert_close(gradient, one, GRADIENT_TOLERANCE, "gradient")


def prepare_apart(order: str) -> float:
    """Train a step with accelerate alone; return the loss after it."""
    with launched():
        if order == "as on GPUs" and dist.get_world_size() > 1:
            # On several GPUs, accelerate demands FSDP2 as soon as it sees a cp_size.
            accelerate.PartialState(cpu=True)
            multi_gpu = accelerate.utils.DistributedType.MULTI_GPU
            accelerate.PartialState._shared_state["distributed_type"] = multi_gpu
        accelerator = make_accelerator()
        model = make("Llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if order != "optimizer first":
            prepared, optimizer = accelerator.prepare(model, optimizer)
        else:
            optimizer = accelerator.prepare(optimizer)
            prepared = accelerator.prepare(model)
        losses = [
            accelerator.gather_for_metrics(take_step(accelerator, prepared, optimizer)[None])
            for _ in range(2)
        ]
        assert losses[1].shape == (1,)
        assert losses[1] < losses[0]
        assert {type(value) for value in model.state_dict().values()} == {torch.Tensor}
        model.load_state_dict({name: value * 0 for name, value in model.state_dict().items()})
        assert all(p.detach().abs().max().item() == 0 for p in model.parameters())
        return losses[1].item()


@pytest.mark.slow
def test_a_loop_of_accelerate() -> None:
    """Without a compile: causal attention needs none."""
    (alone,) = run_ranks(1, prepare_apart, "together")
    for order in ("together", "as on GPUs", "optimizer first"):
        first, second = run_ranks(2, prepare_apart, order)
        assert first == second == pytest.approx(alone, rel=2e-6), order


NAMED = """
import cp_inductor
import accelerate.accelerator
from accelerate import Accelerator, ParallelismConfig
methods = Accelerator.prepare_model, Accelerator.backward
for wrong in ({"cp_size": 2, "cp_backend": "nonsense"}, {"tp_size": 0}):
    try:
        ParallelismConfig(**wrong)
    except ValueError:
        pass
    else:
        raise AssertionError(wrong)
assert ParallelismConfig().cp_backend == "torch"
assert (Accelerator.prepare_model, Accelerator.backward) == methods
config = ParallelismConfig(cp_size=2, cp_backend="cp_inductor")
assert (config.cp_size, config.cp_backend) == (2, "cp_inductor")
assert (Accelerator.prepare_model, Accelerator.backward) != methods
from accelerate.utils import TorchDynamoPlugin
plugin = TorchDynamoPlugin(backend="cp_inductor")
assert plugin.fullgraph is True and plugin.dynamic is False
assert TorchDynamoPlugin(backend="inductor").fullgraph is False
import os
os.environ["PARALLELISM_CONFIG_CP_BACKEND"] = "cp_inductor"
assert ParallelismConfig(cp_size=2).cp_backend == "cp_inductor"
"""


@pytest.mark.slow
def test_a_backend_that_is_named_is_registered() -> None:
    """By the import of the package; until then, nothing else is replaced."""
    run_python("-W", "ignore", "-c", NAMED)


CHECKPOINTING = {"fsdp_version": 2, "activation_checkpointing": True}
BY_LAYERS = {**CHECKPOINTING, "auto_wrap_policy": "transformer_based_wrap"}


OFFLOADING = {**CHECKPOINTING, "activation_checkpointing_offload": True}
# Axes, FSDP's plugin, and a part of what is said.
REFUSED: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
    ({"cp_handler": TorchContextParallelConfig()}, None, "got a TorchContextParallelConfig; leav"),
    ({"cp_size": 2, "tp_size": 2}, None, "cp_size, or cp_size and dp_shard_size under FSDP2, with"),
    ({}, {"fsdp_version": 1}, "got FSDP1; use these axes"),
    ({}, OFFLOADING, "no activation_checkpointing_offload with cp_backend='cp_inductor', got act"),
    ({}, CHECKPOINTING, "got auto_wrap_policy=None, by which no module of Sequential is one; set"),
    ({}, BY_LAYERS, "by which no module of Sequential is one; set auto_wrap_policy='transformer_"),
    ({}, None, "got dispatch_batches=True; leave it out: every rank reads the batches"),
    ({"cp_size": 2}, None, "expected cp_size=3, the number of processes, got cp_size=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "fsdp", "said"), REFUSED)
@on_ranks(3)
def test_refusals(axes: dict[str, Any], fsdp: dict[str, Any] | None, said: str) -> None:
    register()
    refused = pytest.raises((InvalidArgument, UnsupportedPlacement), match=re.escape(said))
    with launched(), refused:
        config = accelerate.ParallelismConfig(**{"cp_size": 3, "cp_backend": "cp_inductor", **axes})
        loading = DataLoaderConfiguration(dispatch_batches=True)
        how = {"parallelism_config": config, "dataloader_config": loading}
        accelerator = make_accelerator(fsdp, **how)
        if fsdp:
            model = torch.nn.Sequential(torch.nn.Linear(3, 3))
            accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        accelerator.prepare(torch.utils.data.DataLoader([torch.ones(3)]))
