"""The main job: the training example on real text, against the unsharded model.

More than 90 s of CPU where it is a long case's turn: scripts are run as users run them, by torchrun
and through Inductor, and share nothing with other tests but what is compiled.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.examples import check_against_unsharded, number_in, run_example


@pytest.mark.long
def test_flex_attention() -> None:
    said = run_example("flex_attention", 2, "--backend cp_aot_eager").stdout
    differences = [float(text) for text in re.findall(r"difference (\S+)", said)]
    assert len(differences) == 3
    assert max(differences) <= 1e-5
    # Every batch has a BlockMask of its own, and all run the same graph.
    assert "attentions rewritten 1\n" in said


# Without Inductor, tests/trust/test_faults.py runs it.
@pytest.mark.long
def test_train_text(tmp_path: Path) -> None:
    arguments = "--steps 7 --check-every 3 --dim 64 --seq-len 250 --layers 2"
    done = run_example("train_text", 3, f"{arguments} --out {tmp_path}")
    check_against_unsharded(done.stdout + done.stderr, 3)
    first, last = map(float, re.search(r"loss +(\S+) -> (\S+)", done.stdout).groups())
    assert last < first
    assert number_in(done.stdout, "attentions rewritten") == 2
    assert number_in(done.stdout, "bytes sent per step") > 0
    assert (tmp_path / "train_text.png").stat().st_size > 1000


@pytest.mark.long
def test_hf_long_context() -> None:
    """Of a model with a window; tests/trust/test_faults.py runs it for one without."""
    arguments = "--model mistral --steps 3 --seq-len 600 --window 100"
    done = run_example("hf_long_context", 2, arguments)
    assert number_in(done.stdout, "largest difference of loss") <= 1e-6
    assert number_in(done.stdout, "attentions rewritten") == 2
    # For each batch: what share of a causal attention is computed, and its balance.
    planned = re.findall(r"^ +\d+ +([\d.]+)% +([\d.]+) +[\d.]+ +[\d.]+ +\d+$", done.stdout, re.M)
    assert len(planned) == 3 and all(float(part) < 100 for part, _ in planned), done.stdout
    assert "causal, window 100, document equality on axis 'cp'" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("fsdp_cp", 4), ("tp_cp", 4), ("from_context_parallel", 2), ("hf_trainer", 2)],
)
def test_guide(name: str, num_ranks: int) -> None:
    """The script of each guide, through Inductor, against the model on one process."""
    done = run_example(name, num_ranks, "--steps 2")
    assert number_in(done.stdout, "largest difference of loss") <= 1e-6


@pytest.mark.slow
def test_million_tokens_in_small() -> None:
    """A 512th of the length, with checkpoints; interpreted, as the loss in chunks is tested."""
    done = run_example("million_tokens", 2, "--tiny --steps 2 --backend cp_aot_eager")
    assert number_in(done.stdout, "largest difference of loss") <= 1e-6
    assert "2,048 tokens on 2 ranks" in done.stdout


@pytest.mark.long
def test_prefix_trees() -> None:
    """A packed row of three levels, over three ranks, beside each answer with its own prompt."""
    said = run_example("prefix_trees", 3, "--steps 2 --backend cp_aot_eager").stdout
    assert number_in(said, "difference of loss") <= 1e-6
    assert number_in(said, "of gradients") <= 1e-5
