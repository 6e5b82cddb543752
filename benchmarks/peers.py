"""Whole models side by side: this library, an all-gather by hand, and DeepSpeed's AutoSP.

    python benchmarks/peers.py --ranks 2 4
    python benchmarks/peers.py --autosp-python PATH      with AutoSP, from an environment of its own

One Llama of Hugging Face, with random weights in float32, is trained on local gloo ranks. Every
system runs the same model on the same tokens; each rank has one thread:

    auto, heads, blocks   this library, on DTensors, with that strategy
    gathered              every layer gathers K and V by a functional collective and attends with
                          the mask of its rank's rows; stock Inductor compiles it
    gathered, eager       the same without a compiler
    AutoSP                sequence parallelism as a compile pass of DeepSpeed (ZeRO 0): the graph
                          slices whole inputs, and exchanges heads around each attention
    local                 the unchanged model on the tokens of one rank, by stock Inductor in one
                          process: what compiling costs without context parallelism

A step is a forward, a backward, and the sum of the gradients over ranks. Each rank of each system
is a process of its own. The systems take turns: while one steps, the others wait for input.

    loss, q_proj  relative error of the loss, and the largest error of the gradient of the first
                  layer's q_proj over its largest element, against one process in float64
    u             bytes that the worst rank receives in one layer and step, in u: one rank's K and V
                  of one layer. Counted are all_to_all, all_gather and reduce_scatter in a profile
                  of a step, by what the collective must bring (gloo's reduce_scatter moves more).
                  Sums of gradients of weights are left out: all systems make the same
    step          time of the slowest rank over that of the first system of the list, in the same
                  repetition; the median over repetitions
    cold, warm    seconds of the first step, in a fresh process, with an empty folder of caches
                  that the ranks of this system share, and again with what the first run left there
    cpu           CPU seconds of the cold first step, of the rank that takes most, C++ compiler
                  included: what others do on the machine hardly changes it
    x local       cpu over that of "local"
    peak          largest resident memory of a rank, in MiB, while it made the timed steps

AutoSP is given an attention mask, positions, and labels that are shifted already: it would slice
labels before the model shifts them. The environment, for example:

    python -m venv /tmp/autosp && DS_ACCELERATOR=cpu DS_BUILD_OPS=0 \\
        /tmp/autosp/bin/pip install --no-build-isolation deepspeed torch transformers

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

OURS = ("auto", "heads", "blocks")
SYSTEMS = (*OURS, "gathered", "gathered, eager", "AutoSP", "local")
VOCABULARY = 256


# --- The model and its batch: the same for all ----------------------------------------------------


class Loss(nn.Module):
    """A causal LM to the mean loss of the labels, which are shifted already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor, **kwargs: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, use_cache=False, **kwargs).logits
        # Classes in dim 1: the sequence keeps a dim of its own, and with it its shards.
        return F.cross_entropy(logits.transpose(1, 2), labels)

    @property
    def first_query(self) -> nn.Parameter:
        return self.model.model.layers[0].self_attn.q_proj.weight


def make_model(args: argparse.Namespace, attention: str = "sdpa") -> Loss:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.dim,
        intermediate_size=8 * args.dim // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads or args.heads,
        max_position_embeddings=args.seq_len,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return Loss(transformers.LlamaForCausalLM(config))


def make_batch(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return ids and labels, each (1, S); every position has a label."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (1, args.seq_len + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def reference(args: argparse.Namespace) -> tuple[float, Tensor]:
    """Return the loss, and the gradient of the first q_proj, of one process in float64."""
    model = make_model(args).double()
    loss = model(*make_batch(args))
    loss.backward()
    return loss.item(), model.first_query.grad


# --- The systems: each is a function that returns a step, which returns loss and gradient ---------

Step = Callable[[], tuple[Tensor, Tensor]]


def ours(args: argparse.Namespace, strategy: str) -> Step:
    from torch.distributed.device_mesh import init_device_mesh

    import cp_inductor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = make_model(args)
    cp_inductor.parallelize(model, mesh)
    options = {"strategy": strategy}
    compiled = torch.compile(
        model, backend="cp_inductor", fullgraph=True, dynamic=False, options=options
    )
    ids, labels = make_batch(args)

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = compiled(ids, labels)
        loss.backward()
        return loss, model.first_query.grad

    return step


def gathered(args: argparse.Namespace, *, is_compiled: bool) -> Step:
    """Gather K and V in each layer, and attend with the rows of this rank."""
    import torch.distributed._functional_collectives as collectives

    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = args.seq_len // world_size
    rows = torch.arange(rank * tokens, (rank + 1) * tokens)
    mask = torch.arange(args.seq_len) <= rows[:, None]
    is_grouped = args.kv_heads not in (0, args.heads)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        key, value = (
            collectives.all_gather_tensor_autograd(tensor, 2, dist.group.WORLD)
            for tensor in (key, value)
        )
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=kwargs["scaling"], enable_gqa=is_grouped
        )
        return out.transpose(1, 2).contiguous(), None

    # A name that transformers knows no mask of, so that it makes none.
    transformers.AttentionInterface.register("gathered", attend)
    model = make_model(args, "gathered")
    compiled = torch.compile(model, fullgraph=True, dynamic=False) if is_compiled else model
    ids, labels = (each[:, rows] for each in make_batch(args))

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = compiled(ids, labels, position_ids=rows[None])
        loss.backward()
        parameters = list(model.parameters())
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        parts = flat.div_(world_size).split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return mean_over_ranks(loss), model.first_query.grad

    return step


def autosp(args: argparse.Namespace) -> Step:
    """DeepSpeed's pass: every rank passes whole inputs, which the graph slices."""
    import deepspeed
    from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs

    model = make_model(args)
    deepspeed.init_distributed(dist_backend="gloo")
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 0},
            "sequence_parallel_size": dist.get_world_size(),
            "compile": {"deepcompile": True, "passes": ["autosp"]},
        },
    )
    engine.compile()
    ids, labels = make_batch(args)
    positions, mask = torch.arange(args.seq_len)[None], torch.ones_like(ids)
    prepare_autosp_inputs(ids, labels, positions, mask, seq_dim=1)

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = engine(ids, labels, position_ids=positions, attention_mask=mask)
        engine.backward(loss)
        return mean_over_ranks(loss), model.first_query.grad

    return step


def local(args: argparse.Namespace) -> Step:
    """The unchanged model on the tokens of one rank."""
    model = make_model(args)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    ids, labels = (each[:, : args.seq_len // args.of].contiguous() for each in make_batch(args))

    def step() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = compiled(ids, labels)
        loss.backward()
        return loss.detach(), model.first_query.grad

    return step


def make_step(args: argparse.Namespace) -> Step:
    if args.system in OURS:
        return ours(args, args.system)
    if args.system == "AutoSP":
        return autosp(args)
    if args.system == "local":
        return local(args)
    return gathered(args, is_compiled=args.system == "gathered")


def mean_over_ranks(loss: Tensor) -> Tensor:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


# --- A rank: does what it is told, line by line ---------------------------------------------------


def rank_main(args: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    store = dist.FileStore(args.store, args.world_size)
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world_size, store=store)
    step = make_step(args)
    expected = reference(args) if args.system != "local" else None

    def timed(count: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - start

    def errors() -> tuple[float, float] | None:
        loss, grad = step()
        if expected is None:
            return None
        wanted, wanted_grad = expected
        return (
            abs(loss.item() - wanted) / abs(wanted),
            ((grad - wanted_grad).abs().max() / wanted_grad.abs().max()).item(),
        )

    commands: dict[str, Callable[..., Any]] = {
        "ready": lambda: True,
        "steps": timed,
        "errors": errors,
        "received": lambda: received_bytes(step, args.rank, args.world_size),
        "forget_peak": lambda: Path("/proc/self/clear_refs").write_text("5"),
        "peak": peak_bytes,
        "cpu": cpu_seconds,
    }
    for line in sys.stdin:
        name, *given = json.loads(line)
        if name == "end":
            break
        print(json.dumps(commands[name](*given)), file=answers, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def cpu_seconds() -> float:
    """Return what this process has used, and those it has started and seen end."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_bytes() -> int:
    """Return the largest resident memory since it was forgotten."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


ITEMSIZE = {"float": 4, "long int": 8, "bool": 1, "unsigned char": 1, "c10::BFloat16": 2}


def received_bytes(step: Step, rank: int, world_size: int) -> int:
    """Return what other ranks send to this one in a step, by the collectives in its profile."""
    with (
        tempfile.NamedTemporaryFile(suffix=".json") as file,
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile,
    ):
        step()
        profile.stop()
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    return sum(bytes_of(event, rank, world_size) for event in events)


def bytes_of(event: dict[str, Any], rank: int, world_size: int) -> int:
    name, given = event["name"], event.get("args", {})
    if name not in (
        "c10d::alltoall_base_",
        "gloo:all_gather",
        "_c10d_functional::reduce_scatter_tensor",
        "c10d::_reduce_scatter_base_",
    ):
        return 0
    # The output of an exchange, which comes first; the input of a gather; the smaller of a sum.
    shape, itemsize = given["Input Dims"][0], ITEMSIZE[given["Input type"][0]]
    size = itemsize
    for length in shape:
        size *= length
    if name == "gloo:all_gather":
        return size * (world_size - 1)
    if name == "_c10d_functional::reduce_scatter_tensor":
        return size // world_size * (world_size - 1)
    if name == "c10d::_reduce_scatter_base_":
        return size * (world_size - 1)
    splits = json.loads(given["Concrete Inputs"][3] or "[]")
    if not splits:
        return size // world_size * (world_size - 1)
    return size * (sum(splits) - splits[rank]) // max(sum(splits), 1)


# --- The process that starts ranks and tells them when --------------------------------------------


class Ranks:
    """The processes of one system."""

    def __init__(self, args: argparse.Namespace, system: str, world_size: int, caches: str) -> None:
        self.system = system
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        python = args.autosp_python if system == "AutoSP" else sys.executable
        num_ranks = 1 if system == "local" else world_size
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": caches,
            "DS_ACCELERATOR": "cpu",
            "DS_BUILD_OPS": "0",
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",  # DeepSpeed reads it; the store is a file
        }
        self.processes = []
        for rank in range(num_ranks):
            command = [python, __file__, "--system", system, "--rank", str(rank)]
            command += ["--world-size", str(num_ranks), "--of", str(world_size)]
            command += ["--store", f"{self.folder.name}/store"]
            for name in ("layers", "dim", "heads", "kv_heads", "seq_len"):
                command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
            each = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(f"{self.folder.name}/{rank}", "w") as errors:
                process = subprocess.Popen(
                    command,
                    env=each,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            self.processes.append(process)
        self.tell("ready")

    def tell(self, *command: Any) -> list[Any]:
        """Have every rank do something; return their answers."""
        for process in self.processes:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self.processes):
            line = process.stdout.readline()
            if not line:
                text = Path(f"{self.folder.name}/{rank}").read_text()
                self.stop()
                sys.exit(f"{self.system}, rank {rank} failed:\n{text[-4000:]}")
            answers.append(json.loads(line))
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.stdin.write('["end"]\n')
            process.stdin.close()
        for process in self.processes:
            process.wait()
        self.folder.cleanup()

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def started(args: argparse.Namespace, system: str, world_size: int, caches: str) -> Iterator[Ranks]:
    ranks = Ranks(args, system, world_size, caches)
    try:
        yield ranks
        ranks.end()
    finally:
        ranks.stop()


def tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def first_step(ranks: Ranks) -> dict[str, float]:
    before = ranks.tell("cpu")
    seconds = max(ranks.tell("steps", 1))
    used = [b - a for a, b in zip(before, ranks.tell("cpu"), strict=True)]
    return {"cold_s": seconds, "cold_cpu_s": max(used)}


def measure(args: argparse.Namespace, world_size: int) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {system: {} for system in args.systems}
    # In float32.
    unit = 2 * 4 * args.seq_len // world_size * args.dim
    unit = unit * (args.kv_heads or args.heads) // args.heads
    with ExitStack() as stack:
        running = {}
        for system, row in rows.items():
            caches = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            is_compiled = system != "gathered, eager"
            if is_compiled and not args.skip_warm:
                with started(args, system, world_size, caches) as ranks:
                    row |= first_step(ranks)
            ranks = running[system] = stack.enter_context(started(args, system, world_size, caches))
            first = first_step(ranks)
            if is_compiled:
                row |= first if args.skip_warm else {"warm_s": first["cold_s"]}
            tell(f"{world_size} ranks, {system}: {row}")
            errors = ranks.tell("errors")
            if system != "local":
                row["loss_error"] = max(error[0] for error in errors)
                row["q_proj_error"] = max(error[1] for error in errors)
            ranks.tell("forget_peak")
        times: dict[str, list[float]] = {system: [] for system in rows}
        for _ in range(args.repetitions):
            for system, ranks in running.items():
                times[system].append(max(ranks.tell("steps", args.steps)) / args.steps)
        for system, ranks in running.items():
            row = rows[system]
            row["peak_bytes"] = max(ranks.tell("peak"))
            row["step_s"] = median(times[system])
            if system != "local":
                row["u"] = max(ranks.tell("received")) / args.layers / unit
    base = times[args.systems[0]]
    for system, row in rows.items():
        pairs = zip(times[system], base, strict=True)
        row["step"] = median(each / first for each, first in pairs)
        if "local" in rows and "cold_cpu_s" in row:
            row["x_local"] = row["cold_cpu_s"] / rows["local"]["cold_cpu_s"]
    return rows


def main() -> None:
    args = parse_args()
    if args.system:
        rank_main(args)
        return
    from tabulate import tabulate

    if any(args.seq_len % ranks for ranks in args.ranks):
        sys.exit("the ranks must divide the sequence length: the others shard it evenly")
    if not args.autosp_python:
        args.systems = [system for system in args.systems if system != "AutoSP"]
    results = {world_size: measure(args, world_size) for world_size in args.ranks}
    columns = (
        "loss_error",
        "q_proj_error",
        "u",
        "step",
        "cold_s",
        "warm_s",
        "cold_cpu_s",
        "x_local",
    )
    table = [
        [world_size, system, *(row.get(name) for name in columns), row["peak_bytes"] / 2**20]
        for world_size, rows in results.items()
        for system, row in rows.items()
    ]
    headers = ("ranks", "", "loss", "q_proj", "u", "step", "cold", "warm", "cpu", "x local", "peak")
    formats = ("", "", ".0e", ".0e", ".2f", ".2f", ".0f", ".0f", ".0f", ".2f", ".0f")
    print(tabulate(table, headers=headers, floatfmt=formats, missingval="-"))
    arguments = {
        name: value
        for name, value in vars(args).items()
        if name not in ("system", "rank", "world_size", "of", "store", "autosp_python")
    }
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if "AutoSP" in args.systems:
        script = "import importlib.metadata as m; print(m.version('deepspeed'))"
        command = [args.autosp_python, "-c", script]
        versions["deepspeed"] = subprocess.check_output(command, text=True).strip()
    print(json.dumps({"benchmark": "peers", **arguments, **versions, "rows": results}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--autosp-python", metavar="PATH", help="of an environment with DeepSpeed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=0, help="0: as many as heads")
    parser.add_argument("--seq-len", type=int, default=1024, help="of the whole sequence")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="per repetition")
    parser.add_argument("--skip-warm", action="store_true", help="start every system once")
    # For a rank, which this script starts.
    parser.add_argument("--system", choices=SYSTEMS, help=argparse.SUPPRESS)
    for name in ("--rank", "--world-size", "--of"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
