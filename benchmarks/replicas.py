"""Work of data-parallel replicas before and after they hand documents to each other.

    python benchmarks/replicas.py                        8 replicas of 131072 tokens
    python benchmarks/replicas.py --replicas 4 --tokens 32768 --seeds 20

Batches of documents whose lengths are drawn at random (benchmarks/packed.py). Work is counted as
`cp_inductor.balanced` does: a token costs 1, and as much again for its attention in a document of
`even_length`. A step lasts as long as the busiest replica's:

before, after   the busiest replica's work over the mean, in the mean of all seeds
step            the busiest replica's work after, over before
moved           the part of all tokens that change replicas
longest         tokens of the longest batch after, over those of a batch before

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from typing import Any

import numpy as np
from tabulate import tabulate

from benchmarks.packed import KINDS, pack
from cp_inductor.dtensor.packed import EVEN_LENGTH, assign


def measure(kind: str, replicas: int, tokens: int, seed: int) -> dict[str, float]:
    lengths = [pack(kind, tokens, seed * replicas + each).tolist() for each in range(replicas)]
    labelled = [[True] * len(row) for row in lengths]
    goes = assign(lengths, labelled, EVEN_LENGTH, None)
    goes = goes or [[rank] * len(row) for rank, row in enumerate(lengths)]
    work = np.zeros((2, replicas))
    got = np.zeros(replicas)
    moved = 0
    for rank, (row, to) in enumerate(zip(lengths, goes, strict=True)):
        for length, at in zip(row, to, strict=True):
            cost = length * (1 + length / EVEN_LENGTH)
            work[0, rank] += cost
            work[1, at] += cost
            got[at] += length
            moved += length * (at != rank)
    before, after = work.max(1) / work.mean(1)
    step, part = work[1].max() / work[0].max(), moved / (replicas * tokens)
    longest = got.max() / tokens
    return {"before": before, "after": after, "step": step, "moved": part, "longest": longest}


def main() -> None:
    how = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=131_072, help="of each replica's batch")
    parser.add_argument("--seeds", type=int, default=50)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        found = [measure(kind, args.replicas, args.tokens, seed) for seed in range(args.seeds)]
        mean = {name: round(float(np.mean([one[name] for one in found])), 3) for name in found[0]}
        rows.append({"documents": kind, **mean})
    print(tabulate(rows, headers="keys"))
    versions = {"cp_inductor": version("cp_inductor"), "python": platform.python_version()}
    print(json.dumps({"arguments": vars(args), "versions": versions, "rows": rows}))


if __name__ == "__main__":
    main()
