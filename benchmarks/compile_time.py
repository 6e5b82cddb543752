"""What compiling costs: seconds and nodes by number of layers and ranks, against plain Inductor.

    python benchmarks/compile_time.py --layers 4 16 --ranks 1 2 8 64 1024
    python benchmarks/compile_time.py --packed --ranks 8 1024      plans of batches
    python benchmarks/compile_time.py --packed --ranks 4 --together 4 --layers 1
    python benchmarks/compile_time.py --target cuda:sm_90 --ranks 8 --layers 1 8 32
    python benchmarks/compile_time.py --target cuda:sm_90 --ranks 8 --layers 1 8 --plan runtime
    python benchmarks/compile_time.py --backend cp_aot_eager --ranks 8 --layers 2 8
    python benchmarks/compile_time.py --regions --ranks 8 --layers 1 8 32
    python benchmarks/compile_time.py --regions --target cuda:sm_90 --ranks 8 --layers 1 8 32

Each figure is a fresh process with cold caches that compiles forward and backward of a transformer
for the CPU, C++ compiler included, as one rank under a fake process group; nothing is run, but by
cp_aot_eager, once. One rank is torch's own backend, "inductor" or "aot_eager", on the same local
model. With --together, so many processes
start at once with one empty cache, as the first ranks, or as plain Inductor; the last one counts,
and each runs once what it compiled or loaded (nothing arrives from others). The phases are ours
(capture: find, plan and replace; lower; schedule), the C++ compiler, and all else (Dynamo,
AOTAutograd, Inductor). CPU seconds are those of all processes and their compilers.

With --regions, each layer is a `torch.compiler.nested_compile_region` over plain shards, also of
plain Inductor.

With --target, code is generated for a GPU that need not exist, without its Triton compiler: of
unmodified Llamas of transformers (--hidden), or of attention alone (--hidden 0), whose documents
are planned per batch (--plan runtime) or which are causal (--plan static). Plain Inductor's is the
same model on a rank's tokens alone, for the same target, causal.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

PHASES = ("capture", "lower", "schedule", "c++", "all else")


class Packed(nn.Module):
    """The same layers, in which documents attend to themselves alone."""

    def __init__(self, layers: int, dim: int, heads: int) -> None:
        from benchmarks.overlap import Layer

        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, heads, attend_under) for _ in range(layers))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        same = documents[:, None, :, None] == documents[:, None, None]
        mask = (place[:, None] >= place) & same
        for layer in self.layers:
            x = layer(x, mask)
        return x


call_region = torch.compiler.nested_compile_region(nn.Module.__call__)


class Regions(nn.Sequential):
    """Layers that are compiled once, as they are alike."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = call_region(layer, x)
        return x


def attend_under(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def compile_once(
    args: argparse.Namespace, layers: int, world_size: int, rank: int
) -> dict[str, Any]:
    """Compile in this process, whose caches are cold."""
    if args.target:
        return compile_for_target(args, layers, world_size)

    from torch._inductor.graph import GraphLowering
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.experimental import implicit_replication

    import cp_inductor.backend.captured as backend
    from benchmarks.overlap import Layer, attend_ours
    from cp_inductor.passes import pipeline
    from tests.support.graphs import _pretend_boxed
    from tests.support.ranks import fake_rank

    seconds = dict.fromkeys(PHASES, 0.0)
    nodes = 0

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*positional, **named)
            finally:
                seconds[phase] += time.perf_counter() - start

        return call

    load = GraphLowering._compile_to_module_lines

    def counted(self: GraphLowering, code: Any) -> Any:
        nonlocal nodes
        nodes += len(self.module.graph.nodes)
        return load(self, code)

    def compile_only(self: GraphLowering) -> SimpleNamespace:
        code, _ = self.codegen()
        self._compile_to_module_lines(code)
        call = lambda given: _pretend_boxed(self.module, given)  # noqa: E731
        return SimpleNamespace(call=call, runner=None, __file__="never_run.py")

    model: nn.Module
    if args.packed:
        model = Packed(layers, args.dim, args.heads)
    else:
        kind = Regions if args.regions else nn.Sequential
        model = kind(*(Layer(args.dim, args.heads, attend_ours) for _ in range(layers)))
    x = torch.randn(1, args.tokens, args.dim, requires_grad=True)
    patches = [
        mock.patch.object(backend, "capture", timed("capture", backend.capture)),
        mock.patch.object(pipeline, "lower_attention", timed("lower", pipeline.lower_attention)),
        mock.patch.object(
            pipeline, "schedule_exchange", timed("schedule", pipeline.schedule_exchange)
        ),
        mock.patch.object(GraphLowering, "_compile_to_module_lines", timed("c++", counted)),
    ]
    if args.together == 1:
        patches.append(mock.patch.object(GraphLowering, "compile_to_module", compile_only))
    with ExitStack() as around:
        around.enter_context(fake_rank(rank, world_size))
        for patch in patches:
            around.enter_context(patch)
        if world_size == 1:
            compiled = torch.compile(
                model, backend=args.backend.removeprefix("cp_"), fullgraph=True
            )
        else:
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
            options = {"strategy": args.strategy}
            if not args.packed:
                options["mesh"] = mesh
            compiled = torch.compile(model, backend=args.backend, fullgraph=True, options=options)
        inputs = [x]
        if args.packed:
            documents = torch.arange(args.tokens * world_size)[None] // 100
            inputs.append(documents)
            if world_size > 1:
                shard = DTensor.from_local(x.detach(), mesh, [Shard(1)], run_check=False)
                whole = DTensor.from_local(documents, mesh, [Replicate()], run_check=False)
                inputs = [shard.requires_grad_(), whole]
        start, cpu = time.perf_counter(), sum(os.times()[:4])
        with implicit_replication():
            compiled(*inputs).sum().backward()
        total, cpu = time.perf_counter() - start, sum(os.times()[:4]) - cpu
    seconds["all else"] = total - sum(seconds.values())
    return {"total_s": total, "cpu_s": cpu, "nodes": nodes, "phases_s": seconds}


class Attentions(nn.Module):
    """Attention alone, again and again; causal, or of documents."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        how: dict[str, Any] = {"enable_gqa": True, "is_causal": True}
        if documents.numel():
            place = torch.arange(query.shape[2])
            mask = documents[:, None, :, None] == documents[:, None, None]
            how = {"enable_gqa": True, "attn_mask": mask & (place[:, None] >= place)}
        for _ in range(self.layers):
            query = query + F.scaled_dot_product_attention(query, key, value, **how)
        return query


def llama(layers: int, hidden: int) -> nn.Module:
    """Make a Llama, whose layers are those of an 8B model but for their width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        vocab_size=8192,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).bfloat16()


def compile_for_target(args: argparse.Namespace, layers: int, world_size: int) -> dict[str, Any]:
    """Generate code for a GPU in this process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    from benchmarks.overlap import Layer, attend_ours
    from cp_inductor import cross_compile

    length = args.tokens * world_size
    is_packed = args.plan == "runtime" and world_size > 1

    def attention(mesh: DeviceMesh) -> list[Tensor]:
        like = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
        shapes = [(1, heads, length, 64) for heads in (4, 2, 2)]
        tokens = [distribute_tensor(torch.empty(s, **like), mesh, [Shard(2)]) for s in shapes]
        documents = torch.zeros(1, length if is_packed else 0, dtype=torch.int64)
        where = [Shard(1)] if is_packed else [Replicate()]
        return [*tokens, distribute_tensor(documents, mesh, where)]

    def of_llama(mesh: DeviceMesh) -> dict[str, Any]:
        ids = torch.zeros(1, length, dtype=torch.int64)
        named = {"input_ids": ids, "labels": ids}
        if is_packed:
            # The mask of transformers reads where positions start again. Given positions are data:
            # a model that is given any has the mask of documents, so causal ones are given none.
            named["position_ids"] = torch.arange(length)[None] % 100
        return {name: distribute_tensor(t, mesh, [Shard(1)]) for name, t in named.items()}

    options = {"plan": args.plan} if world_size > 1 else {}
    how: dict[str, Any] = {"world_size": world_size, "target": args.target, "options": options}
    start, cpu = time.perf_counter(), time.process_time()
    with implicit_replication():
        if args.regions:
            model = Regions(*(Layer(args.dim, args.heads, attend_ours) for _ in range(layers)))
            x = torch.empty(1, args.tokens, args.dim, dtype=torch.bfloat16, device="meta")
            compiled = cross_compile(model.bfloat16(), [x.requires_grad_()], **how)
        elif args.hidden:
            compiled = compile_llama(llama(layers, args.hidden), of_llama, how)
        else:
            compiled = cross_compile(Attentions(layers), attention, **how)
    total, cpu = time.perf_counter() - start, time.process_time() - cpu
    nodes = sum(len(gm.graph.nodes) for gm in compiled.graphs.values())
    return {"total_s": total, "cpu_s": cpu, "nodes": nodes}


def compile_llama(model: nn.Module, of_mesh: Callable[..., Any], how: dict[str, Any]) -> Any:
    """Cross-compile a model of transformers, whose arguments are named."""
    from torch.distributed.device_mesh import DeviceMesh

    from cp_inductor import cross_compile

    names: list[str] = []

    def arguments(mesh: DeviceMesh) -> list[Tensor]:
        named = of_mesh(mesh)
        names[:] = named
        return [*named.values()]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *given: Tensor) -> Tensor:
            loss: Tensor = self.model(**dict(zip(names, given, strict=True))).loss
            return loss

    return cross_compile(Loss(), arguments, **how)


def measure(args: argparse.Namespace, layers: int, world_size: int) -> dict[str, Any]:
    """Compile in fresh processes."""
    command = [sys.executable, __file__, "--one", str(layers), str(world_size)]
    options = [f"--{name}" for name in ("packed", "regions") if getattr(args, name)]
    names = ["tokens", "dim", "heads", "strategy", "together", "hidden", "plan", "backend"]
    for name in names + ["target"] * bool(args.target):
        options += [f"--{name}", str(getattr(args, name))]
    ranks = [world_size // 2] if args.together == 1 else [*range(args.together)]
    if world_size == 1:
        ranks = [0] * args.together
    with tempfile.TemporaryDirectory() as folder:
        # Inductor keeps the header that it compiles once in the default folder, below TMPDIR.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder, "TMPDIR": folder}
        running = [
            subprocess.Popen(
                [*command, str(rank), *options],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in ranks
        ]
        printed = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, printed, strict=True):
        if process.returncode:
            sys.exit(errors)
    rows: list[dict[str, Any]] = [json.loads(output.splitlines()[-1]) for output, _ in printed]
    last = max(rows, key=lambda row: row["total_s"])
    cpu = sum(row["cpu_s"] for row in rows)
    return {"layers": layers, "ranks": world_size, **last, "cpu_s": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8, 64, 1024])
    parser.add_argument("--tokens", type=int, default=512, help="per rank")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--packed", action="store_true", help="documents: planned for each batch")
    parser.add_argument("--regions", action="store_true", help="layers that are compiled once")
    parser.add_argument("--together", type=int, default=1, help="processes on one cold cache")
    parser.add_argument("--target", default="", help="such as cuda:sm_90")
    parser.add_argument("--hidden", type=int, default=0, help="of a Llama; 0 is attention alone")
    parser.add_argument("--plan", default="static", choices=("static", "runtime"))
    parser.add_argument(
        "--backend", default="cp_inductor", choices=("cp_inductor", "cp_aot_eager"), help="on CPUs"
    )
    parser.add_argument("--one", type=int, nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(compile_once(args, *args.one)))
        return
    # One rank, always: the others are compared with it.
    counts = sorted({1, *args.ranks})
    rows = [measure(args, layers, ranks) for layers in args.layers for ranks in counts]
    table = []
    for row in rows:
        plain = next(r for r in rows if r["layers"] == row["layers"] and r["ranks"] == 1)
        ratios = [row[name] / plain[name] for name in ("total_s", "cpu_s")]
        costs = (row["total_s"], ratios[0], row["cpu_s"], ratios[1])
        phases = [row["phases_s"][phase] for phase in PHASES if not args.target]
        table.append([row["layers"], row["ranks"], row["nodes"], *costs, *phases])
    names = ("layers", "ranks", "nodes", "seconds", "x plain", "CPU s", "x plain", *PHASES)
    print(tabulate(table, headers=names[: len(table[0])], floatfmt=".2f"))
    arguments = {name: value for name, value in vars(args).items() if name != "one"}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"benchmark": "compile_time", **arguments, **versions, "rows": rows}))


if __name__ == "__main__":
    main()
