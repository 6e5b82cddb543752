"""Trainings that are killed at random times end as those that nobody disturbed, bit for bit.

The examples run as users run them, by torchrun, which starts all ranks again after one has died.
This process watches the folder of checkpoints and kills a rank when one of a random step is begun,
or a moment later: before the first step, in a step, or while a checkpoint is half-written. What the
last checkpoint holds is compared: all losses, weights and moments. Besides, `train_text` compares
itself with the unsharded model, as it does in tests/trainers/test_example.py through Inductor.

More than 90 s of CPU where it is a long case's turn: each restart imports and compiles again.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.examples import check_against_unsharded, command_of
from tests.support.processes import DEADLINE_S

# Long enough that it is not over before the last kill, which comes in its first half.
NUM_STEPS = 30

ARGUMENTS = {
    "train_text": ("--check-every", "10", "--batch-size", "1", "--dim", "16"),
    "hf_long_context": ("--dim", "16"),
}
# The last number that `hf_long_context` notes of a step is the time that it took.
NUMBERS = {"train_text": slice(None), "hf_long_context": slice(-1)}


def train(example: str, folder: Path, *, kill_at: Sequence[int] = (), seed: int = 0) -> str:
    """Run an example with checkpoints in a folder; return what it printed.

    Args:
        kill_at: a rank is killed for each of these: once the checkpoint of that step is begun.
    """
    command = [sys.executable, *command_of(example, 2, "--max-restarts", str(len(kill_at)))]
    command += arguments_of(example, folder)
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder.with_suffix(".log"), "w+") as log:
        training = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            kill_ranks(training, example, folder, kill_at, random.Random(seed))
            training.wait(DEADLINE_S)
        finally:
            for process in (*ranks_of(training, example), training.pid):
                if training.poll() is None:
                    os.kill(process, signal.SIGKILL)
            training.wait()
        log.seek(0)
        said = log.read()
    assert training.returncode == 0, said[-8000:]
    return said


def arguments_of(example: str, folder: Path) -> list[str]:
    arguments = [*ARGUMENTS[example], "--backend", "cp_aot_eager"]
    arguments += ["--layers", "1", "--seq-len", "50", "--steps", str(NUM_STEPS)]
    arguments += ["--checkpoints", str(folder), "--checkpoint-every", "1"]
    return arguments + ["--out", str(folder / "out")] * (example == "train_text")


def kill_ranks(
    training: subprocess.Popen[Any],
    example: str,
    folder: Path,
    kill_at: Sequence[int],
    draw: random.Random,
) -> None:
    was_killed: set[int] = set()
    deadline = time.monotonic() + DEADLINE_S
    for step in kill_at:
        ranks: list[int] = []
        while not ranks or was_killed & set(ranks) or newest(folder) < step:
            assert training.poll() is None, f"it ended before step {step}"
            assert time.monotonic() < deadline, f"it has not come to step {step}"
            time.sleep(0.005)
            ranks = ranks_of(training, example)
        time.sleep(draw.uniform(0, 0.1))
        killed = draw.choice(ranks)
        os.kill(killed, signal.SIGKILL)
        # The others are those of the same start: they end as well.
        was_killed.update(ranks)


def ranks_of(training: subprocess.Popen[Any], example: str) -> list[int]:
    """Return the processes that torchrun has started and that run."""
    found = []
    for path in Path(f"/proc/{training.pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and example in command.read_text():
                found.append(child)
    return found


def newest(folder: Path) -> int:
    """Return the last step of which a checkpoint was begun; 0 before the first."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)


def last_of(folder: Path) -> dict[str, Any]:
    """Return what the last checkpoint holds, whole."""
    path = folder / f"step-{NUM_STEPS}"
    assert (path / ".metadata").exists()
    dcp_to_torch_save(path, folder / "whole.pt")
    return torch.load(folder / "whole.pt", weights_only=False)


def notes_of(state: dict[str, Any], example: str) -> list[Any]:
    notes = state["notes"]
    return [note[NUMBERS[example]] for note in notes] if isinstance(notes[0], list) else notes


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_leaves_with_path(state)
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("example", ARGUMENTS)
def test_killed_five_times(example: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1000)
    draw = random.Random(seed)
    kill_at = sorted(draw.randrange(NUM_STEPS // 2) for _ in range(5))
    what = f"seed {seed}: killed at {kill_at}"
    for name in ("killed", "undisturbed"):
        (tmp_path / name).mkdir()
    train(example, tmp_path / "undisturbed")
    said = train(example, tmp_path / "killed", kill_at=kill_at, seed=seed)
    if example == "train_text":
        check_against_unsharded(said)
    expected, found = (last_of(tmp_path / name) for name in ("undisturbed", "killed"))
    losses = notes_of(expected, example)
    assert len(losses) == NUM_STEPS and losses[-1] != losses[0]
    assert notes_of(found, example) == losses, what
    wanted, tensors = tensors_of(expected), tensors_of(found)
    assert tensors.keys() == wanted.keys() and len(wanted) > 20
    for name, tensor in wanted.items():
        assert torch.equal(tensors[name], tensor), f"{name}, {what}"
