"""Random programs around attention, on gloo ranks, in each way to use the library.

    python -m tests.support.hunt --count 600 --way dtensor     or plain, all, or one of `WAYS`
    python -m tests.support.hunt --seed 1234 --way eager       one program
    python -m tests.support.hunt --count 40 --only 'cumsum'    those with a row that holds a pattern

A program embeds tokens, calls rows of `tests/support/idioms.py` and up to two attentions, and ends
in a loss. Drawn are these, and all that a test would hold fixed: lengths of 5 to 40 tokens, even,
odd, and fewer than some ranks need; 1 to 3 sequences, 2 or 3 ranks, which labels count, symbols for
lengths, flags of the planner, and what a step is (`MODES`). It runs once on one process in float64,
and then on shards: loss, gradients of all parameters and buffers must be those of one process. Over
plain shards a loss that is a mean is divided by the number of ranks, and losses and gradients are
summed over them, as README says. What becomes of a program is one of:

    RIGHT       as on one process
    REFUSED     every rank raises a CPError, for the same cause
    ERROR       every rank raises another error, or is told of that of another rank
    WRONG       something differs, whether a warning said so or not
    MIXED       ranks differ: one raises, another does not, or waits for it
    HANG        ranks did not end in time, or a process died

The command prints what is not RIGHT, a line each, and ends with 1 if anything was WRONG, MIXED or
HANG.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import linecache
import os
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count, islice
from random import Random
from types import ModuleType
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import CPError, kept
from cp_inductor.plan.strategies import TABLE as STRATEGIES
from tests.support import idioms
from tests.support.idioms import EXPERTS, FAMILIES, IGNORED, LONGEST, LOSSES, TABLES, VOCAB, WIDTH
from tests.support.ranks import RankError, forget_compiles, run_ranks, world_mesh
from tests.support.reference import full, shard

WAYS = {
    "eager": "DTensors in eager code",
    "aot": "DTensors through cp_aot_eager",
    "region": "plain shards in an eager context_parallel",
    "region_aot": "plain shards in a context_parallel, through cp_aot_eager",
    "mesh": 'plain shards through cp_aot_eager with options={"mesh": mesh}',
}
# Nothing draws "inductor": DTensors through cp_inductor take minutes.
COMPILED = ("aot", "region_aot", "mesh", "inductor")
GROUPS = {"dtensor": ["eager", "aot"], "plain": ["region", "region_aot", "mesh"], "all": [*WAYS]}
# A training step; two, whose gradients add up, or the second of another length; two calls before a
# backward, by one model or by two with the same weights; rows within checkpoints; graph breaks.
MODES = [*["train"] * 3, "steps", "lengths", "twice", "shared", "checkpoint", "break"]
MODES += ["no_grad", "inference", "inference"]
BAD = ("WRONG", "MIXED", "HANG")
LENGTHS = (5, 6, 7, 8, 9, 11, 12, 15, 16, 17, 20, 24, 25, 31, 32, 33, 36, 40)
TOLERANCE = {"": 1e-8, "rounds": 1e-5, "bfloat16": 5e-2}
# How much oftener a row is of these than of other families; plain shards refuse what mixes tokens.
WEIGHTS = {"read": 4, "partial": 4, "loss": 4, "gradient": 2, "attend": 2}
WEIGHTS_OF_PLAIN = {"loss": 4, "means": 2, "sum": 2, "tokenwise": 4}
WEIGHTS_OF_PLAIN |= {"attend": 3, "position": 3, "weights": 2, "pointwise": 2}
# A gradient that is 0 but for rounding is held against this instead of itself.
SMALLEST = 1e-6
DEADLINE_S = 300
# --- What is drawn ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """A composition of rows, and how it is run.

    Attributes:
        seed, way: of `draw`.
        steps: rows of x (B, S, E) that make the next x.
        loss: the row of a number; of a family "random", of numbers (B, S, E).
        write: the row of a parameter p that changes its gradient; "" for none.
        tags: those of the rows.
        batch, lengths: number of sequences, and of tokens of each batch.
        is_whole: compiled with `fullgraph=True`.
        dynamic: "" for static shapes, "auto", or "marked" for symbols in the first graph.
        flags: of `cp_inductor.config`.
    """

    seed: int
    way: str
    steps: tuple[str, ...]
    loss: str = "m.loss(x, b.labels)"
    write: str = ""
    tags: frozenset[str] = frozenset()
    mode: str = "train"
    ranks: int = 2
    batch: int = 2
    lengths: tuple[int, ...] = (12,)
    is_whole: bool = False
    dynamic: str = ""
    flags: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        how = f"{self.mode} {self.ranks} ranks, {self.batch} x {'/'.join(map(str, self.lengths))}"
        if self.way in COMPILED:
            how += f" fullgraph={self.is_whole} {self.dynamic}"
        text = " >> ".join((*self.steps, self.loss, *filter(None, [self.write])))
        return f"--seed {self.seed} --way {self.way} [{how}] {dict(self.flags) or ''} {text}"


SUBJECTS = [*FAMILIES, *LOSSES, "gradient", "random"]


def draw(seed: int, ways: Sequence[str] = GROUPS["all"], only: str = "") -> Program:
    """Draw a program, of which a row holds a pattern."""
    way = Random(f"{seed}, its way").choice(ways)
    random = Random(f"{seed} {way}")
    is_dtensor = way in GROUPS["dtensor"]
    tables = {name: [f"{name}: {row}" for row in TABLES[name]] for name in SUBJECTS}
    weights = WEIGHTS if is_dtensor else WEIGHTS_OF_PLAIN
    if not is_dtensor:  # gradients are summands until they are reduced; the others are refused
        for name in ("gradient", "on_whole", "composite", "along", "mixing", "mixed"):
            del tables[name]
    asked = {name: [row for row in rows if re.search(only, row)] for name, rows in tables.items()}
    steps = ["m.attend(x)"] * random.choice([0, 1, 1, 2] if is_dtensor else [1, 1, 1, 2])
    parts: dict[str, Any] = {"mode": random.choice(MODES)}
    tags: set[str] = set()

    def add(tables: dict[str, list[str]]) -> None:
        names = [name for name, rows in tables.items() if rows]
        (name,) = random.choices(names, [weights.get(name, 1) for name in names])
        row, *said = expand(random.choice(tables[name]), random).split("  # ")
        tags.update(said)
        row = row.removeprefix(f"{name}: ")
        if name in LOSSES:
            parts["loss"] = row
        elif name == "gradient":
            parts.update(write=row, mode="train")
        elif name == "random":
            parts.update(loss=f"ones = torch.ones_like(x); {row} + 0 * x", mode="drawn")
        else:
            steps.insert(0 if name == "embedding" else random.randint(0, len(steps)), row)

    if random.random() < 0.3:
        add({"loss": tables["loss"]})
    for _ in range(random.choice([0, 0, 1]) if is_dtensor else 0):
        add({name: tables[name] for name in FAMILIES})
    for _ in range(random.choice([0, 0, 1])):
        add({name: tables[name] for name in ("tokenwise", "pointwise", "weights")})
    add(asked)
    mode, length = parts["mode"], random.choice(LENGTHS)
    num_batches = 1 if mode in ("train", "drawn", "checkpoint", "break") else 2
    return Program(
        seed,
        way,
        tuple(steps),
        tags=frozenset(tags),
        ranks=random.choice([2, 2, 3]),
        batch=random.choice([1, 2, 2, 3]),
        lengths=(length, random.choice(LENGTHS) if mode == "lengths" else length)[:num_batches],
        is_whole=mode != "break" and random.random() < 0.5,
        dynamic=random.choice(["", "", "", "auto", "marked"]),
        flags=draw_flags(random) if random.random() < 0.25 else (),
        **parts,
    )


def draw_flags(random: Random) -> tuple[tuple[str, Any], ...]:
    flags = {
        "strategy": ["auto", *STRATEGIES],
        "stages": [0, 1, 2, 3],
        "keep_bytes": [0, 10_000, 1 << 30],
        "schedule": ["global", "local", "none"],
    }
    return tuple((name, random.choice(values)) for name, values in flags.items())


def expand(row: str, random: Random) -> str:
    """Put a row of its table in the place of each `$name`."""
    chosen: dict[str, str] = {}

    def choose(match: re.Match[str]) -> str:
        if match[0] not in chosen:
            chosen[match[0]] = expand(random.choice(TABLES[match[1]]), random)
        text, *said = chosen[match[0]].split("  # ")
        tags.extend(said)
        return text

    tags: list[str] = []
    text = re.sub(r"\$([a-z_]+)\d*", choose, row)
    return "  # ".join([text, *tags])


# --- The program --------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Inputs of a program; all but the image have the tokens in dim 1.

    Attributes:
        ids, labels: (B, S), integers.
        answers: labels of which some are ignored, unevenly spread.
        places: (B, S), 0 to S - 1.
        keep: (B, S), False at the ends of entries.
        weights: (B, S), floats.
        image: (B, 5, E), floats.
    """

    ids: Tensor
    labels: Tensor
    answers: Tensor
    places: Tensor
    keep: Tensor
    weights: Tensor
    image: Tensor


# The dims of the tokens, for compilers.
SEQ_DIMS = {name: None if name == "image" else 1 for name in Batch._fields}


def make_batches(program: Program) -> list[Batch]:
    return [make_batch(program, number) for number in range(len(program.lengths))]


def make_batch(program: Program, number: int) -> Batch:
    random = Random(f"{program.seed}, batch {number}")
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    shape = program.batch, program.lengths[number]
    ids, labels = (torch.randint(0, VOCAB, shape, generator=generator) for _ in range(2))
    places = torch.arange(shape[1]).expand(shape).contiguous()
    ignored = (places < random.randint(1, shape[1] - 2)) & (places % random.choice([1, 2, 3]) == 0)
    answers = labels.masked_fill(ignored, IGNORED)
    ends = torch.tensor([[random.randint(2, shape[1])] for _ in range(shape[0])])
    weights = torch.rand(shape, generator=generator, dtype=torch.float64)
    image = torch.randn(shape[0], 5, WIDTH, generator=generator, dtype=torch.float64)
    return Batch(ids, labels, answers, places, places < ends, weights, image)


class Model(nn.Module):
    """A program with its parameters, in float64."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head, self.mix = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.norm = nn.LayerNorm(WIDTH)
        self.rows = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.cls = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        text, modules = source_of(program)
        self.parts = nn.ModuleList(eval(module, vars(idioms)) for module in modules)
        # A smaller program, or a twin, has the same seed and other rows.
        self.run = compile_source(text, f"program_{program.seed}_{crc32(text.encode())}")

    # Inputs have the names that `seq_dims` has.
    def forward(self, ids, labels, answers, places, keep, weights, image):
        return self.run(self, Batch(ids, labels, answers, places, keep, weights, image))

    def heads(self, x: Tensor, project: nn.Module | None = None) -> list[Tensor]:
        """Return query, key and value, (B, H, S, D)."""
        return [idioms.split_heads(t) for t in (project or self.first)(x).chunk(3, -1)]

    def attend(self, x: Tensor, project: nn.Module | None = None, **how: Any) -> Tensor:
        heads = self.heads(x, project)
        return x + idioms.attention(*heads, **(how or {"is_causal": True}))

    def float_attend(self, x: Tensor) -> Tensor:
        projected = nn.functional.linear(x.float(), self.first.weight.float())
        return idioms.attention(*(idioms.split_heads(t) for t in projected.chunk(3, -1))).double()

    def loss(self, x: Tensor, labels: Tensor, **how: Any) -> Tensor:
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), **how)

    def pick(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probabilities of labels, (B, S)."""
        return self.head(x).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def source_of(program: Program) -> tuple[str, list[str]]:
    """Return the text of a program, a function `run(m, b)`, and of its modules."""
    modules: list[str] = []
    functions, calls = [], ["x = m.embed(b.ids)"]

    def module(match: re.Match[str]) -> str:
        modules.append(match[1])
        return f"m.parts[{len(modules) - 1}]"

    for number, row in enumerate((*program.steps, program.loss)):
        *statements, result = re.sub(r"`([^`]*)`", module, row).split("; ")
        body = "".join(f"    {line}\n" for line in (*statements, f"return {result}"))
        functions.append(f"def row_{number}(x, m, b):\n{body}")
        call = f"row_{number}(x, m, b)"
        if program.mode == "checkpoint" and number < len(program.steps):
            call = f"checkpoint(lambda x: {call}, x, use_reentrant=False)"
        if program.mode == "break":
            calls.append("torch._dynamo.graph_break()")
        calls.append(f"x = {call}")
    calls.append("return x")
    body = "".join(f"    {line}\n" for line in calls)
    return "\n".join((*functions, f"def run(m, b):\n{body}")), modules


def compile_source(text: str, name: str) -> Any:
    """Return `run` of a module of its own: Dynamo looks up what is global by its name."""
    linecache.cache[f"{name}.py"] = (len(text), None, text.splitlines(True), name)  # for tracebacks
    module = sys.modules[name] = ModuleType(name)
    names = {key: value for key, value in vars(idioms).items() if not key.startswith("__")}
    vars(module).update(names)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return vars(module)["run"]


def make_model(program: Program) -> Model:
    torch.manual_seed(0)
    return Model(program).double()


# --- Running it ---------------------------------------------------------------------------------

Result = dict[str, Any]


def on_one_process(program: Program) -> Result:
    model = make_model(program)
    return step(program, model, make_batches(program))


def step(
    program: Program,
    model: nn.Module,
    batches: Sequence[Batch],
    prepare: Callable[[nn.Module], Any] = lambda model: model,
    share: float = 1.0,
) -> Result:
    """Call a model with batches as the mode says; return losses, gradients, and what has changed.

    Losses are multiplied by a share. `prepare` returns what is called instead of a model.
    """
    call = twin = prepare(model)
    if program.mode == "shared":
        twin = prepare(copy.deepcopy(model, {id(p): p for p in model.parameters()}))
    grad_mode = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    outs: list[Tensor] = []
    with grad_mode.get(program.mode, contextlib.nullcontext)():
        for batch in batches:
            out = (twin if outs else call)(*(marked(program, t) for t in batch)) * share
            is_kept = program.mode in ("twice", "shared")
            if out.requires_grad and not is_kept:
                out.sum().backward()
            outs.append(out if is_kept else out.detach())
    if outs[0].requires_grad:
        sum(outs).backward()  # type: ignore[union-attr]
    for p in model.parameters():
        if program.write and p.grad is not None:
            exec(program.write, {"p": p, "torch": torch})
    found = {f"loss {number}": out.detach() for number, out in enumerate(outs)}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {name: p.detach() for name, p in model.named_parameters()} if program.write else {}
    return found | dict(model.named_buffers())


def over_dtensors(program: Program) -> Result:
    mesh = world_mesh()
    model = cp_inductor.parallelize(make_model(program), mesh)
    shards = [
        Batch(*(distribute_tensor(t, mesh, [Shard(1)]) for t in batch[:-1]),
              distribute_tensor(batch.image, mesh, [Replicate()]))
        for batch in make_batches(program)
    ]  # fmt: skip
    with implicit_replication():
        found = step(program, model, shards, partial(compiled, program))
        return {name: full(dense(tensor)) for name, tensor in found.items()}


def dense(tensor: Any) -> Any:
    return tensor.to_dense() if tensor is not None and tensor.is_sparse else tensor


def compiled(program: Program, model: nn.Module, options: Any = None) -> Any:
    """Return a model as its way is to call it."""
    if program.way not in COMPILED:
        return model
    dynamic = None if program.dynamic else False
    how: Any = {"fullgraph": program.is_whole, "dynamic": dynamic, "options": options}
    backend = "cp_inductor" if program.way == "inductor" else "cp_aot_eager"
    return torch.compile(model, backend=backend, **how)


def marked(program: Program, tensor: Tensor) -> Tensor:
    if program.dynamic == "marked" and program.way in COMPILED and tensor.shape[-1] != WIDTH:
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    return tensor


def over_plain_shards(program: Program) -> Result:
    mesh, model, batches = world_mesh(), make_model(program), make_batches(program)
    torch.manual_seed(mesh.get_local_rank())  # ranks are to draw numbers of their own
    options: dict[str, Any] = {"seq_dims": SEQ_DIMS}
    share = 1.0 if "sum" in program.tags or program.mode == "drawn" else 1 / mesh.size()
    found: Result = {}
    # Sequences of another length are another region.
    groups = [[batch] for batch in batches] if program.mode == "lengths" else [batches]
    for number, some in enumerate(groups):
        if program.way == "mesh":
            options |= {"mesh": mesh, "seq_len": some[0].ids.shape[1]}
            some = [Batch(*(piece(t, mesh) for t in b[:-1]), b.image) for b in some]
            region: Any = contextlib.nullcontext()
        else:
            buffers = [t for batch in some for t in batch[:-1]]
            dims = [1] * len(buffers)
            region = cp_inductor.context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims)
        with region:
            said = step(program, model, some, partial(compiled, program, options=options), share)
        found |= {f"loss {number}" if name == "loss 0" else name: t for name, t in said.items()}
    parameters = {f"gradient of {name}": p for name, p in model.named_parameters()}
    return {n: over_ranks(program, n, tensor, parameters.get(n)) for n, tensor in found.items()}


def piece(tensor: Tensor, mesh: Any) -> Tensor:
    """Return this rank's shard, which may be empty."""
    return shard(tensor, mesh.get_local_rank(), mesh.size(), 1).clone()


def over_ranks(program: Program, name: str, tensor: Any, p: Any) -> Any:
    """Add up what ranks have found, of which a gradient may be None; put drawn numbers together."""
    if name.startswith("loss") and program.mode == "drawn":
        pieces: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(pieces, tensor)
        return torch.cat(pieces, 1)
    if name.startswith(("loss", "gradient")):
        tensor = torch.zeros_like(p) if tensor is None else dense(tensor).clone()
        dist.all_reduce(tensor)
    return tensor


# --- Judging ------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """What became of a program, on a rank or on all, and why."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {' '.join(self.why.split())[:600]}"


def draw_many(seed: int, ways: Sequence[str], only: str = "") -> Iterator[Program]:
    """Draw programs that one process can run, of seeds that follow each other."""
    return filter(is_program, (draw(number, ways, only) for number in count(seed)))


def is_program(program: Program) -> bool:
    """Tell whether one process can run it, to numbers that are finite.

    What reads the length of a plain shard is a known limit, and no program.
    """
    if program.way in GROUPS["plain"] and "length" in program.tags:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = on_one_process(program)
    except Exception:
        return False
    return all(t is None or dense(t).isfinite().all() for t in found.values())


def judge_here(program: Program) -> Verdict:
    """Run a program on this rank, and say what became of it."""
    expected = on_one_process(program)
    forget_all_but_plans()  # what an eager region has checked once, it does not check again
    run = over_plain_shards if program.way in GROUPS["plain"] else over_dtensors
    try:
        with cp_inductor.config.patch(**dict(program.flags)):
            found = run(program)
    except CPError as error:
        return Verdict("REFUSED", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Verdict("ERROR", f"{type(error).__name__}: {error} {place_of(error)}")
    wrong = difference(program, found, expected)
    return Verdict("WRONG", wrong) if wrong else Verdict("RIGHT")


def forget_all_but_plans() -> None:
    """Do what `cp_inductor.reset` does, but keep plans, which follow from their recipes alone."""
    for drop in kept._drops:
        cache = getattr(drop, "__self__", None)  # of a function, whose module it names
        if not str(getattr(cache, "__module__", "")).startswith("cp_inductor.plan."):
            drop()


def difference(program: Program, found: Result, expected: Result) -> str:
    """Say what differs most; nothing if nothing does."""
    if program.mode == "drawn":
        return check_drawn(found["loss 0"], program.ranks)
    tolerance = max(TOLERANCE.get(tag, 0.0) for tag in ("", *program.tags))
    wrong: dict[str, float] = {}
    for name, wanted in expected.items():
        actual = found[name]
        if wanted is None or actual is None:  # nothing reached it, which is a gradient of zeros
            wanted, actual = (torch.zeros(1) if t is None else dense(t) for t in (wanted, actual))
        elif (wanted := dense(wanted)).shape != actual.shape:
            return f"{name}: {tuple(actual.shape)} != {tuple(wanted.shape)}"
        error = (actual.double() - wanted.double()).abs().max().item()
        size = max(wanted.abs().max().item(), SMALLEST)
        if not error <= tolerance * size:
            wrong[name] = error / size
    said = [f"{name} off by {error:.2g}" for name, error in wrong.items()]
    return ", ".join([*said[:3], *[f"{len(said) - 3} more"] * (len(said) > 3)])


def check_drawn(drawn: Tensor, ranks: int) -> str:
    """Say why numbers are not drawn for each token by itself; about half of them must be 0."""
    zeros = (drawn == 0).double().mean().item()
    if not 0.2 < zeros < 0.8:
        return f"{zeros:.0%} of what was drawn is 0"
    first, *others = drawn.chunk(ranks, 1)
    same = [torch.equal(first[:, : t.shape[1]], t) for t in others if t[..., 0].numel() > 20]
    return "two ranks drew the same numbers" if any(same) else ""


def place_of(error: Exception) -> str:
    """Name the last line of ours that an error passed, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "cp_inductor/" in frame.filename]
    return f"[{ours[-1].filename.rsplit('cp_inductor/')[-1]}:{ours[-1].lineno}]" if ours else ""


class OthersWait(Exception):
    """This rank has ended, and another has not: it waits for this one, or hangs by itself."""


def judge_on_rank(programs: Sequence[Program]) -> list[Verdict]:
    """Judge programs one after another; ranks meet behind each.

    Raises:
        OthersWait: this rank has a verdict, and others did not end soon after.
    """
    torch.set_num_threads(1)
    verdicts = []
    for program in programs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forget_compiles()
            verdicts.append(judge_here(program))
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=DEADLINE_S / 3))
        except RuntimeError as error:
            raise OthersWait(f"a rank ended, others did not: {verdicts[-1]}") from error
    return verdicts


def judge_many(programs: Sequence[Program]) -> dict[Program, list[Verdict]]:
    """Return what each rank says of programs, which run one after another."""
    found: dict[Program, list[Verdict]] = {}
    for ranks in sorted({program.ranks for program in programs}):
        some = [program for program in programs if program.ranks == ranks]
        every = run_ranks(ranks, judge_on_rank, some, deadline_s=120 + 60 * len(some))
        found |= {program: said for program, *said in zip(some, *every, strict=True)}
    return found


def judge(program: Program) -> Verdict:
    """Run a program on all ranks, and say what became of it."""
    verdict = judge_on_ranks(program)
    if verdict.kind == "WRONG" and program.way in COMPILED and is_miscompiled(program):
        return Verdict("ERROR", f"torch compiles it so on one process: {verdict.why}")
    return verdict


def is_miscompiled(program: Program) -> bool:
    """Whether torch's own compiler makes other numbers of it on one process."""
    compile_one = partial(torch.compile, backend="aot_eager_decomp_partition", dynamic=False)
    try:
        found = step(program, make_model(program), make_batches(program), compile_one)
    except Exception:
        return False  # which is no excuse for other numbers
    return bool(difference(program, found, on_one_process(program)))


def judge_on_ranks(program: Program) -> Verdict:
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            ranks = run_ranks(program.ranks, judge_on_rank, [program], deadline_s=DEADLINE_S)
        return join([verdict for (verdict,) in ranks])
    except RankError as error:
        text = str(error)
        alone = re.search(r"OthersWait: (.*)", text)
        if alone is not None and "process died" not in text:
            return Verdict("MIXED", alone[1])
        return Verdict("HANG", last_lines(text))


def last_lines(text: str) -> str:
    """Return where our code stands in the stacks of ranks that hang, or died."""
    found = [" hangs" if "process died" not in text else " died"]
    for stack in re.split(r"^rank \d+: ", text, flags=re.MULTILINE)[1:]:
        places = re.findall(r"(\w+/\w+\.py)\", line (\d+) in (\w+)", stack)
        found.append(" < ".join(":".join(place) for place in places[:6]))
    return " | ".join(found)


def join(verdicts: Sequence[Verdict]) -> Verdict:
    """Make one verdict of those of the ranks."""
    kinds = {verdict.kind for verdict in verdicts}
    wrong = [verdict for verdict in verdicts if verdict.kind == "WRONG"]
    if kinds <= {"RIGHT", "WRONG"} or kinds == {"ERROR"}:
        return (wrong or verdicts)[0]
    # Ranks that could go on are told what another one refuses.
    own = [verdict for verdict in verdicts if "RanksDisagree" not in verdict.why] or verdicts
    if {verdict.kind for verdict in own} == {"ERROR"} and kinds == {"ERROR", "REFUSED"}:
        return own[0]
    if kinds == {"REFUSED"} and all(names_same_cause(own[0].why, other.why) for other in own):
        return own[0]
    return Verdict("MIXED", " | ".join(str(verdict)[:200] for verdict in verdicts))


def names_same_cause(one: str, other: str) -> bool:
    """Tell whether two ranks name one cause, but for numbers; or one says what the other said."""
    one, other = (re.sub(r"\d+", "N", text.split("; ")[0]) for text in (one, other))
    return one == other or one in other or other in one


# --- The command line ---------------------------------------------------------------------------


def main(command: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1, help="of programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--way", default="all", choices=[*GROUPS, *WAYS])
    parser.add_argument("--only", default="", help="a pattern, in the text 'family: row'")
    parser.add_argument("--show", action="store_true", help="print programs, and run none")
    args, counts = parser.parse_args(command), Counter[str]()
    programs = draw_many(args.seed, GROUPS.get(args.way, [args.way]), args.only)
    for program in islice(programs, args.count):
        verdict = Verdict(source_of(program)[0]) if args.show else judge(program)
        counts[verdict.kind] += 1
        if verdict.kind != "RIGHT":
            print(f"{verdict}\n    {program}", flush=True)
    print("" if args.show else dict(counts.most_common()))
    sys.exit(any(counts[kind] for kind in BAD))


if __name__ == "__main__":
    main(sys.argv[1:])
