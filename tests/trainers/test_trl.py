"""TRL's SFTTrainer with this library as its context parallelism, beside one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cp_inductor.errors import InvalidArgument
from tests.support.examples import run_example
from tests.support.ranks import on_ranks
from tests.support.trainers import (
    COMPILED,
    check_same,
    launched,
    letters,
    train_on,
    train_sft,
)

pytest.importorskip("trl", reason="trl is not installed")

CHECKPOINTED_AND_OFFLOADED = {"activation_checkpointing": True, "cpu_offload": True}
PADDED = {"packing": False, "per_device_train_batch_size": 3, "pad_to_multiple_of": 25}


def check_ranks(folder: Path, settings: Mapping[str, Any], ranks: int = 2) -> None:
    """Losses, token accuracies, entropies, gradients and weights are those of one process."""
    shared = train_on(ranks, folder / "shared", settings, by=train_sft)
    check_same(shared, train_on(1, folder / "one", settings, by=train_sft))
    assert {"loss", "entropy", "mean_token_accuracy", "num_tokens"} <= shared.logs[0].keys()


@pytest.mark.slow
def test_packed_documents(tmp_path: Path) -> None:
    """The default packing, at a length that is odd; layers are checkpointed, as is the default."""
    check_ranks(tmp_path, {**COMPILED, "sizes": {"num_hidden_layers": 1}})


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {**PADDED, "loss_type": "dft"},
        {
            **{"average_tokens_across_devices": False, "gradient_checkpointing": False},
            "sizes": {"tie_word_embeddings": True},
        },
        {
            **{"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2},
            **{"label_smoothing_factor": 0.1, "packing_strategy": "wrapped"},
        },
        {"own_loss": True},
        {"own_loss": True, "average_tokens_across_devices": False},
        {"adapters": True, "sizes": {"num_hidden_layers": 1}},
    ],
    ids=[
        *("padded, dft", "averages, tied", "evaluation, smoothed, wrapped"),
        *("own loss", "own loss, averages", "adapters"),
    ],
)
def test_settings(settings: Mapping[str, Any], tmp_path: Path) -> None:
    if "adapters" in settings:
        pytest.importorskip("peft")
    check_ranks(tmp_path, {**COMPILED, **settings})


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "batches", "more"),
    [
        (4, 2, {}),
        (2, 1, {"gradient_checkpointing": False, "fsdp_config": CHECKPOINTED_AND_OFFLOADED}),
    ],
)
def test_sharded_weights(ranks: int, batches: int, more: Mapping[str, Any], tmp_path: Path) -> None:
    """FSDP2, packed documents: one process has the batches of all ranks."""
    settings = {"fsdp": True, "dp_shard_size": batches, "per_device_train_batch_size": 1, **more}
    check_ranks(tmp_path, {**COMPILED, **settings}, ranks)


@pytest.mark.long
def test_more_ranks_than_one_document_has_tokens(tmp_path: Path) -> None:
    check_ranks(tmp_path, COMPILED, ranks=3)


@pytest.mark.long
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "one text"])
def test_long_context(packing: bool, tmp_path: Path) -> None:
    """The example, as users run it, by two processes and by one."""
    two, one = (long_context(ranks, packing, tmp_path) for ranks in (2, 1))
    assert len(two) == len(one) == 2
    for shared, whole in zip(two, one, strict=True):
        assert shared.keys() == whole.keys()
        for name, value in whole.items():
            assert shared[name] == pytest.approx(value, rel=1e-5), name


def long_context(ranks: int, packing: bool, folder: Path) -> list[dict[str, float]]:
    arguments = f"--tiny --steps 2 --backend cp_aot_eager --out {folder}{' --packing' * packing}"
    said = run_example("trl_long_context", ranks, arguments).stdout
    assert "GB per rank, weights" in said
    return [json.loads(line) for line in said.splitlines() if line.startswith('{"step"')]


@pytest.mark.long
@on_ranks(2)
def test_another_trainer_is_refused(tmp_path: Path) -> None:
    import datasets
    from accelerate import ParallelismConfig
    from trl import DPOConfig, DPOTrainer

    from cp_inductor.integrations.accelerate import register
    from tests.support.models import make

    register()
    rows = [{"prompt": "w3 w4", "chosen": " w5", "rejected": " w6"}] * 4
    how: dict[str, Any] = {"use_cpu": True, "ddp_backend": "gloo", "bf16": False}
    refused = pytest.raises(InvalidArgument, match="expected SFTTrainer, of TRL's trainers")
    with launched(), refused:
        axes = ParallelismConfig(cp_size=2, cp_backend="cp_inductor")
        arguments = DPOConfig(str(tmp_path), report_to="none", parallelism_config=axes, **how)
        data = datasets.Dataset.from_list(rows)
        DPOTrainer(make("Llama"), args=arguments, train_dataset=data, processing_class=letters())
