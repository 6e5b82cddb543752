"""Everything that wants a GPU, in stages of a few minutes each, on one device.

    python benchmarks/gpu_campaign.py                    all stages, 40 minutes
    python benchmarks/gpu_campaign.py numbers tiles      some
    python benchmarks/gpu_campaign.py --tiny             the same code on the CPU, with tiny shapes

The first 8 minutes run the first rows of three stages: are numbers right (4 minutes), how fast are
tiles beside one flash call (2), are exchanges hidden (2). Then each stage runs what is left of it.

stage      minutes  what
numbers    8        out and gradients of every rank, and of a layer of four models, against float64,
                    as fractions of the tolerance;
                    P = 2, 4, 8 processes share the device, exchanges go through the host
tiles      8        a rank's kernels over one flash call of as many pairs; torch's ring beside it
ranks      6        models and the overlap of exchanges, on several NCCL ranks if NCCL lets them
                    share a device, else with staged exchanges
memory     5        the most bytes of a layer's graphs, allocated over predicted
compile    5        seconds of the first step, beside plain Inductor's on the local model
long       8        two layers of Qwen3-8B at 131,072 tokens, ranks 0, 3 and 7 of 8

Each stage writes its table after each row, into a file of its own under --results, which also holds
what a later run needs to go on: rows that are there are not run again. A row that fails says why in
the table and ends nothing else. Exits with 1 if a number is off or a row failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the package, where it is not installed

from benchmarks import gpu_stages as stages
from benchmarks.gpu_worlds import Outcome, Run, World, run_rows

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Stage:
    """A part of the campaign.

    Attributes:
        minutes: that it may take.
        worlds: the worlds for a device; every row runs in each.
        rows: what to run; tiny or not.
        run: one row on one rank.
        summarize: the results of all ranks of a row => the columns of its line.
        row_s: seconds that one row may take.
        first: minutes of it that come before all else.
    """

    minutes: float
    worlds: Callable[[str, bool], Sequence[World]]
    rows: Callable[[bool], Sequence[Any]]
    run: Run
    summarize: Callable[[World, Results], Row]
    row_s: float = 180.0
    first: float = 0.0


def staged(device: str, tiny: bool) -> list[World]:
    """Return worlds whose processes share the device; the one that says most comes first."""
    sizes = (2,) if tiny else (4, 8, 2)
    return [World("staged", size, tuple(range(size)), device) for size in sizes]


def pretended(device: str, tiny: bool) -> list[World]:
    """Return a world of 8 of which the first, a middle and the last rank are played."""
    return [World("pretended", 4 if tiny else 8, (0, 3) if tiny else (0, 3, 7), device)]


def first_alone(device: str, tiny: bool) -> list[World]:
    return [World("pretended", 8, (0,), device)]


def one_by_one(device: str, tiny: bool) -> list[World]:
    """Return worlds of one rank each, for rows that need the whole memory."""
    return [World("pretended", 8, (rank,), device) for rank in ((7,) if tiny else (0, 3, 7))]


def real(device: str, tiny: bool) -> list[World]:
    """Return a world of two ranks: of NCCL, if it lets two of them share a device."""
    nccl = World("nccl", 2, (0, 1), device)
    outcomes = run_rows(nccl, meet, [None], row_s=60, until=time.monotonic() + 60)
    is_possible = not any(isinstance(outcome, str) for _, outcome in outcomes)
    return [nccl if is_possible else World("staged", 2, (0, 1), device)]


def meet(row: None, mesh: Any) -> Row:
    """Add a number over the ranks."""
    one = torch.ones(1, device=mesh.device_type)
    torch.distributed.all_reduce(one)
    return {"sum": one.item()}


def worst_of_ranks(world: World, results: Results) -> Row:
    return {name: max(found[name] for found in results) for name in results[0]}


def share_of_flash(world: World, results: Results) -> Row:
    """Return how fast tiles are beside one flash call, and what the busiest rank takes."""
    row: Row = {}
    for kind in ("forward", "backward"):
        times = [found[kind] for found in results]
        total = [time["total"] for time in times]
        row[f"{kind} ms"] = max(total)
        row[f"{kind} single/tiles"] = min(
            time["single"] / max(time["tiles"], 1e-9) for time in times
        )
        row[f"{kind} beside tiles ms"] = max(time["total"] - time["tiles"] for time in times)
        row[f"{kind} worst/mean"] = max(total) / (sum(total) / len(total))
        if "ring" in times[0]:
            row[f"{kind} ring/ours"] = max(time["ring"] for time in times) / max(total)
    return row


def allocated_over_predicted(world: World, results: Results) -> Row:
    return {
        f"{kind} {name}": value
        for kind in ("forward", "backward")
        for worst in [max((found[kind] for found in results), key=lambda peak: peak["allocated"])]
        for name, value in (
            ("MiB", worst["allocated"] / 2**20),
            ("allocated/predicted", worst["allocated"] / max(worst["predicted"], 1)),
        )
    }


STAGES: Mapping[str, Stage] = {
    "numbers": Stage(8, staged, stages.numbers_rows, stages.numbers, worst_of_ranks, first=4),
    "tiles": Stage(8, pretended, stages.tiles_rows, stages.tiles, share_of_flash, first=2),
    "ranks": Stage(6, real, stages.ranks_rows, stages.ranks, worst_of_ranks, first=2),
    "memory": Stage(5, pretended, stages.memory_rows, stages.memory, allocated_over_predicted),
    "compile": Stage(5, first_alone, stages.first_step_rows, stages.first_step, worst_of_ranks),
    "long": Stage(8, one_by_one, stages.long_rows, stages.long_context, worst_of_ranks, 440.0),
}


class Table:
    """The file of a stage: a table to read, and the same as JSON to go on from."""

    def __init__(self, path: Path, title: str, about: Row) -> None:
        self.path, self.title, self.about = path, title, about
        self.lines: list[Row] = []
        if path.exists():
            kept = json.loads(path.read_text().rpartition("```json\n")[2].rpartition("\n```")[0])
            if kept["about"] == about:
                # What failed, or was not reached in time, is tried again.
                self.lines = [line for line in kept["lines"] if "failed" not in line]

    def __contains__(self, key: str) -> bool:
        return any(line["key"] == key for line in self.lines)

    def add(self, line: Row) -> None:
        """Add a line, and write the file."""
        self.lines.append(line)
        columns = list(dict.fromkeys(name for one in self.lines for name in one if name != "key"))
        rows = [[format_value(one.get(name, "")) for name in columns] for one in self.lines]
        parts = [
            f"# {self.title}",
            ", ".join(f"{name} {value}" for name, value in self.about.items()),
            "\n".join(map(markdown, (columns, ["---"] * len(columns), *rows))),
            "```json\n" + json.dumps({"about": self.about, "lines": self.lines}) + "\n```",
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("\n\n".join(parts) + "\n")


def markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def format_value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value).replace("\n", "<br>").replace("|", "\\|")


def describe(row: Any) -> Row:
    return asdict(row) if is_dataclass(row) and not isinstance(row, type) else {"row": row}


def run_stage(stage: Stage, minutes: float, table: Table, device: str, tiny: bool) -> Iterator[Row]:
    """Run the rows of a stage that its table lacks; yield the new lines."""
    until = time.monotonic() + 60 * minutes
    for world in stage.worlds(device, tiny):
        place = {"world": world.kind, "P": world.size, "ranks": " ".join(map(str, world.ranks))}
        key_of = {row: json.dumps([place, describe(row)]) for row in stage.rows(tiny)}
        rows = [row for row, key in key_of.items() if key not in table]
        for row, outcome in run_rows(world, stage.run, rows, row_s=stage.row_s, until=until):
            line = {"key": key_of[row], **place, **describe(row), **found(stage, world, outcome)}
            table.add(line)
            yield line


def found(stage: Stage, world: World, outcome: Outcome) -> Row:
    return {"failed": outcome} if isinstance(outcome, str) else stage.summarize(world, outcome)


def is_off(name: str, line: Row) -> bool:
    """Whether a line says that something failed, or that numbers are beyond their tolerance."""
    limits = {
        "numbers": dict.fromkeys((*stages.RESULTS, "loss", "gradients"), 1.0),
        "ranks": {"loss": 1e-3},
    }.get(name, {})
    return "failed" in line or any(line.get(column, 0) > limit for column, limit in limits.items())


def versions(device: str) -> Row:
    about: Row = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    is_cuda = device == "cuda"
    about["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else "none"
    return {**about, "device": torch.cuda.get_device_name() if is_cuda else "cpu"}


def main() -> None:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {', '.join(STAGES)}")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes; the default without a GPU"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    unknown = set(args.stages) - set(STAGES)
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    device, tiny = ("cuda" if has_gpu else "cpu"), args.tiny or not has_gpu
    about, today = versions(device), datetime.date.today().isoformat()
    is_right = True
    names = args.stages or list(STAGES)
    rounds = [(name, STAGES[name].first) for name in names if STAGES[name].first and len(names) > 1]
    rounds += [(name, STAGES[name].minutes) for name in names]
    for name, minutes in rounds:
        kind = "gpu-tiny" if tiny else "gpu"
        path = args.results / f"{kind}-{name}-{today}.md"
        table = Table(path, f"GPU campaign: {name}", about)
        for line in run_stage(STAGES[name], minutes, table, device, tiny):
            shown = {column: value for column, value in line.items() if column != "key"}
            print(name, ", ".join(f"{c} {format_value(v)}" for c, v in shown.items()), flush=True)
            is_right &= not is_off(name, line)
    raise SystemExit(0 if is_right else 1)


if __name__ == "__main__":
    main()
