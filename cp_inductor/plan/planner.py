"""From an attention to its plan: resolve open choices, assign tiles, derive the rest.

    Recipe(world_size=8, query_length=8192, ..., strategy="auto")
      . resolve         strategy, stages and chunks chosen: tiles of each candidate are timed
      . forward_plan    tiles assigned, transfers derived

A recipe is small, and all ranks derive the same plan from it. So graphs carry the recipe, as text,
and plans are cached by it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from cp_inductor.errors import InvalidArgument, InvalidText, UnsupportedStrategy
from cp_inductor.kept import lru_cache
from cp_inductor.mask.grammar import MAX_CHARACTERS, check_text, shortened
from cp_inductor.mask.language import normal
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.assign_cells import Strategy, Tiles, work_of
from cp_inductor.plan.checks import LIMITS, MAX_LENGTH, check_count, check_type
from cp_inductor.plan.facade import Plan
from cp_inductor.plan.grid import Grid, Span, lengths_of
from cp_inductor.plan.ir import Direction, Mask, Payload, Shape, Stage, Tile
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.simulate import loads_of
from cp_inductor.plan.strategies import TABLE, parse_strategy
from cp_inductor.plan.strategies.heads import can_split, in_groups, in_nodes, own_in_groups
from cp_inductor.plan.transfers import INPUTS, moves_of

MAX_STAGES = 8

# Chunks shorter than this make tiles that a flash kernel does not fill.
MIN_CHUNK_TOKENS = 64
# Chunks of ranks that act as one, and of all ranks, because planning takes time with them.
MIN_CHUNKS_PER_RANK, MAX_CHUNKS_PER_RANK = 4, 64
MAX_CHOSEN_CHUNKS = 2048
# The site in an error about the numbers of a recipe, which does not know its place in a model.
SITE = "an attention"
# A number in a recipe's text has at most so many digits, as 2**64 has.
MAX_DIGITS = 20

# Chunks are fewer under a rule, where each row of chunks may become a tile: a call of a kernel in
# each stage.
MAX_MASKED_CHUNKS_PER_RANK = 16
# Numbers of stages that are tried.
STAGES = (1, 2, 4, 8)
# Work is even if the busiest rank has at most so many times the mean.
MAX_IMBALANCE = 1.03
# Plans that take longer by at most this share take equally long, because predictions are no better.
# The one that moves least is taken; over two levels of links, the one whose exchanges are
# shortest, of which those count twice that no tile hides.
NEGLIGIBLE = 0.03
# Beyond so many ranks, strategies are tried in two stages first. Only those that take at most
# MAX_SLOWER times as long as the fastest are tried in other numbers of stages.
MAX_TRIED_WORLD = 16
MAX_SLOWER = 1.1
# Beyond so many ranks, "auto" tries only strategies in which groups of ranks split the heads, with
# the largest groups that are possible.
MAX_OWN_WORLD = 64
MAX_GROUP_SIZES = 3


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a plan depends on.

    Attributes:
        world_size: P, the number of ranks.
        query_length, key_length: tokens of the whole sequence.
        num_heads, num_kv_heads, head_dim, itemsize: of query, key and value.
        rule: which (query, key) pairs exist, as `Rule.format` writes it: "full", "causal", or an
            expression.
        strategy: one of `STRATEGIES`, or "headsN+blocks" and the like.
        stages: exchanges of the forward pass; 0 chooses by cost.
        keep: number of stages whose fetched data is kept for the backward; `resolve` raises it to
            what takes the place of the shard's own q, k and v.
        chunks: chunks per rank; 0 chooses by length.
        late: 1 if half of the heads of a rank's own tile come last, where they hide the results
            that go home; `resolve` chooses it, if it chooses the stages.

    Raises:
        InvalidArgument: a number is impossible for an attention.
    """

    world_size: int
    query_length: int
    key_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int
    rule: str
    strategy: str = "auto"
    stages: int = 0
    keep: int = 0
    chunks: int = 0
    late: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            check_count(name, getattr(self, name), least, most, site=SITE)
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgument(
                site=SITE,
                expected=f"a num_kv_heads that divides num_heads={self.num_heads}",
                got=str(self.num_kv_heads),
                remedy="choose a num_kv_heads that divides num_heads",
            )

    def format(self) -> str:
        """Return the recipe as text that `parse` reads."""
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @staticmethod
    def parse(text: str) -> Recipe:
        """Return the recipe that `format` wrote.

        Raises:
            InvalidText: the text is not a recipe.
            InvalidArgument: a number in it is impossible for an attention.
        """
        check_text(text, 3 * MAX_CHARACTERS, site="a recipe")  # the rule, and words around it
        return Recipe._parse(text)

    @staticmethod
    @lru_cache(maxsize=256)
    def _parse(text: str) -> Recipe:
        kinds = {field.name: str(field.type) for field in fields(Recipe)}
        pattern = {"int": f"([0-9]{{1,{MAX_DIGITS}}})", "str": r"(\S+)"}
        words = " ".join(f"{name}={pattern[kind]}" for name, kind in kinds.items())
        match = re.fullmatch(words, text)
        if match is None:
            raise InvalidText(
                site="a recipe",
                expected=f"each of {', '.join(kinds)} once, numbers in {MAX_DIGITS} digits at most",
                got=shortened(text),
                remedy="pass what Recipe.format wrote",
            )
        values: dict[str, Any] = {
            name: int(word) if kind == "int" else word
            for (name, kind), word in zip(kinds.items(), match.groups(), strict=True)
        }
        return Recipe(**values)

    @property
    def mask(self) -> Mask:
        """The mask of the attention; PARTIAL if only the rule describes it."""
        # Kernels take "causal" for a triangle.
        is_triangle = self.rule == "causal" and self.query_length == self.key_length
        return Mask(self.rule) if is_triangle or self.rule == "full" else Mask.PARTIAL

    @property
    def shape(self) -> Shape:
        """The shape of one batch entry: plans do not depend on the batch size."""
        return Shape(1, self.num_heads, self.num_kv_heads, self.head_dim, self.itemsize)

    @property
    def grid(self) -> Grid:
        """The chunks."""
        return Grid(self.world_size, self.chunks, self.query_length, self.key_length)


def plan_attention(
    *,
    seq_len: int,
    world_size: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    kv_len: int | None = None,
    itemsize: int = 2,
    mask: str = "causal",
    strategy: str = "auto",
    stages: int = 0,
    keep: int = 0,
    machine: Machine | str | None = None,
) -> Plan:
    """Plan one attention over a sharded sequence, forward; `Plan.backward` gives the rest.

    Args:
        seq_len: S, the number of queries of the whole sequence; ranks hold them as torch.chunk cuts
            them.
        world_size: P, the number of ranks.
        num_heads, num_kv_heads: H and G, where G divides H. G is H if not given.
        head_dim: D.
        kv_len: number of keys of the whole sequence; S if not given.
        itemsize: bytes of an element: 2 for bfloat16.
        mask: "causal", "full", or an expression of q and k, such as
            ``"(k - q <= 0) & (q - k - 127 <= 0)"``, a sliding window of 128.
        strategy: "auto", "ring", "allgather", "rows", "blocks", "heads", "heads4+blocks", ...
        stages: exchanges of the forward, at most 8; 0 chooses by cost. The ring always has P - 1.
        keep: number of stages whose fetched data is kept for the backward, not fetched again.
            "heads" and "heads_own_forward" keep all in any case, in place of the shard's own q, k
            and v: as much, unless several ranks share a KV head.
        machine: for which "auto" and 0 stages choose, as `Machine.parse` reads it.

    Returns:
        The forward plan, for all ranks.

    Raises:
        UnsupportedStrategy: the strategy does not fit the heads, the mask or the ranks.
        InvalidArgument: a number is impossible; the error names it.
        InvalidText: the mask is not an expression.
    """
    site = "plan_attention"
    kv_len = seq_len if kv_len is None else kv_len
    for name, length in (("seq_len", seq_len), ("kv_len", kv_len)):
        check_count(name, length, 1, MAX_LENGTH, site=site)
    check_type("mask", mask, str, site=site)
    if isinstance(machine, str):
        machine = Machine.parse(machine, site=site)
    elif machine is not None:
        check_type("machine", machine, Machine, site=site)
    rule = Rule.parse(mask)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sizes = world_size, seq_len, kv_len, num_heads, num_kv_heads, head_dim, itemsize
    text = replace(rule, allowed=normal(rule.allowed)).format()
    recipe = Recipe(*sizes, rule=text, strategy=strategy, stages=stages, keep=keep)
    return forward_plan(resolve(recipe, site=site, machine=machine))


def resolve(recipe: Recipe, *, site: str, machine: Machine | None = None) -> Recipe:
    """Choose what a recipe leaves open.

    The choice counts the backward even for inference, because inference must give the same numbers
    as the forward pass of training, to the last bit.

    Args:
        recipe: may have strategy "auto", and 0 stages or chunks.
        site: for the error.
        machine: to choose for.

    Raises:
        UnsupportedStrategy: the strategy does not fit the heads, the mask or the ranks.
    """
    _check(recipe, site)
    return _resolved(recipe, machine or Machine())


@lru_cache(maxsize=64)  # the layers of a model ask alike
def _resolved(recipe: Recipe, machine: Machine) -> Recipe:
    strategies = _strategies(recipe, machine)
    if len(strategies) == 1 and recipe.stages:
        return _stagings(recipe, strategies[0])[0]
    tried = weigh(recipe, machine)
    # A mask may leave ranks nothing to balance with. Ranks that share cores wait for the busiest
    # only at the end, when it computes alone: of what takes as long, what is even is better.
    are_cores_shared = machine.device.at_once > 0
    is_free = recipe.mask is Mask.PARTIAL or are_cores_shared
    even = [it for it in tried if it.balance <= MAX_IMBALANCE or is_free]
    tried = even or tried
    limit = (1 + NEGLIGIBLE) * min(it.seconds for it in tried)
    fast = (it for it in tried if it.seconds <= limit)
    is_flat = len(machine.levels) == 1
    return min(
        fast,
        key=lambda it: (
            are_cores_shared and it.balance > MAX_IMBALANCE,
            it.num_bytes if is_flat else it.waited_s,
            it.num_calls,
            it.recipe.stages,
        ),
    ).recipe


def weigh(recipe: Recipe, machine: Machine) -> list[Trial]:
    """Return all that `resolve` chooses from, and what each would cost."""
    strategies, known = _strategies(recipe, machine), dict[Recipe, Trial]()
    if recipe.world_size > MAX_TRIED_WORLD and len(strategies) > 1:
        # Each trial takes its time: only strategies that are fast in two stages are tried in more.
        in_two = [_stagings(replace(recipe, stages=recipe.stages or 2), s)[0] for s in strategies]
        known = {candidate: _try(candidate, tiles_of(candidate), machine) for candidate in in_two}
        limit = MAX_SLOWER * min(trial.seconds for trial in known.values())
        near = [tried.strategy for tried, trial in known.items() if trial.seconds <= limit]
        strategies = [strategy for strategy in strategies if strategy.name in near]
    candidates = [c for strategy in strategies for c in _stagings(recipe, strategy)]
    staged = [(candidate, tiles_of(candidate)) for candidate in candidates]
    if not recipe.stages:
        staged += [
            (replace(candidate, late=1), halved)
            for candidate, stages in staged
            if (halved := _halved(candidate, stages))
        ]
    return [known.get(tried) or _try(tried, stages, machine) for tried, stages in staged]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a candidate would cost, forward and backward."""

    recipe: Recipe
    seconds: float  # by the timeline
    waited_s: float  # what exchanges take, of which that counts twice which no tile hides
    num_bytes: float  # received by the rank that receives most
    num_calls: int  # tiles of the rank that has most, in both directions
    balance: float  # pairs of the busiest rank over the mean


def _try(recipe: Recipe, stages: Sequence[Stage], machine: Machine) -> Trial:
    forward = plan_tiles(recipe, stages)
    plans = forward, forward.backward()
    both = [loads_of(plan, machine) for plan in plans]
    timelines = [loads.timeline(machine) for loads in both]
    return Trial(
        recipe,
        seconds=sum(timeline.total_s for timeline in timelines),
        waited_s=sum(timeline.exposed_s for timeline in timelines)
        + sum(timeline.exchange_s for timeline in timelines),
        num_bytes=float((both[0].received_over() + both[1].received_over()).max()),
        num_calls=int((both[0].calls.sum(0) + both[1].calls.sum(0)).max()),
        balance=max(plan.balance for plan in plans),
    )


def _strategies(recipe: Recipe, machine: Machine) -> list[Strategy]:
    """Return the strategies to choose from: the one that is named, or those of "auto"."""
    if recipe.strategy != "auto":
        named = parse_strategy(recipe.strategy)
        return [named.under_rules or named if recipe.mask is Mask.PARTIAL else named]
    world_size, shape = recipe.world_size, recipe.shape
    if world_size == 1:
        return [TABLE["rows" if recipe.mask is Mask.PARTIAL else "allgather"]]
    if recipe.mask is Mask.PARTIAL and Rule.parse(recipe.rule).reads_pairs:
        return [TABLE["rows"]]  # rows of a mask tensor are with the owners of its queries
    sizes = [n for n in range(2, world_size) if can_split(shape, world_size, n)]
    rows = [*TABLE.values()]
    if world_size > MAX_OWN_WORLD:
        # Own tiles are too small a part to matter, and so are groups of few ranks.
        grouped = [in_groups(n, TABLE["blocks"]) for n in sizes[-MAX_GROUP_SIZES:]]
        # Under a window, what a rank needs is near, and rows move least.
        near = [TABLE["rows"]] if recipe.mask is Mask.PARTIAL else []
        rows = near + grouped or rows
    else:
        rows += [in_groups(n, TABLE["blocks"]) for n in sizes]
        rows += [own_in_groups(n) for n in sizes]
    num_nodes = machine.num_nodes(world_size)
    if num_nodes > 1 and num_nodes * machine.levels[0].ranks == world_size:
        rows += [in_nodes(num_nodes, TABLE[rest]) for rest in ("blocks", "rows")]
    return [
        row
        for row in rows
        if row.splits(shape, world_size)
        and not row.is_ring
        # Under a rule, rows in one stage are an all-gather.
        and not (recipe.mask is Mask.PARTIAL and row.num_stages(world_size))
    ]


def _stagings(recipe: Recipe, strategy: Strategy) -> list[Recipe]:
    """Return the recipe with this strategy, for each number of stages to choose from."""
    recipe = replace(recipe, strategy=strategy.name)
    recipe = recipe if recipe.chunks else replace(recipe, chunks=_num_chunks(recipe, strategy))
    fixed = strategy.num_stages(recipe.world_size)
    choices = (recipe.stages,) if recipe.stages else STAGES
    if fixed is not None or recipe.world_size == 1:
        choices = (fixed or 1,)
    return [
        replace(recipe, stages=n, keep=max(recipe.keep, strategy.free_keep(recipe.shape, n)))
        for n in choices
    ]


def _halved(recipe: Recipe, stages: Sequence[Stage]) -> list[Stage] | None:
    """Move half of the heads of stage 0 behind all other stages, where they hide the last results.

    Returns:
        One stage more. None if stage 0 is not of own tiles, or is all there is, or has one KV head.
    """
    shape, (first, *others) = recipe.shape, stages
    strategy = parse_strategy(recipe.strategy)
    is_passed_on = strategy.is_ring or strategy.num_nodes > 1
    # Strategies whose first tiles have all heads begin with own tiles.
    is_own = all(tile.heads == shape.all_heads for tile in first.tiles)
    is_all = not any(stage.tiles for stage in others)
    if is_passed_on or not is_own or is_all or shape.num_kv_heads < 2:
        return None
    middle = (shape.num_kv_heads + 1) // 2 * (shape.num_heads // shape.num_kv_heads)
    halves = Span(0, middle), Span(middle, shape.num_heads)
    early, late = (tuple(tile.at(tile.rank, half) for tile in first.tiles) for half in halves)
    return [replace(first, tiles=early), *others, Stage(tiles=late)]


def _num_chunks(recipe: Recipe, strategy: Strategy) -> int:
    """Return chunks per rank: enough to balance, but none too short for a kernel."""
    if recipe.mask is Mask.PARTIAL:
        tokens = -(-min(recipe.query_length, recipe.key_length) // recipe.world_size)
        most = min(MAX_MASKED_CHUNKS_PER_RANK, MAX_CHOSEN_CHUNKS // recipe.world_size)
        return max(1, min(most, 1 << max(0, (tokens // MIN_CHUNK_TOKENS).bit_length() - 1)))
    if not strategy.fine or recipe.mask is not Mask.CAUSAL:
        return strategy.min_chunks
    tokens = -(-recipe.query_length // recipe.world_size)
    num_chosen = max(MAX_CHOSEN_CHUNKS // recipe.world_size, MIN_CHUNKS_PER_RANK // strategy.fine)
    most = min(MAX_CHUNKS_PER_RANK // strategy.fine, num_chosen, tokens // MIN_CHUNK_TOKENS)
    return max(2, 1 << max(0, most.bit_length() - 1))


def _check(recipe: Recipe, site: str) -> None:
    def refuse_strategy(expected: str, got: str, remedy: str) -> None:
        raise UnsupportedStrategy(site=site, expected=expected, got=got, remedy=remedy)

    for what in ("strategy", "rule"):
        check_type(what, getattr(recipe, what), str, site=site)
    if not 0 <= recipe.stages <= MAX_STAGES:
        refuse_strategy(
            f"1 to {MAX_STAGES} stages, or 0 to choose", str(recipe.stages), "use stages=0"
        )
    if recipe.strategy == "auto":
        return
    strategy = parse_strategy(recipe.strategy, site=site)
    if not strategy.splits(recipe.shape, recipe.world_size):
        refuse_strategy(
            f"a strategy that can split {recipe.num_heads} query heads, {recipe.num_kv_heads}"
            f" KV heads and {recipe.world_size} ranks evenly",
            f"{recipe.strategy!r}, which cannot",
            "use strategy='blocks', or another number of groups",
        )
    is_masked = recipe.mask is Mask.PARTIAL
    if is_masked and strategy.moves_queries and Rule.parse(recipe.rule).reads_pairs:
        known = [row.name for row in TABLE.values() if not row.moves_queries]
        refuse_strategy(
            f"one of auto, {', '.join(known)} under a mask that is a tensor of (query,"
            " key), whose rows stay with their queries",
            repr(recipe.strategy),
            "compute the mask from indices in the model, or use strategy='auto'",
        )


def tiles_of(recipe: Recipe) -> list[Stage]:
    """Return the stages of a resolved recipe, which have tiles, and no transfers yet."""
    grid, shape, strategy = recipe.grid, recipe.shape, parse_strategy(recipe.strategy)
    work = work_of(grid, shape, recipe.mask, recipe.rule)
    tiles, later = strategy.assign(work, recipe.stages), Tiles()
    if strategy.assign_backward is not None and recipe.keep:  # else for inference
        later = strategy.assign_backward(work, recipe.stages)
    both = zip_longest(tiles, later, fillvalue=())
    stages = [Stage(tiles=tuple(now), backward_tiles=tuple(then)) for now, then in both]
    return (_halved(recipe, stages) if recipe.late else None) or stages


def plan_tiles(recipe: Recipe, stages: Sequence[Stage]) -> Plan:
    """Return the forward plan of a resolved recipe, given the tiles of its stages."""
    grid, shape, mask = recipe.grid, recipe.shape, recipe.mask
    strategy = parse_strategy(recipe.strategy)
    tiles = [stage.tiles + stage.backward_tiles for stage in stages]
    num_nodes, is_ring = strategy.num_nodes, strategy.is_ring
    fetches = moves_of(grid, shape, tiles, INPUTS, num_nodes=num_nodes, is_ring=is_ring)
    is_short = any(0 in lengths_of(grid, of_keys=of_keys) for of_keys in (False, True))

    def with_tokens(tiles: tuple[Tile, ...]) -> tuple[Tile, ...]:
        return tuple(tile for tile in tiles if all(tile.num_tokens(grid))) if is_short else tiles

    first, *others = (
        Stage(fetch, with_tokens(stage.tiles), backward_tiles=with_tokens(stage.backward_tiles))
        for fetch, stage in zip(fetches, stages, strict=True)
    )
    stages = [first, *(s for s in others if s.fetch or s.tiles or s.backward_tiles)]
    return Plan(
        grid,
        shape,
        mask,
        recipe.strategy,
        Direction.FORWARD,
        # If the backward computes other tiles, all that these read is kept.
        max(recipe.keep, len(stages) * any(stage.backward_tiles for stage in stages)),
        tuple(stages),
        rule=recipe.rule if mask is Mask.PARTIAL else "",
        num_nodes=num_nodes,
    ).with_results(Payload.PARTIAL)


@lru_cache(maxsize=64)
def forward_plan(recipe: Recipe) -> Plan:
    """Return the plan of a resolved recipe."""
    return plan_tiles(recipe, tiles_of(recipe))


@lru_cache(maxsize=64)
def backward_plan(recipe: Recipe) -> Plan:
    """Return the backward plan of a resolved recipe."""
    return forward_plan(recipe).backward()
