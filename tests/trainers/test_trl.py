"""TRL's SFTTrainer with this library as its context parallelism, beside one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cp_inductor.backend.graph_passes import lower_attention, schedule_exchange
from cp_inductor.errors import InvalidArgument
from cp_inductor.graph.collectives import STARTS
from cp_inductor.passes.lower_attention import EXPANSIONS
from tests.support.examples import EXAMPLES, number_in, run_example
from tests.support.ranks import on_ranks
from tests.support.traced_step import assert_sums, count, trace_step
from tests.support.trainers import COMPILED, check_same, launched, letters, train_on, train_sft

pytest.importorskip("trl", reason="trl is not installed")

PADDED = {"packing": False, "per_device_train_batch_size": 3, "pad_to_multiple_of": 25}
SHARDED = {"fsdp": True, "dp_shard_size": 1, "per_device_train_batch_size": 1}
# Ranks, and settings. Layers are checkpointed, as is the default.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "more ranks than one document has tokens": (3, {}),
    "padded, dft": (2, {**PADDED, "loss_type": "dft"}),
    "averages, tied": (
        2,
        {
            **{"average_tokens_across_devices": False, "gradient_checkpointing": False},
            "sizes": {"num_hidden_layers": 1, "tie_word_embeddings": True},
        },
    ),
    "evaluation, smoothed, wrapped": (
        2,
        {
            **{"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2},
            **{"label_smoothing_factor": 0.1, "packing_strategy": "wrapped"},
        },
    ),
    "own loss, averages": (2, {"own_loss": True, "average_tokens_across_devices": False}),
    "adapters": (2, {"adapters": True}),
    # FSDP2; one process has the batches of all ranks.
    "sharded": (4, {**SHARDED, "dp_shard_size": 2}),
    "sharded, checkpointed, offloaded": (
        2,
        {
            **{**SHARDED, "gradient_checkpointing": False},
            "fsdp_config": {"activation_checkpointing": True, "cpu_offload": True},
        },
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_sft_trainer_computes_what_one_process_does(name: str, tmp_path: Path) -> None:
    """Losses, token accuracies, entropies, gradients and weights, at a length that is odd."""
    if name == "adapters":
        pytest.importorskip("peft")
    ranks, settings = RUNS[name]
    settings = {**COMPILED, **settings}
    shared = train_on(ranks, tmp_path / "shared", settings, by=train_sft)
    check_same(shared, train_on(1, tmp_path / "one", settings, by=train_sft))
    assert {"loss", "entropy", "mean_token_accuracy", "num_tokens"} <= shared.logs[0].keys()


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


# --- torchtitan's Llama, and passes in the list of its graph trainer.

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5


@pytest.mark.long
def test_llama_trains_as_on_one_process() -> None:
    """The example, as users run it: FSDP2 over two pairs of ranks, which share each sequence."""
    arguments = "--cp 2 --layers 2 --steps 3 --backend cp_aot_eager"
    said = run_example("torchtitan_llama", 4, arguments).stdout
    assert number_in(said, "difference of loss") <= LOSS_TOLERANCE
    assert number_in(said, "difference of gradients") <= GRADIENT_TOLERANCE
    assert number_in(said, "attentions rewritten") == 1  # all blocks share the code


def test_configuration_is_found_by_torchtitan() -> None:
    from torchtitan.config import ConfigManager

    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        config = ConfigManager().parse_args(
            ["--module", "torchtitan_llama", "--config", "llama3_debugmodel"]
        )
    assert config.parallelism.context_parallel_degree == 2
    assert config.model_spec.parallelize_fn.__module__ == "torchtitan_llama"


@pytest.mark.slow
@on_ranks(2)
def test_passes_in_the_list_of_the_graph_trainer() -> None:
    from torchtitan.experiments.graph_trainer.passes import apply_graph_passes
    from torchtitan.experiments.graph_trainer.remove_noop_passes import (
        canonicalize_graph_pass,
        eliminate_dead_code_pass,
    )

    gm, shard, weights, expected = trace_step()
    passes = [eliminate_dead_code_pass, canonicalize_graph_pass, lower_attention, schedule_exchange]
    gm = apply_graph_passes(gm, (shard, *weights), passes)
    assert count(gm, EXPANSIONS) == 0
    assert count(gm, STARTS) > 0
    assert_sums(gm(shard, weights), expected)
