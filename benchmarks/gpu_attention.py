"""Ring attention on one GPU: the numbers of every rank's lowered graphs, and one rank's time.

    python benchmarks/gpu_attention.py                            both, on the GPU
    python benchmarks/gpu_attention.py --mode timing --ranks 8    one of them, one world size
    python benchmarks/gpu_attention.py --device cpu --quick       the same code, tiny, on the CPU

Numerics: P processes share the device, since NCCL refuses two ranks on one GPU. Each interprets its
own lowered forward and backward graphs, whose exchanges are staged through host memory and gloo,
and holds the results against float64 attention on one process.

Timing: one rank of P alone, its graphs compiled, in a world whose exchanges cost a copy of what
arrives. Beside it, under the same conditions, torch's own ring (eager, load balancing off), and a
single flash call with as many scores: a rank computes one causal tile of S x S and `rank` full
ones, (rank + 1/2) S^2 scores, so the call has S queries and (rank + 1/2) S keys and is not causal.
That is the cost of a ring whose exchanges and sums are free.

Prints tables and, as its last line, one JSON object. Exits with 1 where a number is off.

Shapes: B batch, H query heads, G key-value heads, S queries of a rank, D head dim.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as upstream

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.reference: one float64 attention

from cp_inductor.dtensor.axis import axis_of_mesh
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.graph.collectives import START, WAIT
from cp_inductor.passes.pipeline import capture, lower
from cp_inductor.passes.schedule_exchange import Scheduling
from cp_inductor.run.kernel_choice import choose_kernel
from cp_inductor.run.kernels import TileCall, get_kernel
from tests.reference import TOLERANCE, attend_with_grads, make_qkv, shard

aten = torch.ops.aten
Run = Callable[[], Any]

RESULTS = ("out", "dq", "dk", "dv")


def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    enable_gqa = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=enable_gqa
    )


def as_leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return query, key and value asking for gradients, and grad_out, all contiguous."""
    copies = [tensor.detach().contiguous() for tensor in tensors]
    return [*(copy.requires_grad_() for copy in copies[:3]), copies[3]]


# --- Numerics --------------------------------------------------------------------------------


@dataclass(frozen=True)
class NumericsCase:
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool
    strategy: str


class StagedInterpreter(fx.Interpreter):
    """Run a lowered graph in its own order, its exchanges through host memory.

    A start copies its input to the host and starts the exchange there; its wait waits for it, and
    copies what arrived to the device. On the CPU neither copies anything.
    """

    def __init__(self, gm: fx.GraphModule, device: str, counts: Counter[object]) -> None:
        super().__init__(gm)
        self.device, self.counts = device, counts

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.counts[target] += 1
        if target is START:
            outgoing, *splits_and_group = args
            return START(copy_to_host(outgoing), *splits_and_group)
        if target is WAIT:
            return WAIT(*args).to(self.device)
        return super().call_function(target, args, kwargs)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return the tensor in pinned memory, complete: gloo knows nothing of CUDA streams."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.numel() > 0)
    return host.copy_(tensor)


def staged_backend(
    mesh: DeviceMesh, device: str, strategy: str, counts: Counter[object]
) -> Callable[..., Any]:
    """Return what cp_aot_eager is, but for the interpreter: the same passes and partitioner."""

    def interpret(gm: fx.GraphModule, _: Sequence[Any], *, kind: str) -> Callable[..., Any]:
        lower(gm, kind, Scheduling.read({})[0], {})
        return make_boxed_func(StagedInterpreter(gm, device, counts).run)

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        capture(
            gm, axis_of_mesh(mesh, site="benchmark"), PlanOptions.read({"strategy": strategy})[0]
        )
        return aot_autograd(
            fw_compiler=partial(interpret, kind="forward"),
            bw_compiler=partial(interpret, kind="backward"),
            partition_fn=min_cut_rematerialization_partition,
        )(gm, inputs)

    return compile_graph


def numerics_cases(device: str, quick: bool) -> list[NumericsCase]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    heads = ((4, 2),) if quick else ((4, 4), (8, 2))
    head_dims = (64, 20) if quick or device == "cpu" else (64, 128, 80, 20)
    cases = product(dtypes, heads, head_dims, (True, False), ("ring", "blocks"))
    return [NumericsCase(dtype, *h, *others) for dtype, h, *others in cases]


def check_rank(case: NumericsCase, device: str, mesh: DeviceMesh) -> dict[str, float]:
    """Return the largest differences of this rank's results, as fractions of the tolerance."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = {"num_heads": case.heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim}
    # A rank's 123 queries are no multiple of any kernel's block.
    whole = make_qkv(123 * world_size, dtype=case.dtype, **sizes)
    expected = attend_with_grads(*whole, is_causal=case.is_causal)
    *leaves, grad_out = as_leaves([shard(t, rank, world_size).to(device) for t in whole])
    counts: Counter[object] = Counter()
    torch._dynamo.reset()
    function = partial(attend, is_causal=case.is_causal)
    backend = staged_backend(mesh, device, case.strategy, counts)
    out = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*leaves)
    results = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
    assert counts[START] == counts[WAIT], counts
    # P-1 forward, 2 (P-1) backward, on every rank: fewer on one rank is a hang.
    assert counts[START] == 3 * (world_size - 1) or case.strategy != "ring", counts
    # The memory-efficient kernel multiplies float32 as three products of tf32
    # (cutlass::arch::OpMultiplyAddFastF32): with an error of 2^-22, not 2^-24.
    slack = 4 if device == "cuda" and case.dtype is torch.float32 else 1
    worst = {}
    for name, actual, reference in zip(RESULTS, results, expected, strict=True):
        difference = (actual.double().cpu() - shard(reference, rank, world_size)).abs()
        bound = slack * TOLERANCE[case.dtype] * max(1.0, reference.abs().max().item())
        # NaN compares false with everything, and would pass.
        worst[name] = difference.nan_to_num(nan=float("inf")).max().item() / bound
    return worst


def check_all_cases(rank: int, world_size: int, device: str, quick: bool, folder: str) -> None:
    """One process of `numerics`: leave the results in a file of the folder."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    # A mesh of the staged exchanges, which run on the host.
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    worst = [check_rank(case, device, mesh) for case in numerics_cases(device, quick)]
    Path(folder, f"{rank}.json").write_text(json.dumps(worst))
    dist.barrier()
    dist.destroy_process_group()


def numerics(device: str, world_sizes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    """Return, for each case, the largest difference on any rank."""
    rows = []
    for world_size in world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(check_all_cases, (world_size, device, quick, folder), world_size)
            files = [Path(folder, f"{rank}.json") for rank in range(world_size)]
            worst_of = [json.loads(file.read_text()) for file in files]
        for index, case in enumerate(numerics_cases(device, quick)):
            named = asdict(case) | {"dtype": str(case.dtype).removeprefix("torch.")}
            worst = {name: max(of[index][name] for of in worst_of) for name in RESULTS}
            rows.append({"ranks": world_size, **named, **worst})
    return rows


# --- Timing ----------------------------------------------------------------------------------

HEAD_START_CYCLES = 20_000_000  # some 10 ms


@dataclass(frozen=True)
class TimingCase:
    ranks: int
    rank: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def num_keys(self) -> int:
        """Keys of a single call with as many scores as this rank's tiles."""
        return (2 * self.rank + 1) * self.seq_len // 2

    def flops(self, direction: str) -> int:
        """Two matmuls forward, five backward, of two operations each per score and dim."""
        num_matmuls = {"forward": 2, "backward": 5}[direction]
        return 2 * num_matmuls * self.heads * self.head_dim * self.seq_len * self.num_keys


def timing_cases(world_sizes: Sequence[int], device: str, quick: bool) -> list[TimingCase]:
    if device == "cpu":
        lengths, heads, head_dim = (128,), ((4, 2),), 32
    else:
        lengths = (4096,) if quick else (4096, 16384)
        heads, head_dim = ((32, 8),) if quick else ((32, 8), (32, 32)), 128
    return [
        TimingCase(world_size, rank, seq_len, *num_heads, head_dim)
        for world_size in world_sizes
        for rank, seq_len, num_heads in product((0, world_size - 1), lengths, heads)
    ]


@contextmanager
def idle_world(rank: int, world_size: int, device: str) -> Iterator[DeviceMesh]:
    """Be one rank of a world whose exchanges bring noise at once.

    The fake process group moves nothing: what arrives would be whatever the memory held, and a
    kernel's speed depends on its data through the power they draw.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    noise: dict[object, Tensor] = {}

    def exchange(outgoing: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
        shape = (sum(receives), *outgoing.shape[1:])
        if (shape, outgoing.dtype) not in noise:
            noise[shape, outgoing.dtype] = torch.randn_like(outgoing.new_empty(shape))
        return noise[shape, outgoing.dtype].clone()

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
            library.impl("all_to_all_single", exchange, device.upper())
            yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def as_plain_ring() -> Any:
    """Have torch's ring pass blocks on, without load balancing, for the length of a with block."""
    method = upstream._RotateMethod.ALL_TO_ALL
    return patch.multiple(upstream._cp_options, enable_load_balance=False, rotate_method=method)


def torch_ring(tensors: Sequence[Tensor]) -> tuple[Run, Run]:
    """Forward and backward of torch's ring template: eager, on plain tensors."""
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


def compiled_ring(mesh: DeviceMesh, tensors: Sequence[Tensor]) -> tuple[Run, Run]:
    """Forward and backward of this rank's part, compiled by cp_inductor."""
    function, options = partial(attend, is_causal=True), {"mesh": mesh, "strategy": "ring"}
    compiled = torch.compile(function, backend="cp_inductor", fullgraph=True, options=options)
    *leaves, grad_out = as_leaves(tensors)
    forward = partial(compiled, *leaves)
    return forward, partial(torch.autograd.grad, forward(), leaves, grad_out, retain_graph=True)


def single_call(case: TimingCase, tensors: Sequence[Tensor]) -> tuple[Run, Run]:
    """Forward and backward of one flash call with as many scores."""
    query, key, _, grad_out = tensors
    shape = (key.shape[0], case.kv_heads, case.num_keys, case.head_dim)
    wide_key, wide_value = (torch.randn_like(key.new_empty(shape)) for _ in range(2))
    name = choose_kernel(query, wide_key, wide_value, dtype=query.dtype, site="benchmark")
    kernel, call = get_kernel(name), TileCall(query, wide_key, wide_value)
    forward = partial(kernel.forward, call)
    return forward, partial(kernel.backward, call, grad_out, forward())


def median_ms(runs: dict[str, Run], device: str, count: int) -> dict[str, float]:
    """Time several functions in turn, A B C A B C, and return the median of each."""
    rounds = [{name: time_ms(run, device) for name, run in runs.items()} for _ in range(3 + count)]
    return {name: statistics.median(times[name] for times in rounds[3:]) for name in runs}


def time_ms(run: Run, device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # A sleeping kernel lets the host run ahead: the device's time is wanted, not that of launches.
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def time_case(case: TimingCase, device: str, count: int) -> list[dict[str, Any]]:
    """Return a row for the forward and one for the backward."""
    tensors = [
        torch.randn((1, num_heads, case.seq_len, case.head_dim), device=device).bfloat16()
        for num_heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    # The backward runs many times on one forward's saved tensors.
    keeping_saved = torch._functorch.config.patch(donated_buffer=False)
    rows = []
    with idle_world(case.rank, case.ranks, device) as mesh, as_plain_ring(), keeping_saved:
        pairs = {
            "ours": compiled_ring(mesh, tensors),
            "single": single_call(case, tensors),
            "torch_ring": torch_ring(tensors),
        }
        for index, direction in enumerate(("forward", "backward")):
            ms = median_ms({name: pair[index] for name, pair in pairs.items()}, device, count)
            tflops = {f"{name}_tflops": case.flops(direction) / ms[name] / 1e9 for name in ms}
            ratios = {f"{name}/single": ms[name] / ms["single"] for name in ("ours", "torch_ring")}
            times = {f"{name}_ms": ms[name] for name in ms}
            rows.append({**asdict(case), "pass": direction, **times, **tflops, **ratios})
    return rows


# --- Both ------------------------------------------------------------------------------------


def versions(device: str) -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(title, tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"), sep="\n\n")
    print(flush=True)


def main() -> None:
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("numerics", "timing", "all"), default="all")
    parser.add_argument("--ranks", type=int, nargs="+", help="world sizes; default by mode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device)
    parser.add_argument("--runs", type=int, default=20, help="counted runs of each timing")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    args = parser.parse_args()

    result: dict[str, Any] = versions(args.device)
    print(", ".join(f"{key} {value}" for key, value in result.items()), end="\n\n", flush=True)
    if args.mode in ("numerics", "all"):
        world_sizes = args.ranks or ([2] if args.quick else [2, 4])
        result["numerics"] = numerics(args.device, world_sizes, args.quick)
        title = "Largest difference from float64 on any rank, as a fraction of the tolerance"
        print_table(title, result["numerics"])
    if args.mode in ("timing", "all"):
        world_sizes = args.ranks or ([2] if args.quick else [4, 8])
        cases = timing_cases(world_sizes, args.device, args.quick)
        result["timing"] = [
            row for case in cases for row in time_case(case, args.device, args.runs)
        ]
        print_table(f"One rank, medians of {args.runs} runs, bfloat16, causal", result["timing"])
    print(json.dumps(result))
    if any(row[name] > 1 for row in result.get("numerics", ()) for name in RESULTS):
        raise SystemExit("a rank is further from float64 than its dtype allows")


if __name__ == "__main__":
    main()
