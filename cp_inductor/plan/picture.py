"""Draw a plan: which rank computes which (query, key) pairs, for all heads.

Rows are queries and columns are keys, both in order of position; each color is a rank. Heads whose
pairs are computed by the same ranks share a panel. matplotlib draws; `pip install
'cp-inductor[draw]'` brings it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cp_inductor.errors import InvalidArgument
from cp_inductor.plan.grid import Grid, Span, tokens_before
from cp_inductor.plan.ir import Mask, PlanData, Tile

MAX_PANELS = 16
MAX_IN_LEGEND = 16
MAX_BORDERS = 33
PANEL_INCHES = 4.2
ALPHAS = {Mask.FULL: 1.0, Mask.CAUSAL: 1.0, Mask.PARTIAL: 0.55}

# Colors of ranks, which people of any color vision tell apart.
# Okabe and Ito, https://jfly.uni-koeln.de/color/, without black.
_FEW = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#f0e442")
_GOLDEN = 0.381966


class Area(NamedTuple):
    """Pairs of one rank, from the first token of each side to the one behind the last.

    A CAUSAL area is the triangle alone. A PARTIAL one is pale, because some pairs do not exist.
    """

    rank: int
    queries: tuple[float, float]
    keys: tuple[float, float]
    mask: Mask

    @property
    def corners(self) -> tuple[tuple[float, float], ...]:
        """The (key, query) corners."""
        (top, bottom), (left, right) = self.queries, self.keys
        above = () if self.mask is Mask.CAUSAL else ((right, top),)
        return (left, top), *above, (right, bottom), (left, bottom)


class Panel(NamedTuple):
    """Some heads, and who computes what of them."""

    title: str
    areas: list[Area]


def panels_of(plan: PlanData) -> Iterator[Panel]:
    """Yield the heads that the same ranks compute alike, and their areas."""

    def who(run: tuple[Span, list[Tile]]) -> list[Any]:
        return [(tile.rank, tile.queries, tile.keys) for tile in run[1]]

    for _, group in groupby(plan.tiles_of_heads, who):
        runs = [*group]
        start, stop, own = runs[0][0].start, runs[-1][0].stop, runs[0][1]
        what = f"head {start}" if stop - start == 1 else f"heads {start} to {stop - 1}"
        is_all = (start, stop) == (0, plan.shape.num_heads)
        yield Panel("all heads" if is_all else what, [a for t in own for a in _areas(plan.grid, t)])


def _areas(grid: Grid, tile: Tile) -> Iterator[Area]:
    of_queries, of_keys = (tokens_before(grid, of_keys=k).tolist() for k in (False, True))
    for queries, keys in product(tile.queries, tile.keys):
        mask = tile.mask
        if mask is Mask.CAUSAL and keys != queries:
            if keys.start > queries.start:
                continue
            mask = Mask.FULL
        rows = of_queries[queries.start], of_queries[queries.stop]
        yield Area(tile.rank, rows, (of_keys[keys.start], of_keys[keys.stop]), mask)


def draw_panels(
    path: str | Path,
    panels: Sequence[Panel],
    ends: Sequence[Sequence[float]],
    loads: Sequence[float],
    unit: str,
    title: str,
) -> None:
    """Draw panels beside each other, and a legend to the right of them.

    Args:
        path: ends in .png or .svg.
        panels: what is drawn, under one title.
        ends: for queries and for keys, the token at which the shard of each rank ends.
        loads: of each rank, in the unit, both for the legend.
    """
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
    if Path(path).suffix not in (".svg", ".png"):
        raise InvalidArgument(
            site="draw",
            expected="a path that ends in .png or .svg",
            got=str(path),
            remedy="name the file plan.png or plan.svg",
        )
    shown, colors = panels[:MAX_PANELS], colors_of(len(loads))
    (*query_borders, num_queries), (*key_borders, num_keys) = ends
    # Ticks, since lines would lie over the cells.
    has_ticks = len(key_borders) < MAX_BORDERS
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
                facecolors=[(colors[a.rank], ALPHAS[a.mask]) for a in panel.areas],
                linewidths=0,
                antialiased=False,
            )
        )
        axis.set(xlim=(0, num_keys), ylim=(num_queries, 0))
        axis.set_xticks(key_borders if has_ticks else [], labels=[])
        axis.set_yticks(query_borders if has_ticks else [], labels=[])
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
    more += ["ticks: borders of the shards"] * has_ticks
    entries = entries[:MAX_IN_LEGEND] + [Patch(alpha=0, label=text) for text in more]
    figure.legend(handles=entries, loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)
    # The same plan gives the same file: no date, and no random names of elements.
    with matplotlib.rc_context({"svg.hashsalt": "cp_inductor", "svg.fonttype": "none"}):
        metadata = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)


def colors_of(world_size: int) -> list[str]:
    """Return a color for each rank; with many ranks, neighbours are far apart in lightness."""
    if world_size <= len(_FEW):
        return [*_FEW[:world_size]]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](rank * _GOLDEN % 1)) for rank in range(world_size)]
