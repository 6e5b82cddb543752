"""Rehearse a model: run the GPU programs of all ranks on the CPU, together, before there is a GPU.

rehearsal = rehearse(Job(model, (ids,), world_size=4, placement=Shard(1)))
print(rehearsal.report)

model . torch.compile(backend="cp_inductor") . code for cuda:sm_90 of rank 0, 1, 2, 3
  Triton kernels            Triton's interpreter
  exchanges                 real, between four processes
  flash, matmul             plain implementations, which check what the kernels ask for
  autograd, optimizers      as ever
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cp_inductor.errors import UnsupportedTarget
from cp_inductor.inspect.compile_for import check_triton
from cp_inductor.inspect.targets import Target
from tests.rehearsal.rank import Job
from tests.rehearsal.report import RehearsalReport
from tests.rehearsal.stage import Stage

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


def rehearse(job: Job, *, deadline_s: float = DEADLINE_S, stage: Stage | None = None) -> Rehearsal:
    """Compile every rank's program for a GPU, and run all of them on the CPU, forward and backward.

    Each rank is a process. It calls ``torch.compile(model, backend="cp_inductor")``, which here
    generates code for the GPU, as `cross_compile` does, and runs it under Triton's interpreter.
    Use small shapes: a few hundred tokens take seconds. Every access of a kernel is checked.

    The caller's script is imported by the processes, so it needs the usual ``if __name__ ==
    "__main__":``, and what the job holds must be importable.

    Args:
        job: what is to be rehearsed.
        deadline_s: after so many seconds the ranks are ended.
        stage: whose processes play the ranks; by default one for this rehearsal alone.

    Raises:
        CPError: an attention cannot be rewritten; the target, the mesh or the rank does not exist;
            triton is missing; or the ranks' exchanges do not fit together.
        RehearsalFailed: a rank has raised an error, died, or not ended in time.
    """
    check_job(job)
    if stage is None:
        with Stage() as new:
            return rehearse(job, deadline_s=deadline_s, stage=new)
    played = stage.run(job, deadline_s=deadline_s)
    first = played[0]
    report = RehearsalReport(
        Target.parse(job.target).name,
        tuple(one.report for one in played),
        first.differences,
        first.uncompared,
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
