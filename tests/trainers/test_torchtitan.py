"""torchtitan's Llama, and passes in the list of its graph trainer.

The imports of torchtitan are half of what these cost, so ranks of the suite have them once.
"""

from __future__ import annotations

import sys
from unittest import mock

import pytest

from cp_inductor.backend.graph_passes import lower_attention, schedule_exchange
from cp_inductor.graph.collectives import STARTS
from cp_inductor.passes.lower_attention import EXPANSIONS
from tests.support.examples import EXAMPLES, number_in, run_example
from tests.support.ranks import on_ranks
from tests.support.traced_step import assert_sums, count, trace_step

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
