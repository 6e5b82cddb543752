"""From an attention to its plan: resolve open choices, assign tiles, derive the rest.

    Recipe(world_size=8, query_length=8192, ..., strategy="auto")
      . resolve         strategy, stages and chunks chosen by estimated cost
      . forward_plan    tiles assigned, transfers derived

A recipe is small, and all ranks derive the same plan from it. So graphs carry the recipe, as text,
and plans are cached by it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from cp_inductor.errors import InvalidText, UnsupportedStrategy
from cp_inductor.mask.canonical import normal
from cp_inductor.mask.grammar import shortened
from cp_inductor.mask.rule import Rule
from cp_inductor.plan.assign_masked import balance_of_rows, cells_of
from cp_inductor.plan.checks import (
    MAX_CHUNKS,
    MAX_LENGTH,
    MAX_WORLD_SIZE,
    check_count,
    check_shape,
    check_type,
)
from cp_inductor.plan.cost import Device, Link
from cp_inductor.plan.estimate import seconds_of
from cp_inductor.plan.facade import Plan
from cp_inductor.plan.grid import Grid
from cp_inductor.plan.ir import Mask, Shape
from cp_inductor.plan.simulate import predict_timeline
from cp_inductor.plan.strategies import LAYOUTS, TABLE, in_groups, parse_strategy
from cp_inductor.plan.strategies.strategy import Fetch
from cp_inductor.plan.tiles import is_head_split
from cp_inductor.plan.transfers import fetch_directly, has_tokens, plan_forward

MAX_STAGES = 8

# Chunks shorter than this make tiles that a flash kernel does not fill.
MIN_CHUNK_TOKENS = 64
MAX_CHUNKS_PER_RANK = 64
# Of sizes that cannot be: whose they are is known before where they stand.
SITE = "an attention"
# Of a number in a recipe's text.
MAX_DIGITS = 20

# Under a rule every row of chunks may become a tile, which is a call of a kernel in each stage.
MAX_MASKED_CHUNKS_PER_RANK = 16
MAX_MASKED_CHUNKS = 2048
# Numbers of stages that are tried under a rule; of more ranks, the last alone.
MASKED_STAGES = (1, 2, 4)
MAX_TIMED_WORLD = 16
# Beyond, rows are taken if the busiest rank has no more to do than so many times the mean.
MAX_IMBALANCE = 1.2


_MASKS = {"full": Mask.FULL, "causal": Mask.CAUSAL}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a plan depends on.

    Attributes:
        world_size: P, the number of ranks.
        query_length, key_length: tokens of the whole sequence.
        num_heads, num_kv_heads, head_dim, itemsize: of query, key and value.
        rule: which (query, key) pairs exist, as `Rule.format` writes it: "full", "causal", or an
            expression.
        layout: "contiguous" or "zigzag".
        strategy: one of `STRATEGIES`, or "headsN+blocks" and the like.
        stages: exchanges of the forward pass; 0 chooses by cost.
        keep: number of stages whose fetched data is kept for the backward.
        chunks: chunks per rank; 0 chooses by length.

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
    layout: str = "contiguous"
    strategy: str = "auto"
    stages: int = 0
    keep: int = 0
    chunks: int = 0

    def __post_init__(self) -> None:
        check_shape({f.name: getattr(self, f.name) for f in fields(self)}, site=SITE)
        # The ring has a stage for each other rank.
        for name, most in (("stages", MAX_WORLD_SIZE), ("keep", MAX_WORLD_SIZE)):
            check_count(name, getattr(self, name), 0, most, site=SITE)
        check_count("chunks", self.chunks, 0, MAX_CHUNKS, site=SITE)

    def format(self) -> str:
        """Return the recipe as text that `parse` reads."""
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Recipe:
        """Return the recipe that `format` wrote.

        Raises:
            InvalidText: the text is not a recipe.
            InvalidArgument: a number in it is impossible for an attention.
        """
        words = [word.partition("=") for word in text.split()]
        given = {name: value for name, _, value in words}
        kinds = {field.name: field.type for field in fields(Recipe)}
        if len(given) < len(words) or given.keys() != kinds.keys():
            raise InvalidText(
                site="a recipe",
                expected=f"each of {', '.join(kinds)} once",
                got=shortened(text),
                remedy="pass what Recipe.format wrote",
            )
        return Recipe(**{name: _read(name, kinds[name], given[name]) for name in kinds})

    @property
    def mask(self) -> Mask:
        """The mask of the attention; PARTIAL if only the rule describes it."""
        if self.rule == "causal" and self.query_length != self.key_length:
            return Mask.PARTIAL  # not a triangle, of which flags of kernels speak
        return _MASKS.get(self.rule, Mask.PARTIAL)

    @property
    def shape(self) -> Shape:
        """The shape of one batch entry: plans do not depend on the batch size."""
        return Shape(1, self.num_heads, self.num_kv_heads, self.head_dim, self.itemsize)

    @property
    def grid(self) -> Grid:
        """The chunks."""
        return Grid(self.world_size, self.chunks, self.layout, self.query_length, self.key_length)


def _read(name: str, kind: Any, text: str) -> Any:
    if kind != "int":
        return text
    # Not every digit of Unicode is one to int.
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise InvalidText(
            site="a recipe",
            expected=f"{name} in at most {MAX_DIGITS} digits",
            got=shortened(text),
            remedy="pass what Recipe.format wrote",
        )
    return int(text)


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
    layout: str = "contiguous",
    strategy: str = "auto",
    stages: int = 0,
    keep: int = 0,
    link: Link | None = None,
    device: Device | None = None,
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
        layout: "contiguous", or "zigzag" for batches from ``cp_inductor.shard``.
        strategy: "auto", "ring", "allgather", "rows", "blocks", "heads", "heads4+blocks", ...
        stages: exchanges of the forward, at most 8; 0 chooses by cost. The ring always has P - 1.
        keep: number of stages whose fetched data is kept for the backward, not fetched again.
        link, device: speeds by which "auto" and 0 stages choose.

    Returns:
        The forward plan, for all ranks.

    Raises:
        UnsupportedStrategy: the strategy does not fit the heads, the layout, the mask or the ranks.
        InvalidArgument: a number is impossible; the error names it.
        InvalidText: the mask is not an expression.
    """
    site = "plan_attention"
    check_count("seq_len", seq_len, 1, MAX_LENGTH, site=site)
    if kv_len is not None:
        check_count("kv_len", kv_len, 1, MAX_LENGTH, site=site)
    for name, value, kind in (
        ("mask", mask, str),
        ("link", link, Link),
        ("device", device, Device),
    ):
        if value is not None or name == "mask":
            check_type(name, value, kind, site=site)
    rule = Rule.parse(mask)
    recipe = Recipe(
        world_size=world_size,
        query_length=seq_len,
        key_length=seq_len if kv_len is None else kv_len,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        itemsize=itemsize,
        rule=replace(rule, allowed=normal(rule.allowed)).format(),
        layout=layout,
        strategy=strategy,
        stages=stages,
        keep=keep,
    )
    return forward_plan(resolve(recipe, site=site, link=link, device=device))


def resolve(
    recipe: Recipe,
    *,
    site: str,
    link: Link | None = None,
    device: Device | None = None,
) -> Recipe:
    """Choose what a recipe leaves open.

    The choice counts the backward even for inference, because inference must give the same numbers
    as the forward pass of training, to the last bit.

    Args:
        recipe: may have strategy "auto", and 0 stages or chunks.
        site: for the error.
        link, device: speeds to choose by.

    Raises:
        UnsupportedStrategy: the strategy does not fit the heads, the layout, the mask or the ranks.
    """
    _check(recipe, site)
    link, device = link or Link(), device or Device()
    if recipe.mask is Mask.PARTIAL:
        return _resolve_masked(recipe, link, device)
    if recipe.strategy == "auto":
        candidates = _candidates(recipe)
        timed = [(_best_stages(recipe, s, link, device), s) for s in candidates]
        (_, stages), strategy = min(timed)
    else:
        strategy, stages = recipe.strategy, recipe.stages
    fixed = parse_strategy(strategy).num_stages(recipe.world_size, recipe.mask)
    if fixed is not None:
        stages = fixed
    elif not stages:
        _, stages = _best_stages(recipe, strategy, link, device)
    resolved = replace(recipe, strategy=strategy, stages=stages)
    return resolved if recipe.chunks else replace(resolved, chunks=_num_chunks(resolved))


def _resolve_masked(recipe: Recipe, link: Link, device: Device) -> Recipe:
    """Choose under a rule. No closed form knows what is empty, so plans are made and timed."""
    if not recipe.chunks:
        recipe = replace(recipe, chunks=_num_chunks(recipe))
    strategies = [recipe.strategy]
    if recipe.strategy == "auto":
        # Rows of a mask tensor are with the owners of its queries.
        is_made = Rule.parse(recipe.rule).reads_pairs
        strategies = ["rows"] if is_made or recipe.world_size == 1 else ["rows", "blocks"]
    stages = [recipe.stages] if recipe.stages else list(MASKED_STAGES)
    fixed = None
    if recipe.strategy != "auto":
        fixed = parse_strategy(recipe.strategy).num_stages(recipe.world_size, recipe.mask)
    if fixed is not None or recipe.world_size == 1:
        stages = [fixed or 1]
    elif recipe.world_size > MAX_TIMED_WORLD:
        stages = stages[-1:]
    candidates = [
        replace(recipe, strategy=strategy, stages=num_stages)
        for strategy in strategies
        for num_stages in stages
    ]
    if len(candidates) == 1:
        return candidates[0]
    if recipe.world_size > MAX_TIMED_WORLD:
        cells = cells_of(recipe.grid, Rule.parse(recipe.rule))
        is_even = balance_of_rows(recipe.grid, cells) <= MAX_IMBALANCE
        return candidates[0 if is_even else -1]

    def seconds(candidate: Recipe) -> float:
        plans = forward_plan(candidate), backward_plan(candidate)
        return sum(predict_timeline(plan, link, device).total_s for plan in plans)

    return min(candidates, key=seconds)


def _candidates(recipe: Recipe) -> list[str]:
    """Return the strategies that "auto" chooses from."""
    world_size, shape = recipe.world_size, recipe.shape
    if world_size == 1:
        return ["allgather"]
    groups = [
        in_groups(num_groups, TABLE["blocks"])
        for num_groups in range(2, world_size)
        if world_size % num_groups == 0
    ]
    rows = [row for row in TABLE.values() if recipe.layout in row.layouts_of_auto]
    rows += [row for row in groups if recipe.layout in row.layouts]
    return [row.name for row in rows if is_head_split(shape, row.head_groups(world_size))]


def _best_stages(recipe: Recipe, strategy: str, link: Link, device: Device) -> tuple[float, int]:
    """Return the least estimated seconds, and the number of stages that takes them."""
    seconds = seconds_of(strategy, recipe.mask, recipe.layout, is_training=True)
    sizes = (recipe.num_heads, recipe.num_kv_heads, recipe.head_dim, recipe.itemsize)
    rates = (link.latency_s, link.bytes_per_s, device.flops_per_s)
    choices: Iterable[int] = range(1, MAX_STAGES + 1)
    fixed = parse_strategy(strategy).num_stages(recipe.world_size, recipe.mask)
    if fixed is not None or recipe.stages:
        choices = [fixed or recipe.stages]
    return min(
        (seconds(1, recipe.query_length, *sizes, recipe.world_size, num_stages, *rates), num_stages)
        for num_stages in choices
    )


def _num_chunks(recipe: Recipe) -> int:
    """Return chunks per rank: enough to balance, but none too short for a kernel."""
    if recipe.mask is Mask.PARTIAL:
        tokens = -(-min(recipe.query_length, recipe.key_length) // recipe.world_size)
        most = min(MAX_MASKED_CHUNKS_PER_RANK, MAX_MASKED_CHUNKS // recipe.world_size)
        return max(1, min(most, 1 << max(0, (tokens // MIN_CHUNK_TOKENS).bit_length() - 1)))
    strategy = parse_strategy(recipe.strategy)
    if not strategy.is_fine or recipe.mask is not Mask.CAUSAL:
        return strategy.min_chunks if recipe.layout == "contiguous" else 2
    tokens = -(-recipe.query_length // recipe.world_size)
    most = min(MAX_CHUNKS_PER_RANK, MAX_CHUNKS // recipe.world_size, tokens // MIN_CHUNK_TOKENS)
    return max(2, 1 << max(0, most.bit_length() - 1))


def _check(recipe: Recipe, site: str) -> None:
    def refuse(expected: str, got: str, remedy: str) -> None:
        raise UnsupportedStrategy(site=site, expected=expected, got=got, remedy=remedy)

    for what in ("strategy", "layout", "rule"):
        check_type(what, getattr(recipe, what), str, site=site)
    if recipe.layout not in LAYOUTS:
        refuse("layout 'contiguous' or 'zigzag'", repr(recipe.layout), "use one of these")
    if not 0 <= recipe.stages <= MAX_STAGES:
        refuse(f"1 to {MAX_STAGES} stages, or 0 to choose", str(recipe.stages), "use stages=0")
    if recipe.mask is Mask.PARTIAL and recipe.layout == "zigzag":
        refuse(
            "contiguous shards under a mask",
            "layout='zigzag'",
            "shard the batch contiguously; plans balance the work without zigzag",
        )
    if recipe.strategy == "auto":
        return
    strategy = parse_strategy(recipe.strategy, site=site)
    num_groups = strategy.head_groups(recipe.world_size)
    if recipe.world_size % num_groups or not is_head_split(recipe.shape, num_groups):
        refuse(
            f"a strategy that can split {recipe.num_heads} query heads, {recipe.num_kv_heads}"
            f" KV heads and {recipe.world_size} ranks evenly",
            f"{recipe.strategy!r}, which splits the heads over {num_groups} ranks",
            "use strategy='blocks', or another number of groups",
        )
    if recipe.layout not in strategy.layouts:
        refuse(
            f"{' or '.join(strategy.layouts)} shards",
            f"layout={recipe.layout!r}",
            "use strategy 'heads' or 'blocks'",
        )
    if recipe.mask is Mask.PARTIAL:
        if strategy.assign_masked is None:
            known = [row.name for row in TABLE.values() if row.assign_masked is not None]
            refuse(
                f"one of auto, {', '.join(known)} under a mask",
                repr(recipe.strategy),
                "use strategy='auto'",
            )
        if strategy.moves_queries and Rule.parse(recipe.rule).reads_pairs:
            known = [row.name for row in TABLE.values() if not row.moves_queries]
            refuse(
                f"one of auto, {', '.join(known)} under a mask that is a tensor of (query,"
                " key), whose rows stay with their queries",
                repr(recipe.strategy),
                "compute the mask from indices in the model, or use strategy='auto'",
            )


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """Pause the garbage collector, which would walk a hundred thousand new objects repeatedly.

    None of them is garbage, and none is in a cycle.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@lru_cache(maxsize=64)
@_garbage_kept()
def forward_plan(recipe: Recipe) -> Plan:
    """Return the plan of a resolved recipe."""
    grid, shape, mask = recipe.grid, recipe.shape, recipe.mask
    strategy = parse_strategy(recipe.strategy)
    rule = ""
    if mask is Mask.PARTIAL:
        assert strategy.assign_masked is not None
        rule = recipe.rule
        cells = cells_of(grid, Rule.parse(rule))
        tiles = strategy.assign_masked(grid, shape, cells, recipe.stages)
        fetch: Fetch = fetch_directly
    else:
        tiles = strategy.assign(grid, shape, mask, recipe.stages)
        fetch = strategy.fetch
    fetches = fetch(grid, shape, tiles)
    # Short sequences have tiles of no tokens. A rank of none may still hand on what passes it.
    tiles = [[tile for tile in stage if has_tokens(grid, tile)] for stage in tiles]
    used = [i for i, stage in enumerate(tiles) if stage or fetches[i] or i == 0]
    tiles, fetches = [tiles[i] for i in used], [fetches[i] for i in used]
    name = recipe.strategy
    return Plan.of(plan_forward(grid, shape, mask, name, tiles, fetches, recipe.keep, rule))


@lru_cache(maxsize=64)
@_garbage_kept()
def backward_plan(recipe: Recipe) -> Plan:
    """Return the backward plan of a resolved recipe."""
    return forward_plan(recipe).backward()
