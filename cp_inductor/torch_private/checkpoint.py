"""What torch.utils.checkpoint runs again runs in the context it first ran in.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint


def rerun_within(context: AbstractContextManager[Any]) -> None:
    """Have every checkpoint that this is called under run its function in `context` again, too.

    `torch.utils.checkpoint` (2.11-2.15) runs a function again in the backward, when the modes that
    it ran under may be gone; of these it brings back dispatch modes of its own, autocast and the
    default device. What it is about to run again, it holds while it runs it for the first time:
    reentrant checkpoints as `ctx.run_function` in `CheckpointFunction.forward`; others in a
    `_CheckpointFrame`, of which `checkpoint` holds the generator that made it, and which the hook
    for saved tensors closes over (`torch.distributed._composable.checkpoint` leaves no more).
    """
    for holder, name in (*_checkpoints_on_stack(), *_checkpoint_of_hooks()):
        function = getattr(holder, name)
        if context not in getattr(function, "contexts", ()):
            setattr(holder, name, _Within(function, context))


def _checkpoints_on_stack() -> Iterator[tuple[Any, str]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals is vars(torch.utils.checkpoint):
            if frame.f_code is torch.utils.checkpoint.CheckpointFunction.forward.__code__:
                yield frame.f_locals["ctx"], "run_function"
            elif "gen" in frame.f_locals:
                yield frame.f_locals["gen"].gi_frame.f_locals["new_frame"], "recompute_fn"
        frame = frame.f_back


def _checkpoint_of_hooks() -> Iterator[tuple[Any, str]]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None:
        for cell in getattr(hooks[0], "__closure__", None) or ():
            if isinstance(cell.cell_contents, torch.utils.checkpoint._CheckpointFrame):
                yield cell.cell_contents, "recompute_fn"


def has_saved_tensor_hooks() -> bool:
    """Whether what is saved for a backward goes through hooks now.

    `torch._C._autograd._top_saved_tensors_default_hooks`, 2.11-2.15.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_backward_kept() -> bool:
    """Whether the backward that runs on this thread may run again (retain_graph).

    `torch._C._autograd._get_current_graph_task_keep_graph`, 2.11-2.15.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


class _Within:
    """A function that runs in a context."""

    def __init__(self, function: Callable[..., Any], context: AbstractContextManager[Any]) -> None:
        self.function = function
        self.context = context
        self.contexts = (context, *getattr(function, "contexts", ()))

    def __call__(self, *args: Any) -> Any:
        with self.context:
            return self.function(*args)
