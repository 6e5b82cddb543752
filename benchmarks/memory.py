"""Peak memory of an attention layer, by strategy, against gathering all keys and values.

    python benchmarks/memory.py --ranks 4 16

Counted by the liveness pass over the lowered and scheduled graphs of a transformer layer (norms,
projections, attention, gated MLP), forward and backward, of a middle rank under a fake process
group: what is alive at once beside weights and inputs. No tensor of these sizes is allocated.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.overlap import Layer, attend_ours
from cp_inductor import cross_compile
from cp_inductor.passes import report
from cp_inductor.schedule.overlap import Measured

STRATEGIES = ("allgather", "ring", "blocks", "heads", "auto")


def peak_bytes(args: argparse.Namespace, world_size: int, strategy: str) -> dict[str, int]:
    with torch.device("meta"):
        model = Layer(args.dim, args.heads, attend_ours).to(torch.bfloat16)
        x = torch.empty(1, args.tokens, args.dim, dtype=torch.bfloat16, requires_grad=True)
    found: dict[str, int] = {}

    def note(kind: str, before: Measured, after: Measured, budget_bytes: int) -> None:
        found[kind] = after.peak_bytes
        found[f"{kind}_unscheduled"] = before.peak_bytes
        found[f"{kind}_budget"] = budget_bytes

    with mock.patch.object(report, "report_schedule", note):
        cross_compile(
            model,
            (x,),
            world_size=world_size,
            rank=world_size // 2,
            target="cpu",
            options={"strategy": strategy},
        )
    counters.clear()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--tokens", type=int, default=1024, help="per rank")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    args = parser.parse_args()
    rows = []
    for world_size in args.ranks:
        row: dict[str, Any] = {"ranks": world_size}
        for strategy in STRATEGIES:
            row[strategy] = peak_bytes(args, world_size, strategy)
        rows.append(row)
    for kind in ("forward", "backward"):
        gib = [
            [row["ranks"], *(row[strategy][kind] / 2**30 for strategy in STRATEGIES)]
            for row in rows
        ]
        print(f"{kind}: GiB alive at once")
        print(tabulate(gib, headers=("ranks", *STRATEGIES), floatfmt=".2f"), end="\n\n")
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"benchmark": "memory", **vars(args), **versions, "rows": rows}))


if __name__ == "__main__":
    main()
