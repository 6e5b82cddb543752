"""Random small models around attention, on gloo ranks, forward and backward, against float64.

    python -m tests.support.fuzz --count 2000
    python -m tests.support.fuzz --count 1 --seed 1234     a case that was found wrong

Drawn are what stands around attentions (residuals, norms, RoPE, keys and values that layers share,
attention of attention, views and in-place operations between, checkpoints, autocast, graph breaks),
lengths of 1 to 300 tokens, 1 to 4 ranks, dtypes, masks, and how it is planned: strategy, stages,
what is kept, when. Shards are those of a region, of a mesh that is an option, or DTensors;
code is eager or compiled by cp_aot_eager, or some by cp_inductor. A model runs on two batches, of
which the second may be of another length: in a training, without gradients, or twice before each
backward, by the same model or by another one that has its weights.

Expected is the same model in float64 on one process. A result is wrong where it is further off than
the tolerance of its dtype (`tests/support/reference.py`), times the layers, and than a few times
what the same model in the same dtype is off on one process.

The command prints what was drawn, how often, and each case that is wrong, with its seed; it ends
with 1 if there is any. Refusals, the errors of this library, are counted by class: a combination
that is refused is not wrong, but `EXPECTED_REFUSALS` lists what may be.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor.plan.strategies import TABLE
from tests.support.ranks import RankError, forget_compiles, run_ranks
from tests.support.reference import TOLERANCE

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "autocast": torch.float32,
}
LENGTHS = (1, 2, 3, 4, 5, 7, 16, 31, 64, 97, 100, 128, 130, 197, 255, 256, 300)
STRATEGIES = ("auto", "auto", *TABLE, "heads2+blocks")
MASKS = ("causal", "causal", "full", "documents", "documents", "window", "padding", "alibi")

# What may be refused, by name of the error.
EXPECTED_REFUSALS = {"UnsupportedStrategy", "UnsupportedAttention", "UnevenSequence"}

# What is known to fail, by seed of `a_case(seed, compiled=1)`: tests leave it out.
KNOWN = {
    1013: "DTensors of fewer tokens than ranks, under a compiled checkpoint: AOTAutograd's assert",
    70201: "DTensors of a dynamic length: torch recurses without end, in aot_eager too",
    70522: "the same",
    1015: "a bias of a dynamic length beside DTensors: refused within implicit_replication()",
}

# How often a case is compiled: it takes seconds instead of milliseconds.
COMPILED = 0.1


# --- What is drawn ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One attention, and what stands around it."""

    mask: str
    norm: str
    has_rope: bool
    has_residual: bool
    shares_kv: bool  # keys and values of the first layer
    is_of_attention: bool  # attends once more, with what it has found for a query
    views: str
    in_place: bool
    is_checkpointed: bool
    breaks_graph: bool


@dataclass(frozen=True)
class Case:
    """One model, its batches, and how it is run."""

    seed: int
    world_size: int
    form: str
    shards: str
    dtype: str
    batch: int
    lengths: tuple[int, int]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    strategy: str
    stages: int
    keep_bytes: int
    plan: str
    schedule: str
    is_dynamic: bool
    mode: str = "training"
    is_marked: bool = False  # its lengths are dynamic from the first graph on


def a_case(seed: int, compiled: float = COMPILED, inductor: float = 0.0) -> Case:
    """Draw one; what does not go together is refused."""
    case, random = _a_training(seed, compiled), Random(f"{seed}, what came later")
    form = "cp_inductor" if random.random() < inductor else case.form
    return replace(
        case,
        form="eager" if case.form == "eager" else form,
        mode=random.choice(["training", "training", "no_grad", "twice", "shared"]),
        is_marked=case.is_dynamic and random.random() < 0.5,
    )


def _a_training(seed: int, compiled: float) -> Case:
    random = Random(seed)
    form = "cp_aot_eager" if random.random() < compiled else "eager"
    shards = random.choice(["region", "region", "DTensors", "mesh"])
    if form == "eager" and shards == "mesh":
        shards = "region"  # an option of a compile
    # Stock DTensor cannot run a linear layer on one token that is sharded (torch 2.13).
    all_lengths = LENGTHS[1:] if shards == "DTensors" else LENGTHS
    length = random.choice(all_lengths)
    is_dynamic = random.random() < 0.3
    num_kv_heads = random.choice([1, 2, 3])
    # Masks of DTensors are read from graphs; other combinations are refused.
    has_no_masks = shards == "mesh" or (form, shards) == ("eager", "DTensors")
    masks = ("causal", "full") if has_no_masks or random.random() < 0.3 else MASKS
    may_break = form == "cp_aot_eager" and shards == "region"
    # A checkpoint that is compiled in a region wants masks of the shard: Dynamo says so.
    can_checkpoint = (form, shards) != ("cp_aot_eager", "region") or masks is not MASKS
    layers = tuple(
        Layer(
            mask=random.choice(masks),
            norm=random.choice(["layer", "rms", "none"]),
            has_rope=random.random() < 0.5,
            has_residual=random.random() < 0.7,
            shares_kv=random.random() < 0.2,
            is_of_attention=random.random() < 0.15,
            views=random.choice(["unflatten", "view", "chunk", "permute"]),
            in_place=random.random() < 0.3,
            is_checkpointed=can_checkpoint and random.random() < 0.2,
            breaks_graph=may_break and random.random() < 0.2,
        )
        for _ in range(random.choice([1, 1, 2, 3]))
    )
    has_tables = any(layer.mask in ("documents", "padding") for layer in layers)
    has_masks = any(layer.mask not in ("causal", "full") for layer in layers)
    plan = random.choice(["auto", "static"] + ["runtime"] * (has_tables and form != "eager"))
    world_size = random.choice([1, 2, 2, 3, 4])
    # Most of those that would be refused are not drawn: that they are is tested elsewhere.
    strategies = [
        strategy
        for strategy in STRATEGIES
        if not (strategy.startswith("heads") and num_kv_heads % world_size)
        and not (strategy.startswith("heads2") and (num_kv_heads % 2 or world_size % 2))
        and (strategy in ("auto", "ring", "allgather", "rows") or form != "eager" or not has_masks)
    ]
    return Case(
        seed=seed,
        world_size=world_size,
        form=form,
        shards=shards,
        dtype=random.choice(list(DTYPES)),
        batch=random.choice([1, 1, 2, 3]),
        lengths=(length, random.choice(all_lengths) if is_dynamic else length),
        num_heads=num_kv_heads * random.choice([1, 1, 2]),
        num_kv_heads=num_kv_heads,
        head_dim=random.choice([2, 4, 8, 16]),
        layers=layers,
        strategy="auto" if plan == "runtime" else random.choice(strategies),
        stages=random.choice([0, 0, 1, 2, 3]),
        keep_bytes=random.choice([0, 0, 10_000, 1 << 30]),
        plan=plan,
        schedule=random.choice(["global", "local", "none"]),
        is_dynamic=is_dynamic,
    )


# --- The model --------------------------------------------------------------------------------


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the halves of each head, x (B, S, H, D), by angles (S, D)."""
    left, right = x.chunk(2, dim=-1)
    cos, sin = (function(angles)[None, :, None].to(x.dtype) for function in (torch.cos, torch.sin))
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, case: Case, layer: Layer) -> None:
        super().__init__()
        self.case, self.layer = case, layer
        dim, kv_dim = (n * case.head_dim for n in (case.num_heads, case.num_kv_heads))
        self.sizes = (dim, kv_dim, kv_dim)
        self.project = nn.Linear(dim, sum(self.sizes), bias=False)
        self.out = nn.Linear(dim, dim)
        norms = {"layer": nn.LayerNorm(dim), "rms": nn.RMSNorm(dim), "none": nn.Identity()}
        self.norm = norms[layer.norm]

    def forward(
        self, x: Tensor, angles: Tensor, mask: Tensor | None, shared: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        case, layer = self.case, self.layer
        query, key, value = (
            self.heads(t) for t in self.project(self.norm(x)).split(self.sizes, -1)
        )
        if layer.has_rope:
            query, key = rotate(query, angles), rotate(key, angles)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        if layer.shares_kv and shared is not None:
            key, value = shared
        if layer.breaks_graph:
            torch._dynamo.graph_break()
        found = query
        for _ in range(1 + layer.is_of_attention):
            found = F.scaled_dot_product_attention(
                found,
                key,
                value,
                attn_mask=mask,
                is_causal=layer.mask == "causal",
                enable_gqa=case.num_heads != case.num_kv_heads,
            )
        if layer.views == "permute":
            joined = found.permute(0, 2, 1, 3).reshape(*x.shape)
        else:
            joined = found.transpose(1, 2).flatten(2)
        if layer.in_place:
            joined = joined.clone()
            joined.mul_(0.5).add_(0.25)
            joined[..., :1].mul_(2.0)
        y = self.out(joined)
        return (x + y if layer.has_residual else y), key, value

    def heads(self, x: Tensor) -> Tensor:
        """Return (B, S, H, D)."""
        views, dim = self.layer.views, self.case.head_dim
        if views == "view":
            # On a rank without tokens, -1 may be anything.
            return x.contiguous().view(*x.shape[:2], x.shape[-1] // dim, dim)
        if views == "chunk":
            return torch.stack(x.split(dim, -1), 2)
        return x.unflatten(-1, (x.shape[-1] // dim, dim))


class Model(nn.Module):
    """Numbers (B, S, E) to numbers (B, S, E)."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.layers = nn.ModuleList(Attention(case, layer) for layer in case.layers)

    def forward(
        self, x: Tensor, angles: Tensor, documents: Tensor, real: Tensor, slopes: Tensor
    ) -> Tensor:
        shared = None
        for layer in self.layers:
            mask = make_mask(layer.layer.mask, documents, real, slopes)
            arguments = (x, angles, mask, shared)
            if layer.layer.is_checkpointed:
                x, *kv = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x, *kv = layer(*arguments)
            shared = shared or tuple(kv)
        return x


def make_mask(name: str, documents: Tensor, real: Tensor, slopes: Tensor) -> Tensor | None:
    """Return a mask, (B | 1, H | 1, S, S), of document numbers (B, S) and real tokens (B, S)."""
    if name in ("causal", "full"):
        return None
    place = torch.arange(documents.shape[1])
    distance = place[:, None] - place[None]
    if name == "documents":
        same = documents[:, :, None] == documents[:, None]
        return ((distance >= 0) & same)[:, None]
    if name == "window":
        return ((distance >= 0) & (distance < 9))[None, None]
    if name == "padding":
        return real[:, None, None, :]
    bias = slopes[:, None, None] * -distance.to(slopes.dtype)
    return bias.masked_fill(distance < 0, float("-inf"))[None]


@dataclass(frozen=True)
class Batch:
    """What a model is called with, whole, and the gradient of its result."""

    tensors: tuple[Tensor, ...]
    grad_out: Tensor


def make_batch(case: Case, which: int) -> Batch:
    generator = torch.Generator().manual_seed(2 * case.seed + which)
    length, dim = case.lengths[which], case.num_heads * case.head_dim
    dtype = DTYPES[case.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    x, grad_out = normal(case.batch, length, dim), normal(case.batch, length, dim)
    powers = 10_000.0 ** -(
        torch.arange(case.head_dim // 2, dtype=torch.float64) * 2 / case.head_dim
    )
    angles = torch.outer(torch.arange(length, dtype=torch.float64), powers).repeat(1, 2)
    starts = torch.rand(case.batch, length, generator=generator) < 0.07
    real = torch.arange(length) < torch.tensor(
        [[max(1, length - 5 * entry)] for entry in range(case.batch)]
    )
    slopes = 2.0 ** -torch.arange(1, case.num_heads + 1)
    tensors = (x, angles.to(dtype), starts.long().cumsum(1), real, slopes.to(dtype))
    return Batch(tensors, grad_out)


# --- Running it -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """Output and gradient of the input of each batch; gradients of weights, of all."""

    outs: tuple[Tensor, ...]
    input_grads: tuple[Tensor, ...]
    weight_grads: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        found = {f"out {n}": out for n, out in enumerate(self.outs)}
        found |= {f"grad {n}": grad for n, grad in enumerate(self.input_grads)}
        return found | self.weight_grads


def weight_grads(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


def run_whole(case: Case, model: nn.Module, batches: Sequence[Batch], dtype: torch.dtype) -> Result:
    """Run a model on one process."""
    model = copy.deepcopy(model).to(dtype)
    outs, grads = [], []
    for batch in batches:
        x, *others = (t.to(dtype) if t.is_floating_point() else t for t in batch.tensors)
        x = x.clone().requires_grad_()
        is_autocast = case.dtype == "autocast" and dtype != torch.float64
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            out = forward(case, model, model, x, *others)
        backward(case, out, batch.grad_out)
        outs.append(out.detach())
        grads.append(grad_of(x))
    return Result(tuple(outs), tuple(grads), weight_grads(model))


def forward(case: Case, call: Any, other: Any, x: Tensor, *others: Any) -> Tensor:
    """Call a model, and perhaps once more, itself or another one with its weights."""
    with torch.set_grad_enabled(case.mode != "no_grad"):
        out: Tensor = call(x, *others)
        return out + other(0.5 * x, *others) if case.mode in ("twice", "shared") else out


def backward(case: Case, out: Tensor, grad: Tensor) -> None:
    if case.mode != "no_grad":
        out.backward(grad.to(out.dtype))


def grad_of(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


@contextmanager
def flags_of(case: Case) -> Iterator[dict[str, Any]]:
    """Ask for a plan, by flags; yield options of a compile."""
    with cp_inductor.config.patch(
        strategy=case.strategy,
        stages=case.stages,
        keep_bytes=case.keep_bytes,
        schedule=case.schedule,
    ):
        # In its own turn: a flag would be refused by attentions that read no table.
        yield {"plan": case.plan}


def run_sharded(case: Case, model: Model, batches: Sequence[Batch], mesh: DeviceMesh) -> Result:
    """Run a model on this rank's shards; return whole results, on every rank."""
    model = copy.deepcopy(model).to(DTYPES[case.dtype])
    run = {"region": in_region, "DTensors": on_dtensors, "mesh": on_plain_shards}[case.shards]
    if case.shards == "DTensors":
        cp_inductor.distribute(model, mesh)
    with flags_of(case) as options:
        call: Any = model
        if case.form != "eager":
            if case.shards != "DTensors":
                # Named: of angles (8, 8), either dim could be the tokens.
                options["seq_dims"] = {"x": 1, "angles": 0, "slopes": None}
            if case.shards == "mesh":
                options["mesh"] = mesh
            is_whole = not any(layer.breaks_graph for layer in case.layers)
            call = torch.compile(
                model,
                backend=case.form,
                fullgraph=is_whole,
                options=options,
                dynamic=None if case.is_dynamic else False,
            )
        other = call
        if case.mode == "shared":
            other = copy.deepcopy(model, {id(p): p for p in model.parameters()})
            if case.form != "eager":
                dynamic = None if case.is_dynamic else False
                how: Any = {"backend": case.form, "fullgraph": is_whole, "options": options}
                other = torch.compile(other, dynamic=dynamic, **how)
        outs, grads = [], []
        for batch in batches:
            if case.shards == "mesh" and case.form != "eager":
                options["seq_len"] = batch.grad_out.shape[1]
            out, grad = run(case, partial(forward, case, call, other), batch, mesh)
            outs.append(out)
            grads.append(grad)
    sums = weight_grads(model)
    for name, grad in sums.items():
        if isinstance(grad, DTensor):
            sums[name] = grad.full_tensor()
        else:
            dist.all_reduce(grad)
    return Result(tuple(outs), tuple(grads), sums)


def marked(case: Case, tensor: Tensor, dim: int) -> Tensor:
    if case.is_marked and case.form != "eager":
        torch._dynamo.maybe_mark_dynamic(tensor, dim)
    return tensor


def autocast_of(case: Case) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "autocast")


def gather(piece: Tensor, mesh: DeviceMesh) -> Tensor:
    """Put the shards of all ranks together, (B, S, E)."""
    pieces: list[Any] = [None] * mesh.size()
    dist.all_gather_object(pieces, piece)
    return torch.cat(pieces, 1)


def in_region(case: Case, call: Any, batch: Batch, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    x, angles, documents, real, slopes = (t.clone() for t in batch.tensors)
    grad_out = batch.grad_out.clone()
    # Masks are of the whole sequence, and so is what they are made of.
    buffers = [x, angles, grad_out]
    with cp_inductor.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 0, 1]):
        leaf = x.clone().requires_grad_()
        with autocast_of(case):
            out = call(marked(case, leaf, 1), angles.clone(), documents, real, slopes)
        backward(case, out, grad_out)
    # Only a backward says that nobody reads this rank's numbers for those of all.
    return gather(out.detach(), mesh), gather(grad_of(leaf), mesh)


def on_plain_shards(case: Case, call: Any, batch: Batch, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    rank, size = mesh.get_local_rank(), mesh.size()
    x, angles, documents, real, slopes = batch.tensors

    def piece(tensor: Tensor, dim: int) -> Tensor:
        pieces = tensor.chunk(size, dim)
        empty = tensor.narrow(dim, 0, 0)
        return (pieces[rank] if rank < len(pieces) else empty).clone()

    leaf = piece(x, 1).requires_grad_()
    with autocast_of(case):
        whole = marked(case, leaf, 1), marked(case, piece(angles, 0), 0)
        out = call(*whole, piece(documents, 1), piece(real, 1), slopes)
    backward(case, out, piece(batch.grad_out, 1))
    return gather(out.detach(), mesh), gather(grad_of(leaf), mesh)


def on_dtensors(case: Case, call: Any, batch: Batch, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    x, angles, documents, real, slopes = batch.tensors

    def shard(tensor: Tensor, dim: int) -> DTensor:
        return cp_inductor.shard(tensor, mesh, dim).detach()

    leaf = shard(x, 1).requires_grad_()
    whole_slopes = distribute_tensor(slopes, mesh, [Replicate()])
    with implicit_replication(), autocast_of(case):
        x = marked(case, leaf, 1)
        out = call(x, shard(angles, 0), shard(documents, 1), shard(real, 1), whole_slopes)
    with implicit_replication():
        backward(case, out, shard(batch.grad_out, 1))
        results = (out.detach(), grad_of(leaf))
        found = (cp_inductor.unshard(t, 1) for t in results)
        return tuple(found)  # type: ignore[return-value]


# --- Comparing --------------------------------------------------------------------------------


def check(case: Case) -> str:
    """Hold a case against what is right, on the ranks of the world; say what became of it."""
    torch.manual_seed(case.seed)
    model = Model(case).double()
    # What is compared starts from the same rounded weights.
    model = model.to(DTYPES[case.dtype]).double()
    batches = [make_batch(case, which) for which in range(2)]
    exact = run_whole(case, model, batches, torch.float64).named()
    single = run_whole(case, model, batches, DTYPES[case.dtype]).named()
    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    try:
        found = run_sharded(case, model, batches, mesh).named()
    except cp_inductor.CPError as error:
        return f"refused: {type(error).__name__}: {error}"
    dtype = torch.bfloat16 if case.dtype == "autocast" else DTYPES[case.dtype]
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        actual = found[name]
        assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
        assert actual.isfinite().all() or not expected.isfinite().all(), f"{name}: not finite"
        error, alone = (
            (one[name].double() - expected).nan_to_num().abs().max().item()
            for one in (found, single)
        )
        size = max(1.0, expected.nan_to_num().abs().max().item())
        bound = max(4 * len(case.layers) * TOLERANCE[dtype] * size, 6 * alone)
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"
    return "right"


class FoundWrong(AssertionError):
    """A case went wrong on a rank."""


def check_all(cases: Sequence[Case]) -> list[str]:
    """Check cases on the ranks of one world.

    Raises:
        FoundWrong: one failed on this rank; the others may wait for it in vain.
    """
    torch.set_num_threads(1)
    found = []
    for place, case in enumerate(cases):
        forget_compiles()
        try:
            found.append(check(case))
        except Exception as error:
            raise FoundWrong(f"case {place}: {type(error).__name__}: {error}") from error
        # A rank that refuses would be in the next case while the others are to be told of it.
        dist.barrier()
    return found


AT_ONCE = 25
TOLD = "refused: RanksDisagree"


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """Check cases, those of as many ranks together, some at a time on fresh process groups."""
    for size in sorted({case.world_size for case in cases}):
        left = [case for case in cases if case.world_size == size]
        while left:
            some = left[:AT_ONCE]
            try:
                results = run_ranks(size, check_all, some, deadline_s=60 + 20 * len(some))
            except RankError as error:
                # Nothing has come back of those before it: they are checked again.
                at = re.search(r"FoundWrong: case (\d+): ", str(error))
                wrong = some[int(at[1]) if at else 0]
                left.remove(wrong)
                yield wrong, f"WRONG: {error}"
                continue
            for case, *said in zip(some, *results, strict=True):
                # Ranks that could go on are told what the others refuse.
                own = [one for one in said if kind_of(one) != TOLD] or said
                is_same = len({kind_of(one) for one in own}) == 1
                is_same &= len(own) == len(said) or own[0].startswith("refused: ")
                yield case, own[0] if is_same else f"WRONG: ranks differ: {said}"
            left = left[len(some) :]


def kind_of(said: str) -> str:
    return ": ".join(said.split(": ")[:2]) if said.startswith("refused") else said.split(":")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--compiled", type=float, default=COMPILED, help="part of the cases")
    parser.add_argument("--all", action="store_true", help="say each refusal")
    parser.add_argument("--inductor", type=float, default=0.0, help="part of those compiled")
    args = parser.parse_args()
    cases = [
        a_case(seed, args.compiled, args.inductor)
        for seed in range(args.seed, args.seed + args.count)
    ]
    print(f"seeds {args.seed} to {args.seed + args.count - 1}", flush=True)
    kinds: Counter[str] = Counter()
    for case, said in run_cases(cases):
        kinds[kind_of(said)] += 1
        is_strange = said.startswith("refused") and kind_of(said)[9:] not in EXPECTED_REFUSALS
        if said.startswith("WRONG") or is_strange or (args.all and said != "right"):
            print(f"seed {case.seed}: {said}\n{case}\n", flush=True)
    print(f"{sum(kinds.values())} cases: {dict(kinds.most_common())}")
    sys.exit(1 if kinds["WRONG"] else 0)


if __name__ == "__main__":
    main()
