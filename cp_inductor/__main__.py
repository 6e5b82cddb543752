"""The command line.

    python -m cp_inductor plan --world-size 8 --seq-len 131072
    python -m cp_inductor explain model.py:build --world-size 8
    python -m cp_inductor code model.py:build --world-size 1024 --rank 517 --target cuda:sm_90
    python -m cp_inductor estimate model.py:build --world-size 8 --target h100
    python -m cp_inductor doctor

Exit codes: 0 for success; 1 if something was refused or is wrong; 2 for a wrong call, such as an
impossible size or rank, a text that cannot be parsed, or a file that cannot be written.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cp_inductor.errors import CPError, InvalidArgument, InvalidText
from cp_inductor.plan import STRATEGIES, Machine, Plan, plan_attention
from cp_inductor.plan.checks import MAX_WORLD_SIZE, check_count
from cp_inductor.plan.facade import format_program
from cp_inductor.plan.machine import CALIBRATED
from cp_inductor.plan.simulate import loads_of

# What a command says, as data for JSON and as text, and whether all is well.
Said = tuple[Any, str, bool]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 1 if refused, 2 for a wrong call."""
    args = _parser().parse_args(arguments)
    try:
        if "world_size" in args:
            check_count("--world-size", args.world_size, 1, MAX_WORLD_SIZE, site=args.command)
            if args.rank is not None:
                check_count("--rank", args.rank, 0, args.world_size - 1, site=args.command)
        data, text, is_fine = args.run(args)
    except CPError as error:
        # What Dynamo adds about the user's code and its own logs is not part of the refusal.
        first, *_ = str(error).splitlines()
        print(f"{type(error).__name__}: {first}", file=sys.stderr)
        return 2 if isinstance(error, (InvalidArgument, InvalidText)) else 1
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    try:
        if text:
            print(json.dumps(data) if args.json else text, flush=True)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0
    return 0 if is_fine else 1


MACHINES = "the machine to plan for, such as '8xh100:nvlink4 x 8:ib400', or 'calibrated'"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cp_inductor")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    plan = _add_command(commands, _plan)
    add = plan.add_argument_group("the attention").add_argument
    add("--world-size", type=size, required=True, help="ranks that share the sequence")
    add("--seq-len", type=size, required=True, help="tokens of it, such as 64k or 1M")
    add("--kv-len", type=size, help="keys of the whole sequence; by default --seq-len")
    add("--heads", type=int, default=32, dest="num_heads")
    add("--kv-heads", type=int, dest="num_kv_heads", help="by default, as many as --heads")
    add("--head-dim", type=int, default=128)
    add("--itemsize", type=int, default=2, help="bytes per element")
    masks = "causal, full, or an expression such as '(k-q<=0)&(q-k-127<=0)'"
    add("--mask", default="causal", help=masks)
    add = plan.add_argument_group("the plan").add_argument
    add("--strategy", default="auto", help=f"{', '.join(STRATEGIES)}, heads2+blocks")
    add("--stages", type=int, default=0, help="number of exchanges; 0 chooses by cost")
    kept = "number of stages whose fetched data is kept for the backward"
    add("--keep", type=int, default=0, help=kept)
    add("--machine", help=MACHINES)
    add = plan.add_argument_group("what to print").add_argument
    add("--verbose", action="store_true", help="print every line of the plan")
    add("--rank", type=int, help="print every line of this rank's part")
    picture = "draw who computes what, for all heads, to this .png or .svg"
    add("--draw", type=Path, help=picture)

    explain = _add_command(commands, _explain)
    _add_world(explain)
    add = explain.add_argument
    add("--html", type=Path, help="write one page, with pictures, to this file")
    add("--compiled", action="store_true", help="show the graphs and the generated code, too")

    code = _add_command(commands, _code)
    _add_world(code)
    add, kinds = code.add_argument, ("forward", "backward", "inference")
    add("--graph", choices=kinds, help="print only this graph")
    add("--output", type=Path, help="write one file per graph to this folder")
    numbers = "compile the kernels; print the registers and memory they use"
    add("--kernels", action="store_true", help=numbers)

    estimate = _add_command(commands, _estimate)
    _add_world(estimate)
    estimate.set_defaults(target="h100", rank=None)
    add, ways = estimate.add_argument, ("none", "layers", "offload")
    again = "compute each layer again in the backward, from inputs on the device or the host"
    add("--checkpoint", choices=ways, default="none", help=again)
    add("--sharding", choices=("none", "fsdp"), default="none", help="of weights and states")
    held = "of weights, gradients and states between steps; by default the model's"
    add("--held-dtype", choices=("float32", "bfloat16"), help=held)
    states = "numbers per parameter: 2 for Adam"
    add("--optimizer-states", type=int, default=2, help=states)

    _add_command(commands, _calibrate)
    doctor = _add_command(commands, _doctor)
    help_of_patches = "also list what of torch is replaced, when, and why"
    doctor.add_argument("--patches", action="store_true", help=help_of_patches)
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults are printed, and examples stay lines."""


def _add_command(commands: Any, run: Callable[[argparse.Namespace], Said]) -> Any:
    """Add the command of a function, whose docstring is its help: what it does, and examples."""
    what, _, examples = inspect.cleandoc(run.__doc__ or "").partition("\n\n")
    parser = commands.add_parser(
        run.__name__.removeprefix("_"),
        help=what,
        description=what,
        epilog=f"examples:\n{examples}",
        formatter_class=_Formatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def size(text: str) -> int:
    """Read a number of tokens or ranks: 65536, 64k, 1M; k is 1024, and M is 1024 k."""
    factor = {"k": 1 << 10, "m": 1 << 20}.get(text[-1:].lower(), 1)
    return int(text[:-1] if factor > 1 else text) * factor


def _add_world(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rank", type=int, default=0)
    model = (
        "module:function or file.py:function, where function(mesh) or function() returns"
        " (model, args), optionally followed by kwargs and options"
    )
    add("model", help=model)
    add("--world-size", type=size, required=True, help="number of ranks")
    add("--target", default="cuda:sm_90", help="cpu, h200, cuda:sm_90, ...")
    add("--mesh-shape", type=_numbers, help="such as 2,4; by default one axis")
    add("--mesh-names", type=_names, help="such as dp,cp")
    add("--inference", action="store_true", help="compile without gradients")
    add("--strategy", help="as for the command plan")
    add("--stages", type=int)
    add("--machine", help=MACHINES)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, _names(text)))


def _doctor(args: argparse.Namespace) -> Said:
    """Check torch, triton, caches, compilers, process groups.

    python -m cp_inductor doctor
    python -m cp_inductor doctor --json
    """
    from cp_inductor.inspect.doctor import examine
    from cp_inductor.torch_private.leaned_on import patches

    checks = examine()
    is_fine = all(check.state != "problem" for check in checks)
    lines = [*map(str, checks)]
    if args.patches:
        rows = (f"{name:<10}{text}" for patch in patches() for name, text in patch.items())
        lines += ["", "patches of torch", *rows]
    return [asdict(check) for check in checks], "\n".join(lines), is_fine


def _calibrate(args: argparse.Namespace) -> Said:
    """Measure the ranks of a torchrun and their links, for --machine calibrated.

    torchrun --nproc-per-node 8 -m cp_inductor calibrate
    torchrun --nproc-per-node 8 -m cp_inductor calibrate --json
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from cp_inductor.inspect.calibrate import calibrate

    if not dist.is_torchelastic_launched():
        raise InvalidArgument(
            site=args.command,
            expected="ranks started by torchrun",
            got="a process of its own",
            remedy="run torchrun --nproc-per-node 8 -m cp_inductor calibrate",
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    is_printed = args.json and dist.get_rank() == 0  # as text the first rank has said it
    try:
        with redirect_stdout(sys.stderr) if args.json else nullcontext():
            machine = calibrate(init_device_mesh(device, (dist.get_world_size(),)))
    finally:
        dist.destroy_process_group()
    text = machine.format()
    return {"machine": text, **asdict(machine)}, text * is_printed, True


def _explain(args: argparse.Namespace) -> Said:
    """Report what happens to every attention, and why.

    python -m cp_inductor explain model.py:build --world-size 8
    python -m cp_inductor explain model.py:build --world-size 8 --html report.html
    python -m cp_inductor explain model.py:build --world-size 64 --mesh-shape 8,8 --mesh-names dp,cp
    """
    from cp_inductor.inspect.compile_for import target_for_code
    from cp_inductor.inspect.cross_compile import cross_compile_here
    from cp_inductor.inspect.explain import explain
    from cp_inductor.inspect.page import check_matplotlib

    target = None
    if args.html is not None:
        check_matplotlib()
        target = target_for_code(args.target) if args.compiled else None
    with _example(args) as example:
        options = {"options": example.options, "target": args.target}
        report = explain(example.model, *example.args, **options, **example.kwargs)
        compiled = None
        if target is not None and report.is_fine:
            compiled = cross_compile_here(example, target=target)
    if args.html is not None:
        report.html(args.html, compiled)
    return report.to_dict(), str(report), report.is_fine


def _code(args: argparse.Namespace) -> Said:
    """Print the code that a rank would run.

    python -m cp_inductor code model.py:build --world-size 1k --rank 517 --target cuda:sm_90
    python -m cp_inductor code model.py:build --world-size 8 --graph backward --output generated
    python -m cp_inductor code model.py:build --world-size 8 --kernels
    """
    from cp_inductor.inspect.compile_for import target_for_code
    from cp_inductor.inspect.cross_compile import count_tiles, cross_compile_here

    target = target_for_code(args.target)
    with _example(args) as example:
        compiled = cross_compile_here(example, target=target)
    if args.graph not in (None, *compiled.code):
        raise InvalidArgument(
            site="--graph",
            expected=" or ".join(compiled.code) + ", the graphs that there are",
            got=args.graph,
            remedy="leave out --inference for a backward, or name one of these",
        )
    code = {kind: text for kind, text in compiled.code.items() if args.graph in (None, kind)}
    folder = args.output or Path()
    paths = {folder / f"rank{args.rank}_{kind}.py": text for kind, text in code.items()}
    if args.output is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text)
    if args.kernels:
        kernels = [k for k in compiled.compile_kernels() if args.graph in (None, k.graph)]
        lines = [f"{'registers':>9} {'spills B':>8} {'shared B':>8}  kernel"]
        lines += [
            f"{k.registers:>9} {k.spill_bytes:>8} {k.shared_bytes:>8}  {k.graph} {k.name}"
            f" [{k.config}]"
            for k in kernels
        ]
        return [k.to_dict() for k in kernels], "\n".join(lines), True
    lines = [
        f"# === {kind}, rank {args.rank}: {count_tiles(compiled.graphs[kind])}\n{text}"
        for kind, text in code.items()
    ]
    return code, "\n".join(lines if args.output is None else map(str, paths)), True


def _estimate(args: argparse.Namespace) -> Said:
    """Estimate the memory and the time of a training step, on paper.

    python -m cp_inductor estimate model.py:build --world-size 8 --target h100
    python -m cp_inductor estimate model.py:build --world-size 8 --checkpoint layers --sharding fsdp
    """
    import torch

    from cp_inductor.inspect.compile_for import target_for_code
    from cp_inductor.inspect.estimate import States, estimate_here

    target = target_for_code(args.target)
    args.rank = args.world_size // 2 if args.rank is None else args.rank
    dtype = None if args.held_dtype is None else getattr(torch, args.held_dtype)
    states = States(args.sharding, dtype, args.optimizer_states)
    with _example(args) as example:
        estimate = estimate_here(example, target=target, checkpoint=args.checkpoint, states=states)
    return estimate.to_dict(), str(estimate), estimate.is_fine


@contextmanager
def _example(args: argparse.Namespace) -> Iterator[Any]:
    """Load the named model and its options, on a rank of a world that need not exist.

    Plain tensors beside DTensors, such as positions that a model makes itself, are replicated.
    """
    import torch
    from torch.distributed.tensor.experimental import implicit_replication

    from cp_inductor.inspect.world import failures_named, load_example, place, pretended_world

    with pretended_world(args.rank, args.world_size, args.mesh_shape, args.mesh_names) as mesh:
        example = place(load_example(args.model, mesh), mesh)
        flags = {name: getattr(args, name) for name in ("strategy", "stages", "machine")}
        flags = {name: value for name, value in flags.items() if value is not None}
        within = nullcontext() if example.like is None else implicit_replication()
        with within, failures_named(args.model), torch.set_grad_enabled(not args.inference):
            yield replace(example, options={**example.options, **flags})


def _plan(args: argparse.Namespace) -> Said:
    """Plan one attention, check the plan for all ranks, and print what it costs.

    python -m cp_inductor plan --world-size 8 --seq-len 128k
    python -m cp_inductor plan --world-size 4 --seq-len 16k --strategy blocks --draw plan.png
    python -m cp_inductor plan --world-size 64 --seq-len 1M --mask '(k-q<=0)&(q-k-1023<=0)' --json
    python -m cp_inductor plan --world-size 64 --seq-len 1M --rank 17
    """
    if args.machine == CALIBRATED:
        from cp_inductor.dtensor.recipe import machine_text

        args.machine = machine_text(CALIBRATED, site="--machine")
    machine = Machine.parse(args.machine, site="--machine") if args.machine else Machine()
    sizes = ("seq_len", "kv_len", "world_size", "num_heads", "num_kv_heads", "head_dim", "itemsize")
    names = (*sizes, "mask", "strategy", "stages", "keep")
    plan = plan_attention(**{name: getattr(args, name) for name in names}, machine=machine)
    plans = (plan, plan.backward())
    summary = _summary(plans, machine)
    if args.draw is not None:
        plan.draw(args.draw)
    lines = [_line(name, value) for name, value in summary.items()]
    if args.rank is not None:
        for way in plans:
            lines += ["", f"{way.direction.value}, rank {args.rank}:"]
            lines.append(format_program(way, args.rank))
    if args.verbose:
        lines += ["", *(way.format() for way in plans)]
    return summary, "\n".join(lines), True


# What the end of a line's name means.
MEANING = {
    "chunks per rank": "(pieces of a rank's tokens that the plan counts in)",
    "tiles of the busiest rank": "(attention calls of a forward)",
    "flops, busiest / mean": "(1 is perfect)",
    "received, most": "(by the rank that receives most)",
    "exposed ms": "(exchanges that no tile hides)",
}


def _line(name: str, value: Any) -> str:
    """Return a line of the summary, with units."""
    meaning = next((text for end, text in MEANING.items() if name.endswith(end)), "")
    if "bytes received" in name:
        name, value = name.replace("bytes ", ""), _in_bytes(value)
    elif name.endswith(" ms"):
        name, value = name.removesuffix(" ms"), f"{value:g} ms"
    return f"{name:<42}{value}  {meaning}".rstrip()


def _in_bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} GiB"


def _summary(plans: tuple[Plan, Plan], machine: Machine) -> dict[str, Any]:
    """Check a plan and its backward, and return what they cost per batch entry."""
    plan, _ = plans
    grid = plan.grid
    summary: dict[str, Any] = {
        "strategy": plan.strategy,
        "ranks": grid.world_size,
        "chunks per rank": grid.chunks_per_rank,
        "tiles of the busiest rank": max(
            sum(len(stage.tiles) for stage in plan.program(rank)) for rank in range(grid.world_size)
        ),
        "flops, busiest / mean": round(plan.balance, 4),
    }
    for way in plans:
        name = way.direction.value
        timeline = way.simulate(machine)
        received = [way.bytes_received(rank) for rank in range(grid.world_size)]
        exchanges = sum(bool(stage.fetch) + bool(stage.home) for stage in way.stages)
        summary[f"{name} exchanges"] = exchanges
        summary[f"{name} bytes received, most"] = max(received)
        summary[f"{name} bytes received, mean"] = sum(received) // len(received)
        if len(machine.levels) > 1:
            between = loads_of(way, machine).received_over(-1)
            summary[f"{name} bytes received, most, between nodes"] = int(between.max())
        summary[f"{name} predicted ms"] = round(timeline.total_s * 1e3, 3)
        summary[f"{name} of these exposed ms"] = round(timeline.exposed_s * 1e3, 3)
    return summary


if __name__ == "__main__":
    sys.exit(main())
