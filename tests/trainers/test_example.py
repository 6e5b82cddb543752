"""The main job: the training example on real text, against the unsharded model.

More than 90 s of CPU where it is a long case's turn: scripts are run as users run them, by torchrun
and through Inductor, and share nothing with other tests but what is compiled.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.reference import needs_linear_of_batches

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_flex_attention() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / "flex_attention.py")]
    command += ["--backend", "cp_aot_eager"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    differences = [float(text) for text in re.findall(r"difference (\S+)", done.stdout)]
    assert len(differences) == 3
    assert max(differences) <= 1e-5
    # Every batch has a BlockMask of its own, and all run the same graph.
    assert "attentions rewritten 1\n" in done.stdout


GUIDES = {
    "fsdp_cp": "fsdp.md",
    "tp_cp": "tensor-parallel.md",
    "from_context_parallel": "from-context-parallel.md",
    "hf_trainer": "hugging-face.md",
}


def check_against_unsharded(said: str, least: int = 1) -> None:
    """Check what the example says of its differences from the unsharded model."""
    differences = re.findall(r"model: loss (\S+), gradients (\S+)", said)
    assert len(differences) >= least
    assert max(float(of_loss) for of_loss, _ in differences) <= 1e-5
    assert max(float(of_gradients) for _, of_gradients in differences) <= 1e-4


# Without Inductor, tests/trust/test_restart.py runs it always.
@needs_linear_of_batches
@pytest.mark.long
@pytest.mark.parametrize(
    ("num_ranks", "seq_len", "num_layers"),
    [(2, 256, 1), (3, 250, 2)],
)
def test_train_text(tmp_path: Path, num_ranks: int, seq_len: int, num_layers: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(ROOT / "examples" / "train_text.py")]
    command += ["--steps", "7", "--check-every", "3", "--dim", "64", "--out", str(tmp_path)]
    command += ["--seq-len", str(seq_len), "--layers", str(num_layers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    check_against_unsharded(done.stdout + done.stderr, 3)
    first, last = map(float, re.search(r"loss +(\S+) -> (\S+)", done.stdout).groups())
    assert last < first
    assert re.search(rf"attentions rewritten +{num_layers}\n", done.stdout)
    assert int(re.search(r"bytes sent per step +(\d+)", done.stdout)[1]) > 0
    assert (tmp_path / "train_text.png").stat().st_size > 1000


@needs_linear_of_batches
@pytest.mark.long
@pytest.mark.parametrize("model", ["llama", "mistral"])
def test_hf_long_context(model: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(ROOT / "examples" / "hf_long_context.py")]
    command += ["--model", model, "--steps", "3", "--seq-len", "600", "--window", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"largest difference of loss +(\S+)", done.stdout)[1]) <= 1e-6
    assert re.search(r"attentions rewritten +2\n", done.stdout)
    # Of each batch: what is computed of a causal attention, and its balance.
    planned = re.findall(r"^ +\d+ +([\d.]+)% +([\d.]+) +[\d.]+ +[\d.]+ +\d+$", done.stdout, re.M)
    assert len(planned) == 3 and all(float(part) < 100 for part, _ in planned), done.stdout
    window = ", window 100" if model == "mistral" else ""
    assert f"causal{window}, document equality on axis 'cp'" in done.stderr


@needs_linear_of_batches
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [("fsdp_cp", 4), ("tp_cp", 4), ("from_context_parallel", 2), ("hf_trainer", 2)],
)
def test_guide(name: str, num_ranks: int) -> None:
    """The script of each guide, through Inductor, against the model on one process."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), str(ROOT / "examples" / f"{name}.py")]
    command += ["--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"largest difference of loss +(\S+)", done.stdout)[1]) <= 1e-6
