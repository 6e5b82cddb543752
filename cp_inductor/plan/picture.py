"""Draw a plan: which rank computes which (query, key) pairs of one head.

Rows are queries and columns are keys, both in order of position; each color is a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

import numpy as np

from cp_inductor.plan.batch import BatchPlan
from cp_inductor.plan.batch_chunks import BLOCK, Chunks
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, PlanData, Tile

SIDE = 360  # of the square of pairs, in the picture's units
MARGIN = 40
LEGEND_WIDTH = 190
MAX_IN_LEGEND = 16
STYLE = (
    "rect,polygon{shape-rendering:crispEdges}.frame{fill:none;stroke:#888}"
    ".owner{stroke:#888;stroke-dasharray:2 3}text{fill:#888}"
)


def draw(plan: PlanData, *, head: int = 0) -> str:
    """Return a plan as SVG.

    Args:
        plan: forward or backward; both have the same tiles.
        head: the head whose pairs are drawn. If the strategy splits the heads, few ranks compute
            it.
    """
    grid = plan.grid
    shapes = [
        shape
        for stage in plan.stages
        for tile in stage.tiles
        if tile.heads.start <= head < tile.heads.stop
        for shape in _shapes(grid, tile)
    ]
    return _page(shapes, _borders(grid), _legend(plan))


def draw_batch(plan: BatchPlan) -> str:
    """Return a plan of a batch of one entry as SVG: its cells, each in the color of its rank.

    Cells with few blocks that hold pairs are faded. Each group of heads has a stripe of the rows of
    a cell.
    """
    tokens = max(int(chunks.length.sum()) for chunks in (plan.queries, plan.keys))
    length = max(1, tokens // plan.num_groups)
    most = (plan.queries.size // BLOCK) * (plan.keys.size // BLOCK)
    cells = [
        f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}" height="{bottom - top:g}"'
        f' fill="{_color(rank)}" fill-opacity="{opacity}"/>'
        for query, first, last, rank, opacity in _runs(plan, most)
        for left, right in [
            (_edges(plan.keys, first, length)[0], _edges(plan.keys, last, length)[1])
        ]
        for top, bottom in [_stripe(plan.queries, query, length)]
    ]
    borders = []
    for before, after in pairwise(np.flatnonzero(plan.keys.group == 0).tolist()):
        if plan.keys.rank[before] != plan.keys.rank[after]:
            at, last = _edges(plan.keys, after, length)[0], MARGIN + SIDE
            borders.append(f'<line class="owner" x1="{at}" y1="{MARGIN}" x2="{at}" y2="{last}"/>')
            borders.append(f'<line class="owner" x1="{MARGIN}" y1="{at}" x2="{last}" y2="{at}"/>')
    shares = plan.loads / max(1.0, float(plan.loads.sum()))
    legend = [f"rank {rank}: {share:.1%} of blocks" for rank, share in enumerate(shares)]
    return _page(cells, borders, [*_axes(), *_entries(legend)])


def _page(shapes: Iterable[str], borders: Iterable[str], legend: Iterable[str]) -> str:
    width, height = MARGIN + SIDE + LEGEND_WIDTH, MARGIN + SIDE + 10
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            f"<style>{STYLE}</style>",
            *shapes,
            *borders,
            f'<rect x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}" class="frame"/>',
            *legend,
            "</svg>",
            "",
        ]
    )


def _runs(plan: BatchPlan, most: int) -> Iterator[tuple[int, int, int, int, float]]:
    """Yield runs of cells that look alike: queries, first and last keys, rank, opacity."""
    run: tuple[int, int, int, int, float] | None = None
    for query, key, weight, rank in zip(plan.query, plan.key, plan.weight, plan.rank, strict=True):
        opacity = 0.5 if weight < most / 2 else 1.0
        alike = int(query), int(rank), opacity
        if run is not None and (run[0], *run[3:]) == alike and run[2] + 1 == key:
            run = (run[0], run[1], int(key), *run[3:])
            continue
        if run is not None:
            yield run
        run = (int(query), int(key), int(key), int(rank), opacity)
    if run is not None:
        yield run


def _edges(chunks: Chunks, chunk: int, length: int) -> tuple[float, float]:
    """Return where a chunk begins and ends in the picture."""
    first, size = int(chunks.first[chunk]), int(chunks.length[chunk])
    start, stop = (MARGIN + SIDE * edge / length for edge in (first, first + size))
    return round(start, 2), round(stop, 2)


def _stripe(chunks: Chunks, chunk: int, length: int) -> tuple[float, float]:
    """Return where the group of heads of a chunk has its part of what the chunk covers."""
    start, stop = _edges(chunks, chunk, length)
    height = (stop - start) / chunks.num_groups
    top = start + height * int(chunks.group[chunk])
    return round(top, 2), round(top + height, 2)


def _shapes(grid: Grid, tile: Tile) -> Iterator[str]:
    color = _color(tile.rank)
    for queries in _by_position(grid, tile.queries):
        for keys in _by_position(grid, tile.keys):
            left, right = _place(grid, keys)
            top, bottom = _place(grid, queries)
            if tile.mask is Mask.CAUSAL and keys.start > queries.start:
                continue
            if tile.mask is Mask.CAUSAL and keys == queries:
                corners = f"{left:g},{top:g} {left:g},{bottom:g} {right:g},{bottom:g}"
                yield f'<polygon points="{corners}" fill="{color}"/>'
                continue
            faded = ' fill-opacity="0.6"' if tile.mask is Mask.PARTIAL else ""
            yield (
                f'<rect x="{left:g}" y="{top:g}" width="{right - left:g}"'
                f' height="{bottom - top:g}" fill="{color}"{faded}/>'
            )


def _by_position(grid: Grid, spans: tuple[Span, ...]) -> Iterator[Span]:
    """Yield spans of stored chunks as spans of positions."""
    for span in spans:
        for run in grid.runs(span):
            start = grid.position(run.start)
            yield Span(start, start + len(run))


def _place(grid: Grid, span: Span) -> tuple[float, float]:
    """Return where positions begin and end in the picture."""
    start, stop = (MARGIN + SIDE * edge / grid.num_chunks for edge in (span.start, span.stop))
    return round(start, 2), round(stop, 2)


def _borders(grid: Grid) -> Iterator[str]:
    """Yield lines where the owner of queries, or keys, changes."""
    first, last = MARGIN, MARGIN + SIDE
    for chunk in range(1, grid.num_chunks):
        before, after = (grid.spans_at(at, at + 1)[0].start for at in (chunk - 1, chunk))
        if grid.owner(before) != grid.owner(after):
            at = round(MARGIN + SIDE * chunk / grid.num_chunks, 2)
            yield f'<line class="owner" x1="{at:g}" y1="{first}" x2="{at:g}" y2="{last}"/>'
            yield f'<line class="owner" x1="{first}" y1="{at:g}" x2="{last}" y2="{at:g}"/>'


def _legend(plan: PlanData) -> Iterator[str]:
    yield from _axes()
    pairs = [plan.num_pairs_of(rank) for rank in range(plan.grid.world_size)]
    whole = max(1.0, sum(pairs))
    yield from _entries([f"rank {r}: {n / whole:.1%} of pairs" for r, n in enumerate(pairs)])
    right, y = MARGIN + SIDE + 16, MARGIN + SIDE
    yield f'<text x="{right}" y="{y}">strategy {escape(plan.strategy)}</text>'


def _axes() -> Iterator[str]:
    yield f'<text x="{MARGIN}" y="{MARGIN - 12}">keys →; dotted: borders of the shards</text>'
    yield (
        f'<text transform="translate({MARGIN - 12} {MARGIN + SIDE}) rotate(-90)">← queries</text>'
    )


def _entries(texts: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a legend, one of each rank."""
    right = MARGIN + SIDE + 16
    for rank, text in enumerate(texts[:MAX_IN_LEGEND]):
        y = MARGIN + 14 + 20 * rank
        yield f'<rect x="{right}" y="{y - 11}" width="12" height="12" fill="{_color(rank)}"/>'
        yield f'<text x="{right + 18}" y="{y}">{text}</text>'
    if len(texts) > MAX_IN_LEGEND:
        y = MARGIN + 14 + 20 * MAX_IN_LEGEND
        yield f'<text x="{right}" y="{y}">and {len(texts) - MAX_IN_LEGEND} more</text>'


def _color(rank: int) -> str:
    # Neighbours are told apart: hues far from each other, in two shades.
    hue = round(360 * (rank * 0.381966) % 360)
    return f"hsl({hue} 55% {45 if rank % 2 else 62}%)"
