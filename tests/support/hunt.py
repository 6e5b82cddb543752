"""Idioms around attention, on two gloo ranks, in each of the ways to use the library.

    python -m tests.support.hunt                                all programs in all modes: two hours
    python -m tests.support.hunt --mode mesh --family loss      a family in a mode
    python -m tests.support.hunt --only write.token_shift       one program; or a pattern, 'loss.m*'
    python -m tests.support.hunt --count 40 --seed 7            a sample; each seed has its own
    python -m tests.support.hunt --list                         the names of all programs

`tests/support/idioms.py` has the programs. A program runs once on one process, and then, in a
mode, on shards: its loss and the gradients of all parameters must be those of one process. Modes:

    dtensors    compiled DTensors; 33 tokens, so that shards are uneven
    eager       the same in eager code
    mesh        plain shards, compiled with `options={"mesh": mesh}`; 32 tokens
    region      plain shards in an eager `context_parallel`
    pieces      the same, where all but attention is compiled, in graphs between the attentions

Over plain shards a loss that is a mean is divided by the number of ranks, and losses and gradients
are summed over them, as README says. What becomes of a program is one of:

    right       loss and gradients are those of one process
    refused     every rank raises a CPError, and all of them name the same cause
    error       torch's own error, or ours without a name
    wrong       something differs, and nothing was said
    warned      something differs, and a warning said so
    limit       something differs that docs/correctness.md lists as a known limit: a length that is
                read off a plain shard
    unalike     some ranks refuse, others do not, or for another cause
    hung        ranks did not end in time; their stacks are shown
    died        a rank's process ended

The command prints programs that are wrong, unalike, hung or dead (all with --verbose), and how many
there are of each, and ends with 1 if anything was wrong, unalike, hung or died.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatch
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import CPError
from tests.support.idioms import (
    BATCH,
    PROGRAMS,
    WIDTH,
    Batch,
    Model,
    Program,
    make_batch,
    make_model,
    placed,
)
from tests.support.ranks import RankError, forget_compiles, run_ranks

MODES = ("dtensors", "eager", "mesh", "region", "pieces")
PLAIN = ("mesh", "region", "pieces")
KINDS = ("right", "refused", "error", "wrong", "warned", "limit", "unalike", "hung", "died")
FAILURES = ("wrong", "unalike", "hung", "died")
RANKS = 2
LENGTHS = {mode: 32 if mode in PLAIN else 33 for mode in MODES}
# A gradient that is 0 but for rounding is held against this instead of itself.
SMALLEST = 1e-6


@dataclass(frozen=True)
class Case:
    """A program in a mode."""

    name: str
    mode: str
    seed: int
    backend: str = "cp_aot_eager"
    deadline_s: float = 120


@dataclass(frozen=True)
class Verdict:
    """What became of a case, on a rank or on all: one of `KINDS`, and why."""

    kind: str
    why: str = ""


# --- On one rank -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A loss, and gradients by name; of a program that draws, its numbers (B, S, E)."""

    out: Tensor
    grads: dict[str, Tensor | None]


def run_whole(program: Program, length: int) -> Found:
    model = make_model(program)
    out = model(make_batch(length))
    _backward(out)
    return Found(out.detach(), {name: _dense(p.grad) for name, p in model.named_parameters()})


def _backward(out: Tensor) -> None:
    if out.requires_grad:
        out.sum().backward()


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def over_dtensors(program: Program, case: Case, mesh: DeviceMesh) -> Found:
    model = cp_inductor.distribute(make_model(program), mesh)
    batch = make_batch(LENGTHS[case.mode])
    parts = Batch(*(distribute_tensor(t, mesh, [_placement(name)])
                    for name, t in zip(batch._fields, batch, strict=True)))  # fmt: skip
    call: Any = model
    if case.mode == "dtensors":
        whole = program.is_whole_graph
        call = torch.compile(model, backend=case.backend, fullgraph=whole, dynamic=False)
    with implicit_replication():
        out = call(parts)
        _backward(out)
        grads = {name: _whole(_dense(p.grad)) for name, p in model.named_parameters()}
        return Found(_whole(out.detach()), grads)


def _placement(name: str) -> Shard | Replicate:
    return Replicate() if name == "image" else Shard(1)


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_seeded(program: Program, mesh: DeviceMesh) -> Model:
    """Return a model; what is drawn afterwards differs between ranks, as a user would want it."""
    model = make_model(program)
    torch.manual_seed(mesh.get_local_rank())
    return model


def over_mesh(program: Program, case: Case, mesh: DeviceMesh) -> Found:
    model, batch = make_seeded(program, mesh), make_batch(LENGTHS[case.mode])
    rank = mesh.get_local_rank()
    parts = Batch(*(t if name == "image" else t.chunk(RANKS, 1)[rank].clone()
                    for name, t in zip(batch._fields, batch, strict=True)))  # fmt: skip
    call = torch.compile(
        model, backend=case.backend, fullgraph=True, dynamic=False, options={"mesh": mesh}
    )
    out = _share(call(parts), program)
    _backward(out)
    return _sum_up(program, model, out.detach())


def over_region(program: Program, case: Case, mesh: DeviceMesh) -> Found:
    model, batch = make_seeded(program, mesh), make_batch(LENGTHS[case.mode])
    buffers = [t for name, t in zip(batch._fields, batch, strict=True) if name != "image"]
    dims = [1] * len(buffers)
    call: Any = model
    if case.mode == "pieces":
        model.attend = torch.compiler.disable(model.attend)
        call = torch.compile(model, backend=case.backend, dynamic=False)
    with cp_inductor.context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
        out = _share(call(batch), program)
        _backward(out)
    return _sum_up(program, model, out.detach())


def _share(out: Tensor, program: Program) -> Tensor:
    """Return a rank's part of a loss."""
    return out if program.is_sum or program.is_drawn else out / RANKS


def _sum_up(program: Program, model: Model, out: Tensor) -> Found:
    """Add up what ranks have found."""
    grads: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad = _dense(parameter.grad)
        grad = torch.zeros_like(parameter) if grad is None else grad.clone()
        dist.all_reduce(grad)
        grads[name] = grad
    if program.is_drawn:
        parts = [torch.empty_like(out) for _ in range(RANKS)]
        dist.all_gather(parts, out.contiguous())
        return Found(torch.cat(parts, 1), grads)
    out = out.clone()
    dist.all_reduce(out)
    return Found(out, grads)


RUNS = {
    "dtensors": over_dtensors,
    "eager": over_dtensors,
    "mesh": over_mesh,
    "region": over_region,
    "pieces": over_region,
}


def difference(found: Found, expected: Found, program: Program) -> str:
    """Say what differs; nothing if nothing does."""
    if program.is_drawn:
        return check_drawn(found.out)
    pairs = {"loss": (found.out, expected.out)}
    pairs |= {
        name: (torch.zeros_like(grad) if found.grads[name] is None else found.grads[name], grad)
        for name, grad in expected.grads.items()
        if grad is not None
    }
    for name, (actual, wanted) in pairs.items():
        if actual.shape != wanted.shape:
            return f"{name}: {tuple(actual.shape)} != {tuple(wanted.shape)}"
        error = (actual.double() - wanted.double()).abs().max().item()
        size = max(wanted.abs().max().item(), SMALLEST)
        if not error <= program.tolerance * size:
            return f"{name}: relative error {error / size:.2g}"
    return ""


def check_drawn(drawn: Tensor) -> str:
    """Say why numbers are not drawn for each token by itself; about half of them must be 0."""
    length = drawn.shape[1]
    if drawn.shape != (BATCH, length, WIDTH):
        return f"numbers drawn: {tuple(drawn.shape)}"
    zeros = (drawn == 0).double().mean().item()
    if not 0.3 < zeros < 0.7:
        return f"{zeros:.0%} of what was drawn is 0"
    half = length // 2
    if torch.equal(drawn[:, :half], drawn[:, -half:]):
        return "both ranks drew the same numbers"
    return ""


def judge_here(case: Case) -> Verdict:
    """Run a case on this rank, and say what became of it."""
    program = placed(case.name, case.seed)
    expected = run_whole(program, LENGTHS[case.mode])
    cp_inductor.reset()  # what an eager region has checked once, it does not check again
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = RUNS[case.mode](program, case, mesh)
        except CPError as error:
            return Verdict("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Verdict("error", f"{type(error).__name__}: {error} {_place(error)}")
    wrong = difference(found, expected, program)
    if not wrong:
        return Verdict("right")
    if program.reads_length and case.mode in PLAIN:
        return Verdict("limit", wrong)
    ours = [
        str(one.message) for one in said if issubclass(one.category, cp_inductor.SequenceWarning)
    ]
    return Verdict("warned", f"{wrong} ({ours[0]})") if ours else Verdict("wrong", wrong)


def _place(error: Exception) -> str:
    """Name the last line of ours that an error passed, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "cp_inductor/" in frame.filename]
    return f"[{ours[-1].filename.rsplit('cp_inductor/')[-1]}:{ours[-1].lineno}]" if ours else ""


ENDED = "a rank has ended with"


class OthersWait(Exception):
    """This rank has ended, and another has not: it waits for this one, or hangs by itself."""


def judge_on_rank(case: Case) -> Verdict:
    """Judge a case; shortly before the deadline, write the stacks to standard error.

    Raises:
        OthersWait: this rank failed, and others did not end soon after.
    """
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(case.deadline_s - 5, file=2)
    try:
        verdict = judge_here(case)
        if verdict.kind in ("refused", "error"):
            print(f"{ENDED} {verdict.kind}: {verdict.why}", file=sys.stderr, flush=True)
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=case.deadline_s / 4))
            except RuntimeError as error:
                raise OthersWait from error
        return verdict
    finally:
        faulthandler.cancel_dump_traceback_later()


def judge_in_turn(cases: Sequence[Case]) -> list[Verdict]:
    """Judge cases on this rank, one after another; ranks that do not refuse alike then hang."""
    torch.set_num_threads(1)
    verdicts = []
    for case in cases:
        faulthandler.dump_traceback_later(case.deadline_s, file=2)
        try:
            forget_compiles()
            verdicts.append(judge_here(case))
        finally:
            faulthandler.cancel_dump_traceback_later()
    return verdicts


# --- On all ranks ------------------------------------------------------------------------------


def judge(case: Case) -> Verdict:
    """Run a case on all ranks, and say what became of it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return join(run_ranks(RANKS, judge_on_rank, case, deadline_s=case.deadline_s))
    except RankError as error:
        text = f"{error}\n{said.getvalue()}"
        if "process died" in text:
            return Verdict("died", text)
        alone = re.search(rf"{ENDED} (refused|error): (.*)", text)
        if alone is not None:
            kind = "unalike" if alone[1] == "refused" else "error"
            return Verdict(kind, f"on one rank, while the other waits: {alone[2]}")
        if "a hang" in text:
            return Verdict("hung", text)
        raise


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """Make one verdict of those of the ranks."""
    kinds = {verdict.kind for verdict in verdicts}
    first = verdicts[0]
    if kinds == {"refused"}:
        is_one = all(names_same_cause(first.why, other.why) for other in verdicts)
        return first if is_one else Verdict("unalike", " | ".join(one.why for one in verdicts))
    if len(kinds) == 1:
        return first
    if "refused" in kinds:
        return Verdict("unalike", " | ".join(f"{one.kind}: {one.why}" for one in verdicts))
    for kind in ("wrong", "warned", "limit", "error"):
        for verdict in verdicts:
            if verdict.kind == kind:
                return verdict
    raise AssertionError(f"no verdict in {kinds}")


def names_same_cause(one: str, other: str) -> bool:
    """Tell whether two ranks' errors are the same but for numbers, or one holds the other."""
    one, other = (re.sub(r"\d+", "N", text) for text in (one, other))
    return one == other or one in other or other in one


def choose(args: argparse.Namespace) -> list[str]:
    """Return the names of the programs that are asked for."""
    names = [
        name
        for name, program in PROGRAMS.items()
        if fnmatch(name, args.only) and (not args.family or program.family in args.family)
    ]
    return sample(names, args.count, args.seed) if args.count else names


def sample(names: Iterable[str], count: int, seed: int) -> list[str]:
    """Draw programs; a larger sample begins with a smaller one."""
    names = list(names)
    Random(seed).shuffle(names)
    return names[:count]


def judge_all(cases: Sequence[Case]) -> Iterator[tuple[Case, Verdict]]:
    for case in cases:
        yield case, judge(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--family", action="append")
    parser.add_argument("--only", default="*", help="name of a program, or a pattern")
    parser.add_argument("--count", type=int, default=0, help="so many of them, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, help="of the sample, and of the places")
    parser.add_argument("--backend", default="cp_aot_eager", help="or cp_inductor")
    parser.add_argument("--deadline", type=float, default=120, help="seconds of one program")
    parser.add_argument("--verbose", action="store_true", help="a line for each program")
    parser.add_argument("--list", action="store_true", help="the names of all programs")
    args = parser.parse_args()
    names = choose(args)
    if args.list:
        print("\n".join(names))
        return
    is_bad = False
    for mode in args.mode or MODES:
        counts: Counter[str] = Counter()
        cases = [Case(name, mode, args.seed, args.backend, args.deadline) for name in names]
        for case, verdict in judge_all(cases):
            counts[verdict.kind] += 1
            if args.verbose or verdict.kind in FAILURES:
                print(f"{mode:8} {verdict.kind:8} {case.name:36} {shorten(verdict)}", flush=True)
        is_bad |= any(counts[kind] for kind in FAILURES)
        print(f"{mode}: {len(names)} programs: "
              + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS), flush=True)  # fmt: skip
    sys.exit(is_bad)


def shorten(verdict: Verdict) -> str:
    """Return one line, but for the stacks of ranks that hang."""
    return verdict.why if verdict.kind in ("hung", "died") else " ".join(verdict.why.split())[:400]


if __name__ == "__main__":
    main()
