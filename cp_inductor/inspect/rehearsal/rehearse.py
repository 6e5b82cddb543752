"""Rehearse a model: run the GPU programs of all ranks on the CPU, together, before there is a GPU.

rehearsal = rehearse(model, (ids,), world_size=4, placements=[Shard(1)])
print(rehearsal.report)

model . torch.compile(backend="cp_inductor") . code for cuda:sm_90 of rank 0, 1, 2, 3
  Triton kernels            Triton's interpreter
  exchanges                 real, between four processes
  flash, matmul             plain implementations, which check what the kernels ask for
  autograd, optimizers      as ever
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TextIO

from torch import Tensor
from torch.distributed.tensor import Placement

from cp_inductor.errors import UnsupportedPlacement, UnsupportedTarget
from cp_inductor.inspect.compile_for import check_triton
from cp_inductor.inspect.rehearsal.rank import PHASES, Job
from cp_inductor.inspect.rehearsal.report import RehearsalReport
from cp_inductor.inspect.rehearsal.stage import Stage
from cp_inductor.inspect.targets import Target
from cp_inductor.inspect.world import check_world

DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Rehearsal:
    """What one process would have got, and what happened on the way.

    Attributes:
        outputs: of the model, with whole, plain tensors on the CPU.
        loss: a scalar; None if nothing that the model returns is a number.
        gradients: whole, by the names of parameters, and of arguments: ``args[0]``.
        report: what ran, what was exchanged, what was found, and what was not seen.
    """

    outputs: Any
    loss: Tensor | None
    gradients: Mapping[str, Tensor]
    report: RehearsalReport


def rehearse(
    model: Callable[..., Any],
    args: Sequence[Any] | Callable[..., Sequence[Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    world_size: int,
    target: str = "cuda:sm_90",
    mesh_shape: Sequence[int] | None = None,
    mesh_dim_names: Sequence[str] | None = None,
    placements: Sequence[Placement] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    seq_dim: int | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    compiled: bool = True,
    compare: bool = True,
    reference: Callable[..., Any] | None = None,
    folder: str | None = None,
    deadline_s: float = DEADLINE_S,
) -> Rehearsal:
    """Compile every rank's program for a GPU, and run all of them on the CPU, forward and backward.

    Each rank is a process. It calls ``torch.compile(model, backend="cp_inductor")``, which here
    generates code for the GPU, as `cross_compile` does, and runs it under Triton's interpreter.
    Use small shapes: a few hundred tokens take seconds. Every access of a kernel is checked; see
    `docs/rehearse.md` for what is found, and for what cannot be seen.

    The caller's script is imported by the processes, so it needs the usual ``if __name__ ==
    "__main__":``, and what it passes must be importable.

    Args:
        model: a module, or a function. With ``compiled=False`` a function that compiles what it
            wants by itself, such as a training loop: all that ``backend="cp_inductor"`` compiles
            in it is rehearsed. It calls ``backward()`` itself.
        args: its arguments: tensors with numbers, or on "meta" (random ones then, which differ by
            rank), or a function from the mesh to this rank's arguments, which may be DTensors.
        kwargs: keyword arguments of the model.
        world_size: number of ranks.
        target: as of `cross_compile`; a GPU.
        mesh_shape: shape of the mesh over all ranks; by default ``(world_size,)``.
        mesh_dim_names: names of its axes; by default ("cp",), ("dp", "cp") or ("dp", "cp", "tp").
        placements: one per mesh axis. If given, plain tensors are whole and become DTensors with
            these placements, and the model is given to `cp_inductor.distribute`. If not given, and
            no argument is a DTensor, plain tensors are this rank's shards.
        loss: from the outputs to a scalar; by default the output, if it is one, or else half the
            sum of the squares of all floating outputs. Over plain shards, the loss of all is the
            mean of the ranks'.
        fullgraph, dynamic, mode, options: as torch.compile's.
        seq_dim: the sequence dim of plain shards; by default 2 of four-dimensional tensors, else 1.
        within: makes a context in which the model is called, such as
            `integrations.sinks.flex_sinks_on_cpu`, which gpt_oss of transformers needs here.
        compiled: whether to compile the model, or only to call it.
        compare: whether to compute the same on one process, in float64 and in the model's dtypes.
        reference: what one process calls in place of the model, if the CPU cannot compute it, such
            as the same model with ``attn_implementation="eager"``. A module is given the weights.
        folder: where generated code is to be left; by default nowhere.
        deadline_s: after so many seconds the ranks are ended.

    Returns:
        Outputs, loss and gradients as on one process, and the report.

    Raises:
        CPError: an attention cannot be rewritten; the target, the mesh or the rank does not exist;
            triton is missing; or the ranks' exchanges do not fit together.
        RehearsalFailed: a rank has raised an error, died, or not ended in time.
    """
    job = Job(
        model=model,
        args=args,
        kwargs=dict(kwargs or {}),
        world_size=world_size,
        target=target,
        mesh_shape=mesh_shape,
        mesh_dim_names=mesh_dim_names,
        placements=placements,
        loss=loss,
        fullgraph=fullgraph,
        dynamic=dynamic,
        mode=mode,
        options=options,
        seq_dim=seq_dim,
        within=within,
        is_compiled=compiled,
        is_compared=compare,
        reference=reference,
        folder=folder,
    )
    return rehearse_job(job, deadline_s=deadline_s)


def rehearse_job(
    job: Job, *, deadline_s: float = DEADLINE_S, stage: Stage | None = None
) -> Rehearsal:
    """Rehearse, on a stage that is there already or on one for this rehearsal alone."""
    check_job(job)
    if stage is None:
        with Stage() as new:
            return rehearse_job(job, deadline_s=deadline_s, stage=new)
    started = time.monotonic()
    with_bar = Bar(job.world_size, sys.stderr)
    try:
        played = stage.run(job, deadline_s=deadline_s, tell=with_bar.tell)
    finally:
        with_bar.close()
    first = played[0]
    report = RehearsalReport(
        Target.parse(job.target).name,
        tuple(one.report for one in played),
        first.differences,
        first.uncompared,
        time.monotonic() - started,
    )
    return Rehearsal(first.outputs, first.loss, first.gradients, report)


def check_job(job: Job) -> None:
    """Refuse, before any process is started, what no rank could do."""
    if Target.parse(job.target).gpu is None:
        raise UnsupportedTarget(
            site="rehearse",
            expected="a GPU, whose programs cannot be run here as they are",
            got=f"target={job.target!r}",
            remedy="name a GPU, such as 'cuda:sm_90', or run the model on CPU ranks",
        )
    check_triton()
    shape, _ = check_world(0, job.world_size, job.mesh_shape, job.mesh_dim_names)
    if job.placements is not None and len(job.placements) != len(shape):
        raise UnsupportedPlacement(
            site="rehearse",
            expected=f"a placement for each of the {len(shape)} mesh axes",
            got=f"placements={list(job.placements)}",
            remedy="name one for each axis, such as Replicate()",
        )


class Bar:
    """A progress bar, if somebody is watching.

    Args:
        world_size: number of ranks.
        stream: a terminal, or something else, on which nothing is shown.
    """

    WIDTH = 30

    def __init__(self, world_size: int, stream: TextIO | None) -> None:
        self.stream = stream if stream is not None and stream.isatty() else None
        self.done = [0] * world_size

    def tell(self, rank: int, what: str) -> None:
        """Show what a rank has come to."""
        if what in PHASES:
            self.done[rank] = max(self.done[rank], PHASES.index(what) + 1)
        if self.stream is not None:
            share = sum(self.done) / (len(self.done) * len(PHASES))
            filled = round(share * self.WIDTH)
            bar = "#" * filled + "." * (self.WIDTH - filled)
            self.stream.write(f"\r\x1b[Krehearse [{bar}] rank {rank}: {what[:60]}")
            self.stream.flush()

    def close(self) -> None:
        """Remove the bar."""
        if self.stream is not None:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
