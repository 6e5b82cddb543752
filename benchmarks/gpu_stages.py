"""What the campaign on a GPU measures: one function per stage, which runs one row on one rank.

Shapes: B batch, H query heads, G key-value heads, S queries of a rank, D head dim.
"""

from __future__ import annotations

import fcntl
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.experimental._context_parallel import _attention as upstream
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.support.reference: one float64 attention

import cp_inductor
from benchmarks.packed import pack
from cp_inductor.tiles.kernel_table import choose_kernel, get_kernel
from cp_inductor.tiles.kernels import TileCall
from tests.rehearsal.reference import distance
from tests.rehearsal.report import Difference
from tests.support.reference import TOLERANCE, attend_with_grads, make_qkv, shard

aten = torch.ops.aten
Call = Callable[[], Any]

RESULTS = ("out", "dq", "dk", "dv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WINDOW = 4096  # tokens
TINY_WINDOW = 40
HEAD_START_CYCLES = 20_000_000  # some 10 ms
# Parts of the names of kernels that compute a tile: flash, cuDNN, memory-efficient, and flex's
# template; and of the CPU's op. Device kernels have no other identity than their names.
TILE_KERNELS = ("flash", "cudnn", "fmha", "triton_tem", "attention")


# --- Attentions ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """An attention and how it is planned.

    Attributes:
        mask: "causal", "full", "window" or "documents".
        strategy: of the plan.
        plan: "static", or "runtime": made for each batch.
        dtype: a key of DTYPES.
        heads, kv_heads, head_dim: as in the model.
        tokens: per rank.
        backend: of torch.compile.
    """

    mask: str
    strategy: str
    plan: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    backend: str = "cp_inductor"

    def compiled(self) -> Callable[..., Any]:
        """Return the compiled function of query, key, value and documents."""
        options = {"strategy": self.strategy, "plan": self.plan}
        function = partial(attend, mask=self.mask, window=min(WINDOW, self.tokens))
        return torch.compile(
            function, backend=self.backend, fullgraph=True, dynamic=False, options=options
        )

    def documents(self, world_size: int) -> Tensor:
        """Return document numbers (1, S * world size), of documents of a few shards at most."""
        length = self.tokens * world_size
        lengths = torch.from_numpy(pack("short", length, seed=0, scale=self.tokens / 16384))
        return torch.arange(len(lengths)).repeat_interleave(lengths)[None]

    def num_pairs(self, world_size: int) -> float:
        """Return how many (query, key) pairs exist, per head, over a world of ranks."""
        length = self.tokens * world_size
        if self.mask == "full":
            return float(length) ** 2
        if self.mask == "causal":
            return length * (length + 1) / 2
        if self.mask == "window":
            window = min(WINDOW, self.tokens)
            return length * window - window * (window - 1) / 2
        lengths = self.documents(world_size)[0].bincount().double()
        return (lengths * (lengths + 1) / 2).sum().item()


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor, *, mask: str, window: int
) -> Tensor:
    """Attend as a model would, with a mask of its own making."""
    how: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]}
    if mask == "causal":
        how["is_causal"] = True
    elif mask != "full":
        place = torch.arange(query.shape[2], device=query.device)
        how["attn_mask"] = place[:, None] >= place
        if mask == "window":
            how["attn_mask"] = how["attn_mask"] & (place[:, None] - place < window)
        else:
            alike = documents[:, None, :, None] == documents[:, None, None]
            how["attn_mask"] = how["attn_mask"] & alike
    return F.scaled_dot_product_attention(query, key, value, **how)


def allowed_pairs(row: Attention, documents: Tensor) -> Tensor | None:
    """Return which pairs exist, (S, T), or None for all."""
    place = torch.arange(documents.shape[1])
    allowed = place[:, None] >= place
    if row.mask == "window":
        return allowed & (place[:, None] - place < min(WINDOW, row.tokens))
    if row.mask == "documents":
        return allowed & (documents[0, :, None] == documents[0])
    return allowed if row.mask == "causal" else None


def as_dtensor(local: Tensor, mesh: DeviceMesh, dim: int, length: int) -> DTensor:
    """Wrap this rank's shard of a tensor with so many tokens along a dim."""
    shape = list(local.shape)
    shape[dim] = length
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


# --- (a) Numbers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A layer of a model of transformers, between embeddings and its own loss.

    Attributes:
        model: the name before ForCausalLM.
        dtype: a key of DTYPES.
        tokens: per rank.
        backend: of torch.compile.
    """

    model: str
    dtype: str
    tokens: int
    backend: str = "cp_inductor"

    def make(self, **more: Any) -> nn.Module:
        """Return the model with random weights, the same on every rank."""
        import transformers

        kind = getattr(transformers, f"{self.model}ForCausalLM")
        torch.manual_seed(0)
        made: nn.Module = kind(kind.config_class(**{**BLOCKS[self.model], **SMALL, **more}))
        return made

    def make_exact(self) -> nn.Module:
        """Return the same model in float64, which only eager code of attention and experts has."""
        made: Any = self.make(attn_implementation="eager")
        if self.model == "GptOss":
            made.set_experts_implementation("eager")
        return cast(nn.Module, made.double())


SMALL: Mapping[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "use_cache": False},
    "pad_token_id": 0,
}
BLOCKS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 40},
    "Qwen3": {},
    "GptOss": {
        **{"sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
        "attn_implementation": "flex_attention",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def numbers_rows(tiny: bool) -> list[Attention | Block]:
    if tiny:
        base = Attention("causal", "blocks", "static", "fp32", 4, 2, 16, 24, "cp_aot_eager")
        packed = replace(base, mask="documents", strategy="auto", plan="runtime", dtype="bf16")
        # The models with sizes of their own.
        blocks = (Block(name, "bf16", 32, "cp_aot_eager") for name, own in BLOCKS.items() if own)
        return [base, packed, *blocks]
    rows: list[Attention | Block] = [
        Attention(mask, strategy, "static", "bf16", 8, 2, 64, 123)
        for mask, strategy in product(
            ("causal", "window", "full"), ("auto", "ring", "heads", "blocks")
        )
    ]
    rows += [
        Attention(mask, "auto", "static", "fp32", 8, 2, 64, 123) for mask in ("causal", "window")
    ]
    rows += [
        Attention("documents", "auto", plan, dtype, 8, kv_heads, 64, 128)
        for plan, dtype, kv_heads in (
            ("runtime", "bf16", 8),
            ("runtime", "bf16", 2),
            ("runtime", "fp32", 8),
            ("static", "bf16", 8),
        )
    ]
    # Head dims of flash's other kernels, and 20, which none of them takes as it is.
    shapes = ((4, 4, 128), (4, 4, 20), (4, 2, 80))
    rows += [Attention("causal", "auto", "static", "bf16", *shape, 123) for shape in shapes]
    return rows + [Block(name, "bf16", 123) for name in BLOCKS]


def numbers(row: Attention | Block, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the largest differences of this rank's results, as fractions of the tolerance."""
    if isinstance(row, Block):
        return numbers_of_block(row, mesh)
    rank, world_size = mesh.get_local_rank(), mesh.size()
    dtype, length = DTYPES[row.dtype], row.tokens * world_size
    whole = make_qkv(
        length,
        batch=1,
        num_heads=row.heads,
        num_kv_heads=row.kv_heads,
        head_dim=row.head_dim,
        dtype=dtype,
    )
    documents = row.documents(world_size)
    expected = attend_with_grads(*whole, allowed=allowed_pairs(row, documents))
    shards = [shard(tensor, rank, world_size).to(mesh.device_type) for tensor in whole]
    *leaves, grad_out = (as_dtensor(tensor, mesh, 2, length) for tensor in shards)
    for leaf in leaves:
        leaf.requires_grad_()
    with implicit_replication():
        out = row.compiled()(*leaves, documents.to(mesh.device_type))
        grads = torch.autograd.grad(out, leaves, grad_out)
    # The memory-efficient kernel multiplies float32 as three products of tf32
    # (cutlass::arch::OpMultiplyAddFastF32): with an error of 2^-22, not 2^-24.
    slack = 4 if mesh.device_type == "cuda" and dtype is torch.float32 else 1
    worst = {}
    for name, actual, reference in zip(RESULTS, (out, *grads), expected, strict=True):
        difference = actual.to_local().double().cpu() - shard(reference, rank, world_size)
        bound = slack * TOLERANCE[dtype] * max(1.0, reference.abs().max().item())
        # NaN compares false with everything, and would pass.
        worst[name] = difference.abs().nan_to_num(nan=float("inf")).max().item() / bound
    return worst


def numbers_of_block(row: Block, mesh: DeviceMesh) -> dict[str, Any]:
    """Return differences from one process in float64, as fractions of what a rehearsal allows."""
    device, dtype = mesh.device_type, DTYPES[row.dtype]
    length = row.tokens * mesh.size()
    ids = torch.randint(3, 512, (1, length), generator=torch.Generator().manual_seed(1))
    exact = _results(row.make_exact(), {"input_ids": ids})
    models = row.make(), cp_inductor.parallelize(row.make(), mesh)
    # One process computes as the ranks do: other kernels would round elsewhere.
    backends = row.backend.removeprefix("cp_"), row.backend
    with _traceable_masks(device):
        own, ours = (
            _results(
                torch.compile(
                    model.to(device, dtype), backend=backend, fullgraph=True, dynamic=False
                ),
                {"input_ids": ids.to(device)},
            )
            for model, backend in zip(models, backends, strict=True)
        )
    shares = {}
    for name, value in exact.items():
        far, one_process = distance(ours[name].cpu(), value), distance(own[name].cpu(), value)
        shares[name] = far / Difference(far, one_process, str(dtype).removeprefix("torch.")).bound
    loss = shares.pop("loss")
    return {"loss": loss, "gradients": max(shares.values())}


def _results(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's loss, and the gradients of its weights by name, whole."""
    loss = model(**inputs, labels=inputs["input_ids"]).loss
    loss.backward()
    grads = {
        name.removeprefix("_orig_mod."): weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return {"loss": loss.detach(), **grads}


@contextmanager
def _traceable_masks(device: str) -> Iterator[None]:
    """Within this context, gpt_oss of transformers is traced in one graph."""
    from cp_inductor.integrations.sinks import flex_sinks_on_cpu

    # transformers makes a BlockMask with an option that torch warns of.
    ignored = torch._dynamo.config.patch(ignore_logging_functions={warnings.warn})
    with ignored, flex_sinks_on_cpu() if device == "cpu" else nullcontext():
        yield


# --- (b) Several ranks on one device ---------------------------------------------------------


def ranks_rows(tiny: bool) -> list[str]:
    return ["layer"] if tiny else ["overlap", "gpt", "llama", "packed llama", "documents"]


def ranks(row: str, mesh: DeviceMesh) -> dict[str, Any]:
    """Train a step of a model over real ranks, against the whole model on this rank."""
    if row in ("layer", "overlap"):
        return overlap(mesh, tokens=32 if row == "layer" else 8192)
    torch.manual_seed(0)
    whole = make_model(row).to(mesh.device_type)
    inputs = {name: value.to(mesh.device_type) for name, value in inputs_of(row).items()}
    loss = whole(**inputs).loss
    loss.backward()
    torch.manual_seed(0)
    model = cp_inductor.parallelize(make_model(row).to(mesh.device_type), mesh)
    compiled = torch.compile(model, backend="cp_inductor", fullgraph=True, dynamic=False)
    started = time.perf_counter()
    ours = compiled(**inputs).loss
    ours.backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    return {
        "loss": relative(ours, loss),
        "gradients": max(relative(one.grad, two.grad) for one, two in pairs),
        "first step s": time.perf_counter() - started,
    }


SEQUENCE = 1024  # tokens of the models
DOCUMENTS = (300, 17, 452, 255)


def relative(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.detach().double() - expected.detach().double()).abs().max()
    return float(difference / expected.detach().abs().max().clamp_min(1e-12))


def make_model(row: str, layers: int = 2, **sizes: int) -> nn.Module:
    """Return a decoder of transformers, small unless sizes say otherwise."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    small = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    kind, config = (
        (Qwen3ForCausalLM, Qwen3Config) if row == "qwen3" else (LlamaForCausalLM, LlamaConfig)
    )
    return kind(config(num_hidden_layers=layers, use_cache=False, **{**small, **heads, **sizes}))


def inputs_of(row: str) -> dict[str, Tensor]:
    ids = torch.randint(0, 512, (1, SEQUENCE), generator=torch.Generator().manual_seed(2))
    lengths = DOCUMENTS if row in ("packed llama", "documents") else (SEQUENCE,)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def overlap(mesh: DeviceMesh, tokens: int) -> dict[str, Any]:
    """Profile a step of two layers of attention, and say how much of its exchanges hides."""
    is_small = tokens < WINDOW
    shape = (1, 4 if is_small else 32, tokens, 16 if is_small else 128)
    query = torch.randn(shape, device=mesh.device_type, dtype=torch.bfloat16)
    leaf = as_dtensor(query, mesh, 2, tokens * mesh.size()).requires_grad_()

    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x

    backend = "cp_aot_eager" if is_small else "cp_inductor"
    compiled = torch.compile(layers, backend=backend, fullgraph=True, dynamic=False)

    def step() -> None:
        compiled(leaf).sum().backward()

    for _ in range(3):
        step()
    exchange, compute = kernel_spans(step, mesh.device_type)
    hidden = sum(overlapped(span, compute) for span in exchange)
    total = sum(end - start for start, end in exchange)
    return {"exchange ms": total / 1e3, "hidden": hidden / total if total else 0.0}


Span = tuple[float, float]


def kernel_spans(step: Call, device: str) -> tuple[list[Span], list[Span]]:
    """Return when kernels of NCCL ran, and when all others did, in microseconds."""
    exchange, compute = [], []
    for event in profiled(step, device).events():
        if event.device_type == _device_type(device):
            span = (event.time_range.start, event.time_range.end)
            (exchange if "nccl" in event.name.lower() else compute).append(span)
    return exchange, compute


def overlapped(span: Span, others: Sequence[Span]) -> float:
    """Return how much of a span others cover; they may cover each other."""
    cuts = sorted({min(max(edge, span[0]), span[1]) for other in others for edge in other})
    return sum(
        end - start
        for start, end in pairwise(cuts)
        if any(low <= start and end <= high for low, high in others)
    )


def profiled(step: Call, device: str) -> Any:
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        step()
        synchronize(device)
    return profiler


def _device_type(device: str) -> DeviceType:
    return DeviceType.CUDA if device == "cuda" else DeviceType.CPU


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- (c) Tiles beside one flash call ---------------------------------------------------------


def tiles_rows(tiny: bool) -> list[Attention]:
    if tiny:
        return [Attention("causal", "auto", "static", "bf16", 4, 2, 32, 64, "cp_aot_eager")]
    return [
        Attention(mask, "auto", plan, "bf16", heads, kv_heads, 128, tokens)
        for tokens, (heads, kv_heads), (mask, plan) in product(
            (8192, 32768, 65536),
            ((64, 8), (32, 32)),
            (("causal", "static"), ("window", "static"), ("documents", "runtime")),
        )
        # 65,536 tokens of 64 heads are 1 GiB for each of q, out and their gradients.
        if tokens < 65536 or heads == 64
    ]


def tiles(row: Attention, mesh: DeviceMesh) -> dict[str, Any]:
    """Time one rank's forward and backward; return ms by pass.

    total     of all kernels, on the device
    tiles     of the kernels that compute tiles
    single    of one flash call, not causal, with a P-th of all pairs
    ring      of torch's ring, for a causal mask: eager, load balancing off
    """
    device, world_size = mesh.device_type, mesh.size()
    tensors = [
        torch.randn((1, heads, row.tokens, row.head_dim), device=device).to(DTYPES[row.dtype])
        for heads in (row.heads, row.kv_heads, row.kv_heads, row.heads)
    ]
    calls = {"total": ours(row, mesh, tensors), "single": single_call(row, world_size, tensors)}
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        # The backward runs many times on one forward's saved tensors.
        stack.enter_context(torch._functorch.config.patch(donated_buffer=False))
        stack.enter_context(device_alone())
        if row.mask == "causal" and row.heads == row.kv_heads:
            method = upstream._RotateMethod.ALL_TO_ALL
            plain = {"enable_load_balance": False, "rotate_method": method}
            stack.enter_context(patch.multiple(upstream._cp_options, **plain))
            calls["ring"] = torch_ring(tensors)
        for index, direction in enumerate(("forward", "backward")):
            ms = median_ms({name: pair[index] for name, pair in calls.items()}, device)
            ms["tiles"] = tile_ms(calls["total"][index], device)
            found[direction] = ms
    return found


@contextmanager
def device_alone() -> Iterator[None]:
    """Keep the other processes of this row from the device."""
    with Path(tempfile.gettempdir(), "cp-inductor-gpu-campaign.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ours(row: Attention, mesh: DeviceMesh, tensors: Sequence[Tensor]) -> tuple[Call, Call]:
    """Return forward and backward of this rank's part."""
    length = row.tokens * mesh.size()
    *leaves, grad_out = (as_dtensor(tensor, mesh, 2, length) for tensor in tensors)
    for leaf in leaves:
        leaf.requires_grad_()
    documents = row.documents(mesh.size()).to(mesh.device_type)
    compiled = row.compiled()

    def forward() -> Any:
        with implicit_replication():
            return compiled(*leaves, documents)

    out = forward()
    return forward, partial(torch.autograd.grad, out, leaves, grad_out, retain_graph=True)


def single_call(row: Attention, world_size: int, tensors: Sequence[Tensor]) -> tuple[Call, Call]:
    """Return forward and backward of one flash call with as many pairs as a rank should have."""
    query, key, _, grad_out = tensors
    num_keys = max(1, round(row.num_pairs(world_size) / world_size / row.tokens))
    shape = (key.shape[0], row.kv_heads, num_keys, row.head_dim)
    wide_key, wide_value = (torch.randn_like(key.new_empty(shape)) for _ in range(2))
    name, _ = choose_kernel(query, wide_key, wide_value, dtype=query.dtype, site="benchmark")
    kernel, call = get_kernel(name), TileCall(query, wide_key, wide_value)
    forward = partial(kernel.forward, call)
    return forward, partial(kernel.backward, call, grad_out, forward())


def torch_ring(tensors: Sequence[Tensor]) -> tuple[Call, Call]:
    """Return forward and backward of torch's ring template: eager, on plain tensors."""
    query, key, value, grad_out = tensors
    if query.device.type == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    else:
        op = aten._scaled_dot_product_flash_attention.default
        backward_op = aten._scaled_dot_product_flash_attention_backward.default
    where = (dist.group.WORLD, 2)  # and the sequence dim
    forward = partial(
        upstream._templated_ring_attention, *where, op, query, key, value, is_causal=True
    )
    out, lse, *rest = forward()
    saved = {"query": query, "key": key, "value": value, "out": out, "logsumexp": lse}
    # On the CPU there is no rest.
    names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
    saved |= dict(zip(names, rest, strict=False))
    backward = partial(upstream._templated_ring_attention_backward, *where, backward_op)
    gradient = {"grad_out": grad_out, "grad_out_name": "grad_out"}
    return forward, partial(backward, **gradient, **saved, is_causal=True, dropout_p=0.0)


def median_ms(
    calls: dict[str, Call], device: str, warm: int = 3, count: int = 10
) -> dict[str, float]:
    """Time several functions in turn, A B C A B C, and return the median of each."""
    rounds = [
        {name: time_ms(call, device) for name, call in calls.items()} for _ in range(warm + count)
    ]
    return {name: statistics.median(times[name] for times in rounds[warm:]) for name in calls}


def time_ms(call: Call, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A sleeping kernel lets the host run ahead: the device's time is wanted, not that of launches.
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def tile_ms(call: Call, device: str) -> float:
    """Return the device's time in the kernels that compute tiles."""
    events = profiled(call, device).key_averages()
    name = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    is_tile = [any(part in event.key.lower() for part in TILE_KERNELS) for event in events]
    return sum(getattr(e, name) for e, chosen in zip(events, is_tile, strict=True) if chosen) / 1e3


# --- (d) Memory ------------------------------------------------------------------------------


def memory_rows(tiny: bool) -> list[Attention]:
    if tiny:
        return [Attention("causal", "ring", "static", "bf16", 4, 4, 32, 64, "cp_aot_eager")]
    return [
        Attention(mask, strategy, plan, "bf16", 32, 32, 128, 16384)
        for strategy, mask, plan in (
            *product(("auto", "ring", "allgather", "heads"), ("causal",), ("static",)),
            ("auto", "window", "static"),
            ("auto", "documents", "runtime"),
        )
    ]


def memory(row: Attention, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the peak bytes of a layer's graphs beside their inputs, predicted and allocated."""
    from benchmarks.overlap import Layer

    device, length = mesh.device_type, row.tokens * mesh.size()
    documents = row.documents(mesh.size()).to(device)
    how = partial(attend, mask=row.mask, window=min(WINDOW, row.tokens))
    layer = Layer(row.heads * row.head_dim, row.heads, lambda q, k, v: how(q, k, v, documents))
    layer = cp_inductor.parallelize(layer.to(device, DTYPES[row.dtype]), mesh)
    compiled = torch.compile(
        layer,
        backend=row.backend,
        fullgraph=True,
        dynamic=False,
        options={"strategy": row.strategy, "plan": row.plan},
    )
    local = torch.randn(1, row.tokens, row.heads * row.head_dim, device=device)
    x = as_dtensor(local.to(DTYPES[row.dtype]), mesh, 1, length).requires_grad_()
    counters.clear()
    with implicit_replication():
        compiled(x).sum().backward()  # compiles
        peaks = dict(zip(("forward", "backward"), _peaks(compiled, x, device), strict=True))
    predicted = counters["cp_inductor"]
    return {
        kind: {"predicted": predicted[f"{kind}_peak_bytes"], "allocated": peaks[kind]}
        for kind in ("forward", "backward")
    }


def _peaks(compiled: Call, x: Tensor, device: str) -> Iterator[int]:
    """Yield the most bytes allocated in the forward and in the backward, beside those before."""
    if device == "cpu":
        yield from (0, 0)
        return
    loss, peak = peak_of(lambda: compiled(x).sum())
    yield peak
    yield peak_of(loss.backward)[1]


def peak_of(call: Call) -> tuple[Any, int]:
    """Return a call's result, and the most bytes of the GPU that it allocated at once."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


# --- (e) The first step ----------------------------------------------------------------------


@dataclass(frozen=True)
class FirstStep:
    """A Llama whose first step is timed.

    Attributes:
        layers: of the model.
        is_packed: documents, planned per batch.
        backend: "cp_inductor", or "inductor" for the local model of as many tokens.
        hidden: size of the model.
        tokens: per rank.
    """

    layers: int
    is_packed: bool
    backend: str
    hidden: int = 1024
    tokens: int = 4096


def first_step_rows(tiny: bool) -> list[FirstStep]:
    if tiny:
        return [FirstStep(1, True, "cp_aot_eager", 128, 32)]
    return [
        FirstStep(layers, is_packed, backend)
        for layers, is_packed, backend in product(
            (1, 8), (False, True), ("inductor", "cp_inductor")
        )
    ]


def first_step(row: FirstStep, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the seconds of the first step, with cold caches, and of the second."""
    from torch._inductor.utils import fresh_cache

    heads = row.hidden // 64
    sizes = {
        "hidden_size": row.hidden,
        "intermediate_size": 2 * row.hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "vocab_size": 1024,
        "max_position_embeddings": row.tokens * mesh.size(),
    }
    model = make_model("llama", row.layers, **sizes).to(mesh.device_type, torch.bfloat16)
    is_ours = row.backend != "inductor"
    if is_ours:
        model = cp_inductor.parallelize(model, mesh)
    compiled = torch.compile(model, backend=row.backend, fullgraph=True, dynamic=False)
    inputs = _tokens(row.tokens * (mesh.size() if is_ours else 1), row.is_packed, mesh.device_type)
    with fresh_cache():
        return {name: _step_s(compiled, inputs, mesh.device_type) for name in ("first", "second")}


def _tokens(length: int, is_packed: bool, device: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)  # the same batch on all ranks
    ids = torch.randint(0, 1024, (1, length), generator=draw).to(device)
    place = torch.arange(length, device=device) % (1000 if is_packed else length)
    return {"input_ids": ids, "position_ids": place[None], "labels": ids}


def _step_s(compiled: Any, inputs: dict[str, Tensor], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    compiled(**inputs).loss.backward()
    synchronize(device)
    return time.perf_counter() - started


# --- (f) A million tokens, an eighth -----------------------------------------------------------


@dataclass(frozen=True)
class LongContext:
    """Some layers of Qwen3-8B over a long sequence.

    Attributes:
        layers: of the 36.
        length: tokens of the whole sequence.
        is_small: a small model in its place.
    """

    layers: int
    length: int
    is_small: bool = False


def long_rows(tiny: bool) -> list[LongContext]:
    return [LongContext(1, 256, True)] if tiny else [LongContext(2, 131_072)]


def long_context(row: LongContext, mesh: DeviceMesh) -> dict[str, Any]:
    """Return seconds of a step, and the most GiB allocated."""
    device = mesh.device_type
    published = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": row.length,
    }
    sizes = {"max_position_embeddings": row.length} if row.is_small else published
    with torch.device(device):
        model = make_model("qwen3", row.layers, **sizes).bfloat16()
    model = cp_inductor.parallelize(model, mesh)
    backend = "cp_aot_eager" if row.is_small else "cp_inductor"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    ids = torch.randint(0, 512, (1, row.length), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids.to(device), "labels": ids.to(device)}
    seconds = {"first s": _step_s(compiled, inputs, device)}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with device_alone():
        seconds["step s"] = min(_step_s(compiled, inputs, device) for _ in range(3))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {**seconds, "GiB": peak / 2**30}
