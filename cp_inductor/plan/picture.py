"""Draw a plan: which rank computes which (query, key) pairs, for all heads.

Rows are queries and columns are keys, both in order of position; each color is a rank. Heads whose
pairs are computed by the same ranks share a panel. matplotlib draws; `pip install
'cp-inductor[draw]'` brings it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cp_inductor.errors import InvalidArgument
from cp_inductor.plan.batch_chunks import BLOCK, Chunks
from cp_inductor.plan.grid import Grid, Span
from cp_inductor.plan.ir import Mask, PlanData, Tile

MAX_PANELS = 16
MAX_IN_LEGEND = 16
MAX_BORDERS = 33
PANEL_INCHES = 4.2

# Colors of ranks, which people of any color vision tell apart.
# Okabe and Ito, https://jfly.uni-koeln.de/color/, without black.
_FEW = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#f0e442")
# Viridis at eleven places, https://bids.github.io/colormap/.
_SCALE = (
    "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725".split()  # noqa: SIM905
)
_GOLDEN = 0.381966


class Area(NamedTuple):
    """Pairs of one rank: (key, query) corners in tokens; faded if a mask leaves out some."""

    rank: int
    corners: tuple[tuple[float, float], ...]
    is_faded: bool


class Panel(NamedTuple):
    """Some heads, and who computes what of them."""

    title: str
    areas: list[Area]


def draw_plan(plan: PlanData, path: str | Path) -> None:
    """Write a picture of a plan; see `Plan.draw`."""
    grid = plan.grid
    pairs = [plan.num_pairs_of(rank) for rank in range(grid.world_size)]
    panels = list(panels_of(plan))
    lengths = grid.query_length, grid.key_length
    borders = [_borders(grid, of_keys=of_keys) for of_keys in (False, True)]
    _write(path, panels, borders, lengths, f"strategy {plan.strategy}", pairs, "pairs")


def draw_cells(
    path: str | Path,
    chunks: tuple[Chunks, Chunks],
    cells: Sequence[np.ndarray],
    loads: np.ndarray,
    *,
    entry: int,
) -> None:
    """Write a picture of the cells of a batch; see `BatchPlan.draw`.

    Args:
        path: of the file.
        chunks: of queries and of keys.
        cells: the query chunk, key chunk, weight and rank of each cell.
        loads: blocks of each rank, in all entries.
        entry: of the batch.
    """
    queries, keys = chunks
    most = (queries.size // BLOCK) * (keys.size // BLOCK)
    areas: dict[int, list[Area]] = {}
    for query, key, weight, rank in zip(*(column.tolist() for column in cells), strict=True):
        if queries.entry[query] == entry:
            corners = _rectangle(_place(keys, key), _place(queries, query))
            group = areas.setdefault(int(queries.group[query]), [])
            group.append(Area(rank, corners, weight < most / 2))
    panels = [
        Panel("all heads" if len(areas) == 1 else f"group {group} of heads", areas[group])
        for group in sorted(areas)
    ]
    firsts = [(one.entry == entry) & (one.group == 0) for one in chunks]
    borders = [
        one.first[chosen][1:][np.diff(one.rank[chosen]) != 0].tolist()
        for one, chosen in zip(chunks, firsts, strict=True)
    ]
    lengths = [int(one.length[chosen].sum()) for one, chosen in zip(chunks, firsts, strict=True)]
    _write(
        path, panels, borders, lengths, f"planned for entry {entry} of this batch", loads, "blocks"
    )


def panels_of(plan: PlanData) -> Iterator[Panel]:
    """Yield the heads that the same ranks compute alike, and their areas, in tokens."""
    tiles = [tile for stage in plan.stages for tile in stage.tiles]
    edges = sorted({edge for tile in tiles for edge in (tile.heads.start, tile.heads.stop)})
    # Which tiles each run of heads has; neighbours that have the same are drawn together.
    runs = [
        (start, stop, [t for t in tiles if t.heads.start <= start < t.heads.stop])
        for start, stop in pairwise(edges)
    ]

    def who(run: tuple[int, int, list[Tile]]) -> list[Any]:
        return [(tile.rank, tile.queries, tile.keys) for tile in run[2]]

    for _, group in groupby(runs, who):
        (start, stop, own), *more = group
        stop = more[-1][1] if more else stop
        what = f"head {start}" if stop - start == 1 else f"heads {start} to {stop - 1}"
        is_all = (start, stop) == (0, plan.shape.num_heads)
        yield Panel("all heads" if is_all else what, [a for t in own for a in _areas(plan.grid, t)])


def _areas(grid: Grid, tile: Tile) -> Iterator[Area]:
    for queries in tile.queries:
        for keys in tile.keys:
            (top, bottom), (left, right) = (
                _tokens(grid, span, of_keys=of_keys)
                for span, of_keys in ((queries, False), (keys, True))
            )
            if tile.mask is Mask.CAUSAL and keys.start > queries.start:
                continue
            if tile.mask is Mask.CAUSAL and keys == queries:
                yield Area(tile.rank, ((left, top), (left, bottom), (right, bottom)), False)
                continue
            corners = _rectangle((left, right), (top, bottom))
            yield Area(tile.rank, corners, tile.mask is Mask.PARTIAL)


def _rectangle(
    keys: tuple[float, float], queries: tuple[float, float]
) -> tuple[tuple[float, float], ...]:
    (left, right), (top, bottom) = keys, queries
    return (left, top), (right, top), (right, bottom), (left, bottom)


def _tokens(grid: Grid, span: Span, *, of_keys: bool) -> tuple[float, float]:
    """Return where positions begin and end, in tokens, all chunks taken as equally long."""
    length = grid.key_length if of_keys else grid.query_length
    return span.start * length / grid.num_chunks, span.stop * length / grid.num_chunks


def _borders(grid: Grid, *, of_keys: bool) -> list[float]:
    """Return the tokens at which the owner of queries, or of keys, changes."""
    ranks = range(1, grid.world_size)
    return [_tokens(grid, grid.own(rank), of_keys=of_keys)[0] for rank in ranks]


def _place(chunks: Chunks, chunk: int) -> tuple[float, float]:
    first = int(chunks.first[chunk])
    return first, first + int(chunks.length[chunk])


def _write(
    path: str | Path,
    panels: Sequence[Panel],
    borders: Sequence[Sequence[float]],
    lengths: Sequence[int],
    title: str,
    loads: Sequence[float] | np.ndarray,
    unit: str,
) -> None:
    """Draw the panels beside each other, and a legend to the right of them."""
    try:
        import matplotlib
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise InvalidArgument(
            site="draw",
            expected="matplotlib, which draws",
            got="an installation without it",
            remedy="pip install 'cp-inductor[draw]'",
        ) from None
    shown, colors = panels[:MAX_PANELS], colors_of(len(loads))
    columns = min(len(shown), 4)
    rows = -(-len(shown) // columns)
    side = PANEL_INCHES if columns == 1 else PANEL_INCHES / 1.6
    size = columns * side + 2.4, rows * (side + 0.35) + 0.5
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for number, (axis, panel) in enumerate(zip(axes, shown, strict=False)):
        axis.add_collection(
            PolyCollection(
                [area.corners for area in panel.areas],
                facecolors=[(colors[a.rank], 0.55 if a.is_faded else 1.0) for a in panel.areas],
                linewidths=0,
                antialiased=False,
            )
        )
        axis.set(xlim=(0, lengths[1]), ylim=(lengths[0], 0))
        # Ticks, since lines would lie over the cells.
        has_ticks = len(borders[1]) < MAX_BORDERS
        axis.set_xticks(borders[1] if has_ticks else [], labels=[])
        axis.set_yticks(borders[0] if has_ticks else [], labels=[])
        axis.set_title(panel.title, fontsize=9)
        if number % columns == 0:
            axis.set_ylabel("← queries", fontsize=9)
        if number // columns == rows - 1 or number + columns >= len(shown):
            axis.set_xlabel("keys →", fontsize=9)
    whole = max(1.0, float(np.sum(loads)))
    entries = [
        Patch(color=color, label=f"rank {rank}: {load / whole:.1%} of {unit}")
        for rank, (color, load) in enumerate(zip(colors, loads, strict=True))
    ]
    more = [f"and {len(entries) - MAX_IN_LEGEND} more ranks"] * (len(entries) > MAX_IN_LEGEND)
    more += [f"and {len(panels) - MAX_PANELS} more groups of heads"] * (len(panels) > MAX_PANELS)
    more += ["ticks: borders of the shards"] * (len(borders[1]) < MAX_BORDERS)
    entries = entries[:MAX_IN_LEGEND] + [Patch(alpha=0, label=text) for text in more]
    figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    # The same plan gives the same file: no date, and no random names of elements.
    with matplotlib.rc_context({"svg.hashsalt": "cp_inductor", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=150, metadata={"Date": None} if _is_svg(path) else None)


def _is_svg(path: str | Path) -> bool:
    if Path(path).suffix not in (".svg", ".png"):
        raise InvalidArgument(
            site="draw",
            expected="a path that ends in .png or .svg",
            got=str(path),
            remedy="name the file plan.png or plan.svg",
        )
    return Path(path).suffix == ".svg"


def colors_of(world_size: int) -> list[str]:
    """Return a color for each rank; with many ranks, neighbours are far apart in lightness."""
    if world_size <= len(_FEW):
        return [*_FEW[:world_size]]
    return [_between(rank * _GOLDEN % 1) for rank in range(world_size)]


def _between(place: float) -> str:
    at, share = divmod(place * (len(_SCALE) - 1), 1)
    ends = [bytes.fromhex(_SCALE[int(at) + step]) for step in (0, 1)]
    return "#" + bytes(round(a + share * (b - a)) for a, b in zip(*ends, strict=True)).hex()
