"""Checkpoints of a training that may be killed at any time, and goes on where it was.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 5 \\
        examples/train_text.py --checkpoints /tmp/training

A checkpoint is a folder that torch.distributed.checkpoint writes while the training goes on. Its
file .metadata comes last: a folder without it was not finished, and is left out. Every rank reads
what it needs of all files, so training resumes on as many ranks or fewer. On as many ranks it
computes the same bits as if nothing had happened, provided that a batch depends on its step alone.

Without that variable, ranks that torchrun 2.13 starts again may find in its store the addresses of
those before them, and fail to connect: https://github.com/pytorch/pytorch/issues/135712.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

Trained = Mapping[str, tuple[nn.Module, Optimizer]]


class Checkpoints:
    """The checkpoints of models, their optimizers, and what is written down about each step.

    Args:
        folder: where they are; None makes none.
        every: steps from one to the next.
        trained: models and optimizers, by name.
    """

    def __init__(self, folder: str | None, every: int, trained: Trained) -> None:
        self.folder = Path(folder) if folder else None
        self.every, self.trained = every, trained
        self.being_written: Future | None = None
        if self.folder:
            # A group of its own: a thread writes, while the training uses the others.
            self.group = dist.new_group(backend="gloo")

    def resume(self) -> list[Any]:
        """Load the newest checkpoint; return what was noted of the steps before it."""
        # One rank looks: the folder may not look the same to all.
        newest = [max(self._complete(), default=None) if dist.get_rank() == 0 else None]
        if self.folder:
            dist.broadcast_object_list(newest, group=self.group)
        if newest[0] is None:
            return []
        state = self._state([])
        dcp.load(state, checkpoint_id=self._path(newest[0]), process_group=self.group)
        for name, (model, optimizer) in self.trained.items():
            weights, moments = state[name]["weights"], state[name]["moments"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return state["notes"]

    def save(self, notes: list[Any]) -> None:
        """Begin to write a checkpoint if it is time; `notes` has an entry for each step so far."""
        if not self.folder or len(notes) % self.every:
            return
        self.finish()
        self.being_written = dcp.async_save(
            self._state(notes), checkpoint_id=self._path(len(notes)), process_group=self.group
        )

    def finish(self) -> None:
        """Wait until the last checkpoint is written, and remove those before it but one."""
        if self.being_written is not None:
            self.being_written.result()
            self.being_written = None
            if dist.get_rank() == 0:
                for step in sorted(self._complete())[:-2]:
                    shutil.rmtree(self._path(step))

    def _state(self, notes: list[Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"notes": list(notes)}
        for name, (model, optimizer) in self.trained.items():
            weights, moments = get_state_dict(model, optimizer)
            state[name] = {"weights": weights, "moments": moments}
        return state

    def _path(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / f"step-{step}"

    def _complete(self) -> list[int]:
        paths = self.folder.glob("step-*/.metadata") if self.folder else ()
        return [int(path.parent.name.removeprefix("step-")) for path in paths]
