"""Draw a plan: which rank computes which (query, key) pairs of one head.

Rows are queries and columns are keys, both in order of position; each color is a rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

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
    width, height = MARGIN + SIDE + LEGEND_WIDTH, MARGIN + SIDE + 10
    frame = f'<rect x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}" class="frame"/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
            f"<style>{STYLE}</style>",
            *shapes,
            *_borders(grid),
            frame,
            *_legend(plan),
            "</svg>",
            "",
        ]
    )


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
    grid = plan.grid
    right = MARGIN + SIDE + 16
    yield f'<text x="{MARGIN}" y="{MARGIN - 12}">keys →; dotted: borders of the shards</text>'
    yield (
        f'<text transform="translate({MARGIN - 12} {MARGIN + SIDE}) rotate(-90)">← queries</text>'
    )
    pairs = [plan.num_pairs_of(rank) for rank in range(grid.world_size)]
    whole = max(1.0, sum(pairs))
    for rank in range(min(grid.world_size, MAX_IN_LEGEND)):
        y = MARGIN + 14 + 20 * rank
        color, share = _color(rank), f"rank {rank}: {pairs[rank] / whole:.1%} of pairs"
        yield f'<rect x="{right}" y="{y - 11}" width="12" height="12" fill="{color}"/>'
        yield f'<text x="{right + 18}" y="{y}">{share}</text>'
    if grid.world_size > MAX_IN_LEGEND:
        y = MARGIN + 14 + 20 * MAX_IN_LEGEND
        yield f'<text x="{right}" y="{y}">and {grid.world_size - MAX_IN_LEGEND} more</text>'
    y = MARGIN + SIDE
    yield f'<text x="{right}" y="{y}">strategy {escape(plan.strategy)}</text>'


def _color(rank: int) -> str:
    # Neighbours are told apart: hues far from each other, in two shades.
    hue = round(360 * (rank * 0.381966) % 360)
    return f"hsl({hue} 55% {45 if rank % 2 else 62}%)"
