"""TRL's GRPOTrainer and RLOOTrainer, on prefix trees over ranks, beside one process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_inductor.errors import InvalidArgument
from tests.support.models import make
from tests.support.ranks import run_ranks
from tests.support.trainers import COMPILED, Result, check_same, train_rollouts

trl = pytest.importorskip("trl", reason="trl is not installed")


@pytest.mark.parametrize("batch_size", [None, 3])
def test_rows_that_share_prompts_have_the_log_probabilities_of_padded_rows(
    batch_size: int | None,
) -> None:
    """On one process: what replaces TRL's method, beside it."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    from cp_inductor.integrations.transformers_trees import accept_prefix_trees
    from cp_inductor.integrations.trl_rollouts import log_probs_of_trees

    original = GRPOTrainer._get_per_token_logps_and_entropies
    original = getattr(original, "__wrapped__", original)
    model = make("Qwen3", head_dim=8).eval()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    accept_prefix_trees(model)
    accelerator = SimpleNamespace(autocast=nullcontext, unwrap_model=lambda model: model)
    trainer: Any = SimpleNamespace(accelerator=accelerator)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 64, (2, 7), generator=generator)
    lengths = [(0, 5), (1, 3), (0, 1), (0, 0), (1, 5), (1, 2)]  # the prompt, and of the answer
    ids = torch.randint(3, 64, (6, 12), generator=generator)
    ids[:, :7] = prompts[[prompt for prompt, _ in lengths]]
    mask = torch.ones_like(ids)
    for row, (prompt, length) in enumerate(lengths):
        mask[row, : 3 * prompt] = 0
        mask[row, 7 + length :] = 0
    given = (trainer, model, ids, mask, 5, batch_size, True)
    expected = original(*given)
    found = log_probs_of_trees(original, *given)
    kept = mask[:, 7:]
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert (one - other * kept).abs().max() <= 1e-5
        assert one.abs().max() > 1
    with pytest.raises(InvalidArgument, match="expected text alone"):
        log_probs_of_trees(original, *given, pixel_values=ids)


def check_ranks(kind: str, folder: Path, settings: Mapping[str, Any], ranks: int = 2) -> None:
    given = kind, str(folder), settings
    first, *others = map(_without_counts, run_ranks(ranks, train_rollouts, *given))
    for other in others:
        check_same(first, other, exactly=True)
    one = _without_counts(run_ranks(1, train_rollouts, *given)[0])
    check_same(first, one, tolerance=1e-5)
    logs = one.logs[0]
    assert logs["kl"] >= 0 and logs["reward"] > 0 and "entropy" in logs
    assert len(one.gradients) == 2


def _without_counts(result: Result) -> Result:
    """Leave out times, and what TRL counts over the samples of all processes."""
    left_out = ("num_tokens", "step_time", "/std", "reward_std")
    logs = [
        {name: value for name, value in entry.items() if not name.endswith(left_out)}
        for entry in result.logs
    ]
    return Result(logs, result.gradients, result.weights)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_two_steps(kind: str, tmp_path: Path) -> None:
    """KL against a reference, groups, accumulation: losses, gradients and weights."""
    check_ranks(kind, tmp_path, COMPILED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({"loss_type": "grpo"}, 3),
        ({"steps_per_generation": 4, "num_iterations": 2}, 2),  # with log-probabilities of before
        ({"draws": False, "top_k": 1}, 2),  # greedy: TRL generates, on every rank
    ],
    ids=["grpo", "several steps of a generation", "generation"],
)
def test_settings(settings: Mapping[str, Any], ranks: int, tmp_path: Path) -> None:
    check_ranks("GRPO", tmp_path, {**COMPILED, **settings}, ranks)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("GRPO", {"scale_rewards": "batch"}, "scale_rewards='group'"),
        ("RLOO", {"normalize_advantages": True}, "normalize_advantages=False"),
        ("GRPO", {"num_generations": 8}, "a multiple of num_generations=8"),
    ],
)
def test_what_counts_samples_of_all_ranks_is_refused(
    kind: str, settings: Mapping[str, Any], said: str, tmp_path: Path
) -> None:
    for message in run_ranks(2, refuse, kind, str(tmp_path), {**COMPILED, **settings}):
        assert said in message


def refuse(kind: str, folder: str, settings: Mapping[str, Any]) -> str:
    with pytest.raises(InvalidArgument) as refusal:
        train_rollouts(kind, folder, settings)
    return str(refusal.value)
