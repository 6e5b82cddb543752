"""Plans for a machine with two levels of links, beside those for one level, by simulation.

    python benchmarks/nodes.py                      8 nodes of 8
    python benchmarks/nodes.py --machine "72xb200:nvlink5 x 8:ib800" --tokens 16384 --mask causal

Each case has two rows: the plan for one level of links ("flat", the default machine), and the plan
for this machine; both are priced on this machine. Forward and backward of one attention, bfloat16,
head dim 128. The columns:

between, inside   what the rank that receives most receives over links between nodes, and inside,
                  in u: one rank's keys and values
balance           the busiest rank's pairs, over the mean
exchange ms       all exchanges, one after another
exposed ms        the part of them that no tile hides
total ms          with the tiles
bound             at least so much crosses to a node, over its ranks, if each node were one rank
                  whose work is as balanced, whether it splits heads or not

Prints a table, and as its last line one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lower_bound import lower_bound
from cp_inductor.plan import Machine, Plan, Recipe, backward_plan, forward_plan, resolve
from cp_inductor.plan.simulate import loads_of

WINDOW = "(k - q <= 0) & (q - k - 4095 <= 0)"
MASKS = {"causal": "causal", "window": WINDOW}


@dataclass(frozen=True)
class Row:
    """One plan. To add another kind of plan, call `row_of` with its forward and backward."""

    machine: str
    heads: str
    tokens: int
    mask: str
    made_for: str
    strategy: str
    between: float
    inside: float
    balance: float
    exchange_ms: float
    exposed_ms: float
    total_ms: float
    bound: float


def row_of(
    machine: Machine,
    heads: tuple[int, int],
    tokens: int,
    mask: str,
    made_for: str,
    strategy: str,
    plans: Sequence[Plan],
    bound: float,
) -> Row:
    """Return the row of a plan, from what its forward and backward move over each level."""
    unit = 2 * tokens * heads[1] * 128 * 2
    loads = [loads_of(plan, machine) for plan in plans]
    between, inside = (float(sum(one.received_over(n) for one in loads).max()) for n in (-1, 0))
    timelines = [one.timeline(machine) for one in loads]
    return Row(
        machine.format(),
        f"{heads[0]}:{heads[1]}",
        tokens,
        mask,
        made_for,
        strategy,
        between / unit,
        inside / unit,
        max(plan.balance for plan in plans),
        1e3 * sum(one.exchange_s for one in timelines),
        1e3 * sum(one.exposed_s for one in timelines),
        1e3 * sum(one.total_s for one in timelines),
        bound,
    )


def rows_of_static_plans(
    machine: Machine, heads: tuple[int, int], tokens: int, mask: str
) -> Iterator[Row]:
    """Yield the flat plan, and the plan for the machine."""
    inside, outside = machine.levels
    world_size = inside.ranks * outside.ranks
    length = world_size * tokens
    recipe = Recipe(world_size, length, length, *heads, 128, 2, MASKS[mask])
    for made_for, known in (("flat", None), ("machine", machine)):
        chosen = resolve(recipe, site="benchmark", machine=known)
        plans = forward_plan(chosen), backward_plan(chosen)
        bound = lower_bound(
            chosen.shape,
            outside.ranks,
            length,
            MASKS[mask],
            is_kept=chosen.keep > 0,
            splits_heads=True,
        )
        bound /= inside.ranks * 2 * tokens * heads[1] * 128 * 2
        what = f"{chosen.strategy}, {chosen.stages}"
        yield row_of(machine, heads, tokens, mask, made_for, what, plans, bound)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", nargs="+", default=["8xh100:nvlink4 x 8:ib400"])
    parser.add_argument("--heads", nargs="+", default=["32:8"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 16384, 131072])
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=list(MASKS))
    args = parser.parse_args()
    rows: list[Row] = []
    for text in args.machine:
        for heads in args.heads:
            num_heads, num_kv_heads = map(int, heads.split(":"))
            for tokens in args.tokens:
                for mask in args.mask:
                    made = rows_of_static_plans(
                        Machine.parse(text), (num_heads, num_kv_heads), tokens, mask
                    )
                    for row in made:
                        print(row, file=sys.stderr, flush=True)
                        rows.append(row)
    names = [field.name.replace("_", " ") for field in fields(Row)]
    cells = [[getattr(row, field.name) for field in fields(Row)] for row in rows]
    print(tabulate(cells, names, floatfmt=".4g"))
    about = {"benchmark": "nodes", "python": platform.python_version()}
    print(json.dumps({**about, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
