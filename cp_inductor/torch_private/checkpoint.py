"""What torch.utils.checkpoint recomputes runs in the context of its first run.

    with region:                        out.backward()
        out = checkpoint(block, x)        checkpoint runs block(x) again: within region, too

Read in torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)

from cp_inductor.torch_private.modes import is_in_backward


def rerun_within(context: AbstractContextManager[Any]) -> None:
    """Make every checkpoint around the caller enter `context` when it recomputes.

    Call this from inside the checkpointed function, while it runs for the first time. A second call
    with the same context changes nothing. The context must allow several entries.

    Needed because `torch.utils.checkpoint` (2.13-2.15) recomputes in the backward, after the
    caller may have left its function modes. A checkpoint restores only its own dispatch modes,
    autocast and the default device.
    """
    for holder, name in (*checkpoints_around(), *_find_in_hooks()):
        _run_within(context, holder, name)


def _run_within(context: AbstractContextManager[Any], holder: Any, name: str) -> None:
    """Have what an object keeps under a name enter the context first, unless it does already."""
    function = getattr(holder, name)
    contexts = getattr(function, "contexts", ())
    if context in contexts:
        return

    def within(*args: Any) -> Any:
        with context:
            return function(*args)

    within.contexts = (context, *contexts)  # type: ignore[attr-defined]
    setattr(holder, name, within)


def checkpoints_around() -> Iterator[tuple[Any, str]]:
    """Yield the checkpoints among the functions that called the caller, directly or not.

    Of each, what keeps the function that its backward will call, and the name of the attribute.
    They have no other name than the local variables of torch's frames, which `TEXTS` lists.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.utils.checkpoint.CheckpointFunction.forward.__code__:
            # use_reentrant=True: an autograd function, which keeps the function in its ctx.
            yield frame.f_locals["ctx"], "run_function"
        elif frame.f_globals is vars(torch.utils.checkpoint) and "gen" in frame.f_locals:
            # use_reentrant=False: `checkpoint` drives a generator, whose local is the
            # _CheckpointFrame.
            generator = frame.f_locals["gen"]
            yield generator.gi_frame.f_locals["new_frame"], "recompute_fn"
        frame = frame.f_back


def _find_in_hooks() -> Iterator[tuple[Any, str]]:
    """Find the innermost checkpoint by its hook for saved tensors, which holds _CheckpointFrame.

    `torch.distributed._composable.checkpoint` runs between two module hooks, so it has no frame on
    the stack.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return
    for variable in getattr(hooks[0], "__closure__", None) or ():
        if isinstance(variable.cell_contents, torch.utils.checkpoint._CheckpointFrame):
            yield variable.cell_contents, "recompute_fn"


def has_checkpointed_layers(model: nn.Module) -> bool:
    """Whether layers of a model are wrapped in a `CheckpointWrapper` (2.13-2.15)."""
    return any(isinstance(module, CheckpointWrapper) for module in model.modules())


def redraw_when_recomputed(model: nn.Module) -> None:
    """Wrap layers anew that are wrapped, so that they draw the random numbers of the forward again.

    One that was wrapped with `preserve_rng_state=False` drops out others in the backward than in
    the forward (2.13-2.15).
    """
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, CheckpointWrapper):
                layer = checkpoint_wrapper(layer._checkpoint_wrapped_module)
                parent.register_module(name, layer)


def has_saved_tensor_hooks() -> bool:
    """Whether what autograd saves now passes through hooks on saved tensors (2.13-2.15)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# Whether this thread's backward may run again (retain_graph=True, 2.13-2.15).
is_backward_kept = torch._C._autograd._get_current_graph_task_keep_graph


def is_recomputing() -> bool:
    """Whether a checkpoint computes again what it forgot: a backward runs that records operations.

    Where Dynamo traces, no backward runs.
    """
    is_recording = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    return is_recording and is_in_backward()
