"""Bytes that an attention moves, by heads, ranks, mask and length; beside others, and a bound.

    python benchmarks/traffic.py                 causal and full, 4096 and 32768 tokens per rank
    python benchmarks/traffic.py --ranks 2 4 8 --heads 28:4 --mask causal
    python benchmarks/traffic.py --emitted       by strategy, counted from collectives

Counted is what the rank that receives most receives, forward and backward, in u: one rank's keys
and values in bfloat16. The counts are of plans; tests compare plans with what is emitted, and
`--emitted` counts the collectives (see emitted_traffic.py). The columns:

auto            strategy="auto", which keeps for the backward what costs no memory
time            its predicted time, over that of the fastest plan that was tried
balance         its busiest rank's pairs, over the mean
all kept        strategy="auto", keeping everything that was fetched
least           all kept, by the strategy that moves least with work balanced within 3 %
Ulysses         all-to-all of heads, by its formula; it keeps what it fetched
Magi            MagiAttention, measured once: see magi_attention.json
bound           no plan with work balanced within 3 % receives less, whether it splits heads or not
bound, kept     the same, if everything that was fetched is kept
planning s      from the recipe to the plans of forward and backward

Up to 16 ranks every strategy that fits is tried in 2 stages, and in those that it would choose;
beyond, those that split heads, in 2 stages. Prints tables, a summary of where others move less,
and as its last line one JSON object; rows go to stderr as they are counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lower_bound import lower_bound
from cp_inductor.errors import UnsupportedStrategy
from cp_inductor.plan import (
    Machine,
    Recipe,
    backward_plan,
    forward_plan,
    resolve,
)
from cp_inductor.plan.planner import MAX_IMBALANCE, plan_tiles, tiles_of
from cp_inductor.plan.simulate import loads_of
from cp_inductor.plan.strategies import TABLE

HEADS = ("8:8", "32:32", "40:40", "32:8", "64:8", "28:4")
RANKS = (2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
EMITTED_RANKS = (2, 4, 8, 16, 64, 256, 1024)
# Up to so many ranks all strategies are tried, in several stages: each takes its time.
MAX_TRIED_WORLD = 16
ALL_KEPT = 99
MAGI = json.loads((Path(__file__).parent / "magi_attention.json").read_text())["received"]
MAGI_TOKENS = 4096


@dataclass(frozen=True)
class Counted:
    """What a plan moves, and how long it would take.

    Attributes:
        name: of its strategy.
        stages: their number, and "late" if half of the own tiles come last.
        received: by the rank that receives most, in u.
        kept: the same, if all that was fetched is kept.
        seconds: predicted, forward and backward.
        balance: pairs of the busiest rank, over the mean.
    """

    name: str
    stages: str
    received: float
    kept: float
    seconds: float
    balance: float


@dataclass(frozen=True)
class Row:
    """A row of the table; the docstring of the script says what its columns are."""

    heads: str
    ranks: int
    auto: float
    strategy: str
    stages: str
    time: float
    balance: float
    all_kept: float
    least: float
    least_strategy: str
    ulysses: float | None
    magi: float | None
    bound: float
    bound_kept: float
    planning_s: float


def unit(recipe: Recipe) -> int:
    tokens = recipe.query_length // recipe.world_size
    return 2 * tokens * recipe.num_kv_heads * recipe.head_dim * recipe.itemsize


def count(recipe: Recipe) -> Counted:
    plan = plan_tiles(recipe, tiles_of(recipe))
    both, kept = (
        [loads_of(one) for one in (plan, replace(plan, num_kept=num).backward())]
        for num in (plan.num_kept, ALL_KEPT)
    )
    return Counted(
        recipe.strategy,
        f"{recipe.stages}{' late' * recipe.late}",
        *(
            float(sum(one.received_over() for one in of).max()) / unit(recipe)
            for of in (both, kept)
        ),
        sum(one.timeline(Machine()).total_s for one in both),
        max(one.balance for one in (plan, plan.backward())),
    )


def names(world_size: int) -> Iterator[str]:
    """Strategies with contiguous shards; the ring moves more than the all-gather."""
    sizes = [n for n in range(2, world_size) if world_size % n == 0]
    is_large = world_size > MAX_TRIED_WORLD
    yield from (name for name in TABLE if "heads" in name or not (is_large or name == "ring"))
    for size in sizes:
        yield from (f"heads{size}+blocks", f"heads{size}_own+blocks")


def tried(base: Recipe) -> Iterator[Counted]:
    stages = (0, 2) if base.world_size <= MAX_TRIED_WORLD else (2,)
    for name in names(base.world_size):
        try:
            recipes = {
                resolve(replace(base, strategy=name, stages=n), site="traffic") for n in stages
            }
        except UnsupportedStrategy:
            continue
        yield from map(count, recipes)


def ulysses(recipe: Recipe) -> float | None:
    """Queries, results and their gradients, and keys and values with theirs, of P - 1 others.

    KV heads fewer than ranks are repeated before they are sent.
    """
    heads, kv_heads, ranks = recipe.num_heads, recipe.num_kv_heads, recipe.world_size
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return None
    return (ranks - 1) / ranks * (2 * heads / kv_heads + 2 * max(1, ranks / kv_heads))


def bound_of(recipe: Recipe, *, is_kept: bool) -> float:
    length, ranks = recipe.query_length, recipe.world_size
    mean = length * (length + 1) / 2 / ranks if recipe.rule == "causal" else length**2 / ranks
    bound = lower_bound(
        recipe.shape,
        ranks,
        length,
        recipe.rule,
        most_pairs=MAX_IMBALANCE * mean,
        is_kept=is_kept,
        splits_heads=True,
    )
    return bound / unit(recipe)


def measure(base: Recipe) -> Row:
    start = time.perf_counter()
    recipe = resolve(base, site="traffic")
    forward_plan(recipe)
    backward_plan(recipe)
    planning_s = time.perf_counter() - start
    forward_plan.cache_clear()
    backward_plan.cache_clear()
    auto = count(recipe)
    all_kept = count(resolve(replace(base, keep=ALL_KEPT), site="traffic"))
    found = [auto, *tried(base)]
    even = [it for it in found if it.balance <= MAX_IMBALANCE]
    least = min(even, key=lambda it: it.kept)
    heads = f"{base.num_heads}:{base.num_kv_heads}"
    is_measured = base.rule == "causal" and base.query_length == MAGI_TOKENS * base.world_size
    row = Row(
        heads,
        base.world_size,
        auto.received,
        auto.name,
        auto.stages,
        auto.seconds / min(it.seconds for it in even),
        auto.balance,
        all_kept.kept,
        least.kept,
        least.name,
        ulysses(base),
        MAGI.get(heads, {}).get(str(base.world_size)) if is_measured else None,
        bound_of(base, is_kept=False),
        bound_of(base, is_kept=True),
        planning_s,
    )
    print(*asdict(row).values(), file=sys.stderr, flush=True)
    return row


def summarize(rows: list[Row]) -> str:
    """Say where others receive less."""
    lines = []
    for what, received in (("auto", "auto"), ("auto with all kept", "all_kept")):
        for others, choose in (("the lesser of Ulysses and Magi", min), ("both", max)):
            known = [(row, [x for x in (row.ulysses, row.magi) if x is not None]) for row in rows]
            known = [(row, figures) for row, figures in known if figures]
            if others == "both":
                known = [(row, figures) for row, figures in known if len(figures) == 2]
            ratios = [(row, getattr(row, received) / choose(figures)) for row, figures in known]
            above = [
                f"{row.heads} P={row.ranks} ({ratio:.3f}x)" for row, ratio in ratios if ratio > 1
            ]
            lines.append(
                f"- {what} is above {others} in {len(above)} of {len(ratios)} cells"
                f"{': ' * bool(above)}{', '.join(above)}"
            )
    return "\n".join(lines)


def recipe_of(heads: str, world_size: int, tokens: int, mask: str, head_dim: int) -> Recipe:
    num_heads, _, num_kv_heads = heads.partition(":")
    return Recipe(
        world_size=world_size,
        query_length=world_size * tokens,
        key_length=world_size * tokens,
        num_heads=int(num_heads),
        num_kv_heads=int(num_kv_heads),
        head_dim=head_dim,
        itemsize=2,
        rule=mask,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--emitted", action="store_true", help="count the emitted collectives")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--tokens", type=int, nargs="+", help="of one rank")
    parser.add_argument("--heads", nargs="+", help="query heads : KV heads")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mask", choices=("causal", "full"), nargs="+")
    parser.add_argument("--stages", type=int, default=4, help="only with --emitted")
    args = parser.parse_args()
    is_emitted = args.emitted
    args.ranks = args.ranks or (EMITTED_RANKS if is_emitted else RANKS)
    args.tokens = args.tokens or ((4096,) if is_emitted else (4096, 32768))
    args.heads = args.heads or (("32:32",) if is_emitted else HEADS)
    args.mask = args.mask or (("causal",) if is_emitted else ("causal", "full"))
    print("received by the worst rank, forward + backward, in u = one rank's K and V")
    found: list[dict[str, Any]] = []
    for mask, tokens in product(args.mask, args.tokens):
        print(f"\n## {mask}, {tokens} tokens per rank\n", flush=True)
        recipes = [
            recipe_of(heads, ranks, tokens, mask, args.head_dim)
            for heads, ranks in product(args.heads, args.ranks)
        ]
        if is_emitted:
            from benchmarks.emitted_traffic import measure as measure_emitted

            rows = [
                {"H:G": f"{recipe.num_heads}:{recipe.num_kv_heads}"}
                | measure_emitted(replace(recipe, stages=args.stages), unit(recipe))
                for recipe in recipes
            ]
            print_rows(rows)
        else:
            counted = [measure(recipe) for recipe in recipes]
            rows = [asdict(row) for row in counted]
            print_rows(rows)
            print(f"\n{summarize(counted)}", flush=True)
        found += [{"mask": mask, "tokens": tokens} | row for row in rows]
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "cp_inductor": version("cp_inductor"),
        "torch": version("torch"),
        "machine": platform.machine(),
        "arguments": vars(args),
        "rows": found,
    }
    print("\n" + json.dumps(report))


def print_rows(rows: list[dict[str, Any]]) -> None:
    rows = [{name.replace("_", " "): value for name, value in row.items()} for row in rows]
    print(tabulate(rows, headers="keys", floatfmt=".4g", tablefmt="github", missingval="-"))


if __name__ == "__main__":
    main()
