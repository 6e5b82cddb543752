"""Attention of one rank on a GPU: numbers of every rank's lowered graphs, and their time.

    python benchmarks/gpu_attention.py             both, on the GPU; small, on the CPU, without one
    python benchmarks/gpu_attention.py --quick     fewer cases

Numerics: P processes share the device. Their collectives are staged through host memory, since NCCL
refuses two ranks on one GPU; everything else is the lowered graph, interpreted, and held against
float64 attention on one process.

Timing: one rank alone, its graphs compiled, in a world whose exchanges move nothing. Compared with
a single flash call of the same number of operations, which is what a ring costs if communication is
free and combining too, and with torch's own ring template under the same conditions.

Prints tables, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.reference: one float64 attention

from cp_inductor.passes.lower_attention import START, WAIT
from cp_inductor.passes.pipeline import capture, lower
from cp_inductor.sharding import axis_of_mesh
from tests.reference import TOLERANCE, attend_with_grads, make_qkv, shard

aten = torch.ops.aten


def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, enable_gqa=is_grouped
    )


# --- Numerics --------------------------------------------------------------------------------


class Staged(fx.Interpreter):
    """Run a lowered graph, its exchanges through host memory."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is START:
            outgoing, *splits = args
            arrived = torch.ops._c10d_functional.all_to_all_single(outgoing.cpu(), *splits)
            return torch.ops._c10d_functional.wait_tensor(arrived).to(outgoing.device)
        if target is WAIT:
            return args[0]
        return super().call_function(target, args, kwargs)


def staged_backend(
    gm: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any]
) -> Callable[..., Any]:
    """What cp_aot_eager does, with another interpreter."""

    def interpret(graph: fx.GraphModule, _: Sequence[Any], *, kind: str) -> Callable[..., Any]:
        lower(graph, kind, {})
        return make_boxed_func(Staged(graph).run)

    capture(gm, axis_of_mesh(options["mesh"], site="benchmark"))
    return aot_autograd(
        fw_compiler=partial(interpret, kind="forward"),
        bw_compiler=partial(interpret, kind="backward"),
        inference_compiler=partial(interpret, kind="inference"),
    )(gm, inputs)


def numerics_cases(device: str, quick: bool) -> list[dict[str, Any]]:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    heads = [(4, 4)] if quick else [(4, 4), (8, 2)]
    head_dims = (64, 20) if quick or device == "cpu" else (64, 128, 80, 20)
    return [
        {
            "dtype": dtype,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "is_causal": is_causal,
        }
        for dtype in dtypes
        for num_heads, num_kv_heads in heads
        for head_dim in head_dims
        for is_causal in (True, False)
    ]


def worst_difference(case: dict[str, Any], device: str, mesh: Any) -> float:
    """Largest difference of output and gradients, in units of the tolerance of the dtype."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = dict(case)
    is_causal, dtype = case.pop("is_causal"), case["dtype"]
    whole = make_qkv(123 * world_size, batch=1, **case)
    expected = attend_with_grads(*whole, is_causal=is_causal)
    *leaves, grad_out = (shard(t, rank, world_size).contiguous().to(device) for t in whole)
    for leaf in leaves:
        leaf.requires_grad_()
    torch._dynamo.reset()
    run = torch.compile(
        attend, backend=staged_backend, fullgraph=True, options={"mesh": mesh}, dynamic=False
    )
    out = run(*leaves, is_causal=is_causal)
    results = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
    return max(
        (actual.double().cpu() - shard(reference, rank, world_size)).abs().max().item()
        / (TOLERANCE[dtype] * max(1.0, reference.abs().max().item()))
        for actual, reference in zip(results, expected, strict=True)
    )


def run_numerics(
    rank: int, world_size: int, device: str, quick: bool, store: str, out: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, store=dist.FileStore(store, world_size)
    )
    # The mesh is the staged collectives', which run on the host.
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    rows = [worst_difference(case, device, mesh) for case in numerics_cases(device, quick)]
    out.put((rank, rows))
    dist.barrier()
    dist.destroy_process_group()


def numerics(device: str, world_sizes: Sequence[int], quick: bool) -> list[dict[str, Any]]:
    rows = []
    for world_size in world_sizes:
        out = mp.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, device, quick, f"{folder}/store", out)
            context = mp.spawn(run_numerics, arguments, world_size, join=False)
            worst_of = dict(out.get() for _ in range(world_size))
            context.join()
        for index, case in enumerate(numerics_cases(device, quick)):
            named = {key: str(value).removeprefix("torch.") for key, value in case.items()}
            worst = max(rank_rows[index] for rank_rows in worst_of.values())
            rows.append({"ranks": world_size, **named, "worst": worst})
    return rows


# --- Timing ----------------------------------------------------------------------------------


@contextmanager
def idle_world(rank: int, world_size: int, device: str) -> Iterator[Any]:
    """Be one rank of a world whose exchanges bring zeros at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def exchange(outgoing: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
        return outgoing.new_zeros((sum(receives), *outgoing.shape[1:]))

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_to_all_single", exchange, device.upper())
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh(device, (world_size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()
        library._destroy()
        torch._dynamo.reset()


def median_ms(runs: dict[str, Callable[[], object]], device: str, count: int) -> dict[str, float]:
    """Time several functions in turn, A B C A B C, and return the median of each."""
    for run in runs.values():
        for _ in range(3):
            run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            samples[name].append(time_ms(run, device))
    return {name: statistics.median(times) for name, times in samples.items()}


def time_ms(run: Callable[[], object], device: str) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def torch_ring(
    leaves: Sequence[Tensor], grad_out: Tensor, device: str
) -> tuple[Callable[[], object], Callable[[], object]]:
    """torch's ring template, forward and backward, without its load balancing, eager."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as upstream

    upstream._cp_options.enable_load_balance = False
    upstream._cp_options.rotate_method = upstream._RotateMethod.ALL_TO_ALL
    group = dist.group.WORLD
    detached = [leaf.detach() for leaf in leaves]
    op, backward_op = (
        (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        )
        if device == "cpu"
        else (
            aten._scaled_dot_product_flash_attention,
            aten._scaled_dot_product_flash_attention_backward.default,
        )
    )

    def forward() -> Any:
        return upstream._templated_ring_attention(group, 2, op, *detached, is_causal=True)

    out, lse, *rest = forward()
    extra: dict[str, Any] = {"dropout_p": 0.0}
    if device != "cpu":
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        extra |= dict(zip(names, rest, strict=False))

    def backward() -> Any:
        query, key, value = detached
        return upstream._templated_ring_attention_backward(
            group,
            2,
            backward_op,
            grad_out=grad_out,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=lse,
            is_causal=True,
            **extra,
        )

    return forward, backward


def differentiable(
    run: Callable[[], Tensor], leaves: Sequence[Tensor], grad_out: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    out = run()
    return run, lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def time_one(case: dict[str, Any], device: str, count: int) -> dict[str, Any]:
    rank, world_size, seq_len = case["rank"], case["ranks"], case["seq_len"]
    dtype = torch.bfloat16
    *tensors, grad_out = (
        tensor.to(device)
        for tensor in make_qkv(
            seq_len,
            batch=1,
            num_heads=case["heads"],
            num_kv_heads=case["kv_heads"],
            head_dim=case["head_dim"],
            dtype=dtype,
        )
    )
    leaves = [tensor.requires_grad_() for tensor in tensors]
    # A causal tile of S x S and `rank` full ones: as many scores as S queries and this many keys.
    num_keys = int((rank + 0.5) * seq_len)
    wide = [
        leaf.detach().repeat(1, 1, rank + 1, 1)[:, :, :num_keys].contiguous().requires_grad_()
        for leaf in leaves[1:]
    ]
    with idle_world(rank, world_size, device) as mesh:
        compiled = torch.compile(
            partial(attend, is_causal=True),
            backend="cp_inductor",
            fullgraph=True,
            options={"mesh": mesh},
        )
        pairs = {
            "ours": differentiable(lambda: compiled(*leaves), leaves, grad_out),
            "single": differentiable(
                lambda: attend(leaves[0], *wide, is_causal=False), [leaves[0], *wide], grad_out
            ),
        }
        if case["heads"] == case["kv_heads"]:  # the template's merge knows no grouped heads
            pairs["torch_ring"] = torch_ring(leaves, grad_out, device)
        row: dict[str, Any] = {}
        for index, direction in enumerate(("forward", "backward")):
            medians = median_ms({name: pair[index] for name, pair in pairs.items()}, device, count)
            scores = case["heads"] * case["head_dim"] * seq_len * num_keys
            flops = scores * (4 if direction == "forward" else 10)
            for name, milliseconds in medians.items():
                row[f"{direction}_{name}_ms"] = milliseconds
            row[f"{direction}_ours_tflops"] = flops / medians["ours"] / 1e9
            row[f"{direction}_ratio_to_single"] = medians["ours"] / medians["single"]
            if "torch_ring" in medians:
                row[f"{direction}_ratio_to_torch_ring"] = medians["ours"] / medians["torch_ring"]
    return {**case, **row}


def timing_cases(world_sizes: Sequence[int], device: str, quick: bool) -> list[dict[str, Any]]:
    small = quick or device == "cpu"
    lengths = (256,) if small else (4096, 16384)
    heads = ((4, 4),) if small else ((32, 32), (32, 8))
    return [
        {
            "ranks": world_size,
            "rank": rank,
            "seq_len": seq_len,
            "heads": num_heads,
            "kv_heads": num_kv_heads,
            "head_dim": 64 if small else 128,
        }
        for world_size in world_sizes
        for rank in (0, world_size - 1)
        for seq_len in lengths
        for num_heads, num_kv_heads in heads
    ]


# --- Both ------------------------------------------------------------------------------------


def versions(device: str) -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"), end="\n\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=("numerics", "timing", "all"), default="all")
    parser.add_argument("--ranks", type=int, nargs="+", help="world sizes; default by mode")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--runs", type=int, default=20, help="counted runs of each timing")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    args = parser.parse_args()
    # Backward is timed many times on one graph.
    torch._functorch.config.donated_buffer = False

    result: dict[str, Any] = versions(args.device)
    print(", ".join(f"{key} {value}" for key, value in result.items()), end="\n\n")
    if args.mode in ("numerics", "all"):
        world_sizes = args.ranks or ([2] if args.quick else [2, 4])
        result["numerics"] = numerics(args.device, world_sizes, args.quick)
        print("Largest difference from float64 on any rank, as a fraction of the tolerance")
        print_table(result["numerics"])
    if args.mode in ("timing", "all"):
        world_sizes = args.ranks or ([2] if args.quick else [4, 8])
        cases = timing_cases(world_sizes, args.device, args.quick)
        result["timing"] = [time_one(case, args.device, args.runs) for case in cases]
        print("One rank, medians; exchanges cost nothing")
        print_table(result["timing"])
    print(json.dumps(result))
    if any(row["worst"] > 1 for row in result.get("numerics", ())):
        raise SystemExit("a rank is further from float64 than its dtype allows")


if __name__ == "__main__":
    main()
