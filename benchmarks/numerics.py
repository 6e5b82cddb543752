"""Errors of every strategy against float64, by those of single-device flash attention.

    python benchmarks/numerics.py                 all of it, some 20 minutes on two cores
    python benchmarks/numerics.py --cases sink --dtypes bfloat16 --ranks 3 --lengths 250
    python benchmarks/numerics.py --document      writes docs/numerics.md, too

Prints a table, the worst ratio over out, dq, dk and dv, over ranks and over lengths, and as its
last line one JSON object with all of them. What the ratios are: see `tests/precision.py`.
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

from tests.precision import CASES, DTYPES, STRATEGIES, Errors, measure  # noqa: E402

DOCUMENT = ROOT / "docs/numerics.md"
MARK = "<!-- below: written by benchmarks/numerics.py -->\n"

# Longer sequences are for the cases that say so.
SHORT = 1000

Row = dict[str, Any]


def run(args: argparse.Namespace) -> list[Row]:
    rows = []
    for case in CASES:
        if args.cases and case.name not in args.cases:
            continue
        for dtype in args.dtypes:
            for length in args.lengths:
                if length > SHORT and not case.is_long:
                    continue
                for world_size in args.ranks:
                    ratios = measure(case, dtype, world_size, length)
                    row = {"case": case.name, "dtype": dtype, "ranks": world_size}
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=[])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[250, 4096])
    parser.add_argument("--document", action="store_true", help="write docs/numerics.md")
    args = parser.parse_args()
    rows = run(args)
    table = table_of(rows)
    print(table)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    if args.document:
        said = f"torch {versions['torch']}, Python {versions['python']}, {platform.machine()} CPU"
        lengths = " and ".join(map(str, args.lengths))
        ranks = ", ".join(map(str, args.ranks))
        where = f"{datetime.date.today()}, {said}. P = {ranks}; {lengths} tokens."
        before, _, _ = DOCUMENT.read_text().partition(MARK)
        DOCUMENT.write_text(f"{before}{MARK}\n{where}\n\n{table}\n")
    print(json.dumps({"benchmark": "numerics", **vars(args), **versions, "rows": rows}))


if __name__ == "__main__":
    main()
