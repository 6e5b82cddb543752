"""torchtitan's Llama, and passes in the list of its graph trainer.

The imports of torchtitan are half of what these cost, so ranks of the suite have them once.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import cp_inductor
from cp_inductor.backend.graph_passes import lower_attention, schedule_exchange
from cp_inductor.graph.collectives import STARTS
from cp_inductor.passes.lower_attention import EXPANSIONS
from tests.passes.test_graph_passes import count, inputs, step
from tests.support.ranks import run_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

EXAMPLES = Path(__file__).parents[2] / "examples"


LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5


def train(layers: int) -> list[list[float]]:
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        import torchtitan_llama
    return torchtitan_llama.train(
        argparse.Namespace(
            cp=2, layers=layers, batch=2, seq_len=256, steps=2, backend="cp_aot_eager"
        )
    )


@pytest.mark.slow
def test_llama_trains_as_on_one_process() -> None:
    """Its FSDP2 over both ranks, which share each sequence."""
    for rows in run_ranks(2, train, 2):
        assert len(rows) == 2
        for _, _, _, loss, gradients in rows:
            assert loss <= LOSS_TOLERANCE
            assert gradients <= GRADIENT_TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "cp"), [(2, 2), (4, 2)])
def test_example(ranks: int, cp: int) -> None:
    """The same as users run it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(EXAMPLES / "torchtitan_llama.py")]
    command += ["--cp", str(cp), "--layers", "2", "--steps", "3", "--backend", "cp_aot_eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"difference of loss +(\S+)", done.stdout)[1]) <= LOSS_TOLERANCE
    assert float(re.search(r"difference of gradients +(\S+)", done.stdout)[1]) <= GRADIENT_TOLERANCE
    assert re.search(r"attentions rewritten +1\n", done.stdout)  # all blocks share the code


def test_configuration_is_found_by_torchtitan() -> None:
    from torchtitan.config import ConfigManager

    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        config = ConfigManager().parse_args(
            ["--module", "torchtitan_llama", "--config", "llama3_debugmodel"]
        )
    assert config.parallelism.context_parallel_degree == 2
    assert config.model_spec.parallelize_fn.__module__ == "torchtitan_llama"


def apply_in_its_list() -> None:
    from torchtitan.experiments.graph_trainer.passes import apply_graph_passes
    from torchtitan.experiments.graph_trainer.remove_noop_passes import (
        canonicalize_graph_pass,
        eliminate_dead_code_pass,
    )

    ranks, rank = dist.get_world_size(), dist.get_rank()
    tokens, weights = inputs(ranks)
    expected = step(tokens, weights)
    shard = tokens.chunk(ranks, dim=1)[rank].contiguous()
    with cp_inductor.context_parallel(init_device_mesh("cpu", (ranks,))):
        gm = make_fx(step, tracing_mode="fake")(shard, weights)
    passes = [
        eliminate_dead_code_pass,
        canonicalize_graph_pass,
        lower_attention,
        schedule_exchange,
    ]
    gm = apply_graph_passes(gm, (shard, *weights), passes)
    assert count(gm, EXPANSIONS) == 0
    assert count(gm, STARTS) > 0
    for actual, right in zip(gm(shard, weights), expected, strict=True):
        total = actual.detach().clone()
        dist.all_reduce(total)
        assert (total - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.slow
def test_passes_in_the_list_of_the_graph_trainer() -> None:
    run_ranks(2, apply_in_its_list)
