"""The command line: ``python -m cp_inductor plan --world-size 8 --seq-len 131072``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from cp_inductor.errors import CPError
from cp_inductor.plan import (
    LAYOUTS,
    STRATEGIES,
    Device,
    Link,
    Plan,
    cost_of,
    lower_bound,
    plan_attention,
)
from cp_inductor.plan.text import format_program

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return its exit code: 0, 1 if it was refused, 2 for a wrong call."""
    args = _parser().parse_args(arguments)
    try:
        print(args.run(args))
    except CPError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cp_inductor")
    commands = parser.add_subparsers(required=True, metavar="command")
    plan = commands.add_parser(
        "plan",
        help="plan one attention, prove the plan for all ranks, and say what it costs",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    plan.set_defaults(run=_plan)
    size = plan.add_argument_group("the attention")
    size.add_argument("--world-size", type=int, required=True, help="ranks that share the sequence")
    size.add_argument("--seq-len", type=int, required=True, help="of the whole sequence")
    size.add_argument("--kv-len", type=int, help="keys of the whole sequence, if others")
    size.add_argument("--heads", type=int, default=32)
    size.add_argument("--kv-heads", type=int, help="as many as heads, if not given")
    size.add_argument("--head-dim", type=int, default=128)
    size.add_argument("--itemsize", type=int, default=2, help="bytes of an element")
    size.add_argument("--mask", choices=("causal", "full"), default="causal")
    choice = plan.add_argument_group("the plan")
    choice.add_argument("--layout", choices=LAYOUTS, default="contiguous")
    choice.add_argument(
        "--strategy", default="auto", help=f"{', '.join(STRATEGIES)}, heads2+blocks"
    )
    choice.add_argument("--stages", type=int, default=0, help="0 chooses by cost")
    choice.add_argument("--keep", type=int, default=0, help="stages kept for the backward")
    machine = plan.add_argument_group("the machine, for the choice and the predicted times")
    machine.add_argument("--gbytes-per-s", type=float, default=Link().bytes_per_s / 1e9)
    machine.add_argument("--latency-us", type=float, default=Link().latency_s * 1e6)
    machine.add_argument("--tflops", type=float, default=Device().flops_per_s / 1e12)
    output = plan.add_argument_group("what to print")
    output.add_argument("--verbose", action="store_true", help="every line of the plan")
    output.add_argument("--rank", type=int, help="every line of one rank's part")
    output.add_argument("--cost", action="store_true", help="the cost as expressions")
    output.add_argument("--json", action="store_true", help="the summary as one JSON object")
    return parser


def _plan(args: argparse.Namespace) -> str:
    link = Link(args.latency_us * 1e-6, args.gbytes_per_s * 1e9)
    device = Device(args.tflops * 1e12)
    plan = plan_attention(
        seq_len=args.seq_len,
        kv_len=args.kv_len,
        world_size=args.world_size,
        num_heads=args.heads,
        num_kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        itemsize=args.itemsize,
        mask=args.mask,
        layout=args.layout,
        strategy=args.strategy,
        stages=args.stages,
        keep=args.keep,
        link=link,
        device=device,
    )
    summary = _summary(plan, link, device)
    if args.json:
        return json.dumps(summary)
    lines = [f"{name:<34}{value}" for name, value in summary.items()]
    plans = (plan, plan.backward())
    if args.cost:
        for one in plans:
            cost = cost_of(one)
            lines += ["", f"{one.direction.value}:"]
            lines += [f"  {name} = {getattr(cost, name)}" for name in cost.__slots__]
    if args.rank is not None:
        for one in plans:
            lines += ["", f"{one.direction.value}, rank {args.rank}:"]
            lines.append(format_program(one, args.rank))
    if args.verbose:
        lines += ["", *(one.format() for one in plans)]
    return "\n".join(lines)


def _summary(plan: Plan, link: Link, device: Device) -> dict[str, Any]:
    """Prove a plan and its backward, and return what they come to, per batch entry."""
    grid, shape = plan.grid, plan.shape
    summary: dict[str, Any] = {
        "strategy": plan.strategy,
        "layout": grid.layout,
        "ranks": grid.world_size,
        "chunks per rank": grid.chunks_per_rank,
        "tiles of the busiest rank": max(
            sum(len(stage.tiles) for stage in plan.program(rank)) for rank in range(grid.world_size)
        ),
        "flops, busiest / mean": round(plan.balance, 4),
    }
    total = 0
    for one in (plan, plan.backward()):
        timeline = one.simulate(link, device)
        received = [one.bytes_received(rank) for rank in range(grid.world_size)]
        total += max(received)
        name = one.direction.value
        exchanges = sum(bool(stage.fetch) + bool(stage.home) for stage in one.stages)
        summary[f"{name} exchanges"] = exchanges
        summary[f"{name} bytes received, most"] = max(received)
        summary[f"{name} bytes received, mean"] = sum(received) // len(received)
        summary[f"{name} predicted ms"] = round(timeline.total_s * 1e3, 3)
        summary[f"{name} of these exposed ms"] = round(timeline.exposed_s * 1e3, 3)
    if grid.query_length == grid.key_length and not plan.strategy.startswith("heads"):
        bound = lower_bound(shape, grid.world_size, grid.query_length, plan.mask)
        if bound:
            summary["bytes received / lower bound"] = round(total / bound, 3)
    return summary


if __name__ == "__main__":
    sys.exit(main())
