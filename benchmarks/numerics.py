"""Errors of every strategy against float64, by those of single-device flash attention.

    python benchmarks/numerics.py                 all of it, some 10 minutes on two cores
    python benchmarks/numerics.py --cases sink --dtypes bfloat16 --ranks 3 --lengths 250
    python benchmarks/numerics.py --exact-tiles   what is left if kernels rounded no tile

Prints a table, the worst ratio over out, dq, dk and dv, over ranks and over lengths, and as its
last line one JSON object with all of them. What the ratios are: see `tests/support/precision.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import precision  # noqa: E402
from tests.support.precision import CASES, DTYPES, STRATEGIES, Errors, measure  # noqa: E402

# Longer sequences are for the cases that say so, a minute each: as attention by the definition is.
SHORT = 1000

Row = dict[str, Any]


def run(args: argparse.Namespace) -> list[Row]:
    rows = []
    for case in CASES:
        if args.cases and case not in args.cases:
            continue
        for dtype in args.dtypes:
            for length in args.lengths:
                is_long = length > SHORT
                if is_long and (case not in precision.LONG or dtype not in args.long_dtypes):
                    continue
                for world_size in args.long_ranks if is_long else args.ranks:
                    ratios = measure(
                        case, dtype, world_size, length, has_exact_tiles=args.exact_tiles
                    )
                    row = {"case": case, "dtype": dtype, "ranks": world_size}
                    rows.append({**row, "tokens": length, "ratios": ratios})
                    print(".", end="", flush=True, file=sys.stderr)
    return rows


def table_of(rows: list[Row]) -> str:
    """Return the worst of each case and dtype, by strategy."""
    lines = []
    for key in dict.fromkeys((row["case"], row["dtype"]) for row in rows):
        of_key = [row["ratios"] for row in rows if (row["case"], row["dtype"]) == key]
        cells = []
        for strategy in STRATEGIES:
            found = [errors for r in of_key if strategy in r for errors in r[strategy].values()]
            worst = Errors(*map(max, zip(*found, strict=True))) if found else None
            cells.append(f"{worst.rms:.2f} / {worst.largest:.2f}" if worst else "")
        lines.append([*key, *cells])
    return tabulate(lines, headers=("case", "dtype", *STRATEGIES), tablefmt="github")


def describe_runs(rows: list[Row]) -> list[str]:
    """Say of each length which cases, dtypes and ranks are in the table."""
    lines = []
    for length in dict.fromkeys(row["tokens"] for row in rows):
        of_length = [row for row in rows if row["tokens"] == length]
        cases, dtypes, ranks = (
            list(dict.fromkeys(str(row[key]) for row in of_length))
            for key in ("case", "dtype", "ranks")
        )
        of_cases = "all cases" if len(cases) == len(CASES) else "; ".join(cases)
        what = f"{length} tokens, batch {precision.batch_of(length)}"
        lines.append(f"{what}, P = {', '.join(ranks)}, {', '.join(dtypes)}: {of_cases}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[250, 4096])
    parser.add_argument("--long-dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--long-ranks", type=int, nargs="+", default=[4])
    parser.add_argument(
        "--exact-tiles", action="store_true", help="tiles in float32, against what they round"
    )
    args = parser.parse_args()
    rows = run(args)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    said = f"torch {versions['torch']}, Python {versions['python']}, {platform.machine()} CPU"
    print(
        f"{datetime.date.today()}, {said}; 4 heads (3 at P = 3), head dim {precision.HEAD_DIM}.\n"
    )
    print(*(f"* {line}" for line in describe_runs(rows)), "", table_of(rows), sep="\n")
    print(json.dumps({"benchmark": "numerics", **vars(args), **versions, "rows": rows}))


if __name__ == "__main__":
    main()
