"""Write a report as one page of HTML, which needs no network: plotly draws, and stands in the page.

    attentions   found or refused, with their lines, and why
    each plan    who computes what, for all heads . the timeline of all ranks . bytes from whom to
                 whom . memory over time . what strategy="auto" weighs . the program of this rank
    the program  the lowered graph and the generated code, starts and waits marked; if compiled

Attentions with the same plan share its pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from cp_inductor.errors import InvalidArgument
from cp_inductor.plan import Machine, Plan
from cp_inductor.plan.colors import colors_of
from cp_inductor.plan.columns import DESTINATION, SOURCE
from cp_inductor.plan.picture import MAX_PANELS, Panel, panels_of
from cp_inductor.plan.planner import (
    MAX_IMBALANCE,
    NEGLIGIBLE,
    Recipe,
    backward_plan,
    forward_plan,
    weigh,
)
from cp_inductor.plan.text import format_program
from cp_inductor.plan.timeline import loads_of

# Cells of a side of a picture, and of the matrix of bytes.
FINE, COARSE, MAX_ENDS = 512, 128, 256
GRAY = "#888888"
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 1.5rem auto; padding: 0 1rem; max-width: 75rem }
.wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
.chosen { font-weight: bold } .rewritten { color: #009e73 } .refused { color: #d55e00 }
pre { max-height: 30rem; overflow: auto } pre b { color: #56b4e9 } pre b.wait { color: #e69f00 }
"""


class Attention(Protocol):
    """What the page reads of an `AttentionReport`."""

    @property
    def site(self) -> str: ...  # noqa: D102

    @property
    def verdict(self) -> str: ...  # noqa: D102

    @property
    def refusal(self) -> Mapping[str, str]: ...  # noqa: D102

    @property
    def facts(self) -> Mapping[str, Any]: ...  # noqa: D102


class Compiled(Protocol):
    """What the page reads of a `CrossCompiled`."""

    @property
    def rank(self) -> int: ...  # noqa: D102

    @property
    def graphs(self) -> Mapping[str, Any]: ...  # noqa: D102

    @property
    def code(self) -> Mapping[str, str]: ...  # noqa: D102


def page_of(attentions: Sequence[Attention], title: str, compiled: Compiled | None = None) -> str:
    """Return the page of a report.

    Args:
        attentions: of the report.
        title: of the page.
        compiled: what to show of the compiled program, if anything.

    Raises:
        InvalidArgument: plotly is not installed.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    sites: dict[tuple[str, int, str], list[str]] = {}
    for one in attentions:
        if one.facts.get("recipe"):
            key = one.facts["recipe"], one.facts["rank"], one.facts["machine"]
            sites.setdefault(key, []).append(one.site)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(("attention", "verdict", "what, and why"), map(_row, attentions)),
    ]
    for key, of in sites.items():
        parts += [f"<h2>The plan of {escape(', '.join(of))}</h2>", *_plan(*key)]
    if compiled is not None:
        for name, graph in compiled.graphs.items():
            text = graph.print_readable(print_output=False)
            parts += [f"<h2>The {name} graph of rank {compiled.rank}, lowered</h2>", _marked(text)]
        for name, code in compiled.code.items():
            parts += [f"<h2>The {name} code of rank {compiled.rank}</h2>", _marked(code)]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(parts)}</body></html>"
    )


def check_plotly() -> None:
    """Check that plotly is installed; ask before anything takes time.

    Raises:
        InvalidArgument: it is not.
    """
    if find_spec("plotly") is None:
        raise InvalidArgument(
            site="html",
            expected="plotly, which draws",
            got="an installation without it",
            remedy="pip install 'cp-inductor[html]'",
        )


# A call of a collective, or of what waits for it, in graphs and in code.
CALL = re.compile(r"_c10d_functional\.(\w+)\.default\(")


def _marked(text: str) -> str:
    """Return a program with the lines marked that start exchanges, and that wait for them."""
    lines = []
    for line in escape(text).splitlines():
        call = CALL.search(line)
        kind = "wait" if call and call[1] == "wait_tensor" else "start"
        lines.append(f'<b class="{kind}">{line}</b>' if call else line)
    return f"<p>Blue lines start exchanges, orange lines wait.</p><pre>{chr(10).join(lines)}</pre>"


def _row(one: Attention) -> tuple[str, str, str]:
    what = one.refusal or {
        name: value
        for name, value in one.facts.items()
        if name not in ("recipe", "stages_kept") and value not in (None, "")
    }
    texts = [f"{escape(name)}: {escape(str(value))}" for name, value in what.items()]
    verdict = f'<span class="{one.verdict}">{one.verdict}</span>'
    return escape(one.site), verdict, ("<br>" if one.refusal else ", ").join(texts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], chosen: int = -1) -> str:
    lines = [
        f'<tr class="{"chosen" if number == chosen else ""}">'
        + "".join(f"<td>{cell}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    ]
    heads = "".join(f"<th>{name}</th>" for name in head)
    return f'<div class="wide"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _plan(text: str, rank: int, machine_text: str) -> list[str]:
    """Return what the page has of one plan."""
    recipe, machine = Recipe.parse(text), Machine.parse(machine_text)
    plan, backward = forward_plan(recipe), backward_plan(recipe)
    parts = ["<h3>Who computes what</h3>", _tiles(plan)]
    for one in (plan, backward):
        name = one.direction.value
        parts += [f"<h3>Timeline of the {name}, as predicted</h3>", _timeline(one, machine)]
        parts += [f"<h3>Bytes of the {name}, from whom to whom</h3>", _bytes(one)]
        parts += [f"<h3>Memory of the {name}, over time</h3>", _memory(one, rank, machine)]
    parts += ['<h3>What strategy="auto" weighs</h3>', _alternatives(recipe, machine)]
    for one in (plan, backward):
        parts += [f"<h3>The {one.direction.value} of rank {rank}</h3>", _program(one, rank)]
    return parts


def _figure(figure: Any, height: int, least_width: int = 320) -> str:
    """Return a figure; where the window is narrower than its least width, it scrolls."""
    figure.update_layout(
        height=height,
        margin={"l": 60, "r": 10, "t": 60, "b": 40},  # above: the buttons
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": GRAY},
    )
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    config = {"responsive": True, "displaylogo": False}
    html = figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f'<div class="wide"><div style="min-width:{least_width}px">{html}</div></div>'


def _tiles(plan: Plan) -> str:
    """Draw a panel for all heads that the same ranks compute; cells have the colors of ranks."""
    from plotly.graph_objects import Heatmap
    from plotly.subplots import make_subplots

    panels = list(panels_of(plan))
    shown, num_ranks = panels[:MAX_PANELS], plan.grid.world_size
    columns = min(4, len(shown))
    rows = -(-len(shown) // columns)
    titles = [panel.title for panel in shown]
    height = 240 * rows + 100
    spacing = 50 / height
    figure = make_subplots(
        rows, columns, subplot_titles=titles, shared_yaxes=True, vertical_spacing=spacing
    )
    colors = ["rgba(0,0,0,0)", *colors_of(num_ranks)]  # the first one where nobody computes
    edges = np.linspace(0, 1, len(colors) + 1)
    scale = [[edge, color] for at, color in enumerate(colors) for edge in edges[at : at + 2]]
    num_cells = min(plan.grid.num_chunks, FINE if len(shown) <= 4 else COARSE)
    num_cells = max(num_cells, min(COARSE, plan.grid.query_length))
    for number, panel in enumerate(shown):
        cells = _cells(plan, panel, num_cells)
        trace = Heatmap(
            z=cells,
            zmin=-1.5,
            zmax=num_ranks - 0.5,
            colorscale=scale,
            showscale=False,
            hovertemplate="queries %{y}, keys %{x}: rank %{z}<extra></extra>",
        )
        figure.add_trace(trace, number // columns + 1, number % columns + 1)
    figure.update_yaxes(autorange="reversed", showticklabels=False, title=None)
    figure.update_xaxes(showticklabels=False)
    more = len(panels) - len(shown)
    note = f"<p>and {more} more groups of heads</p>" if more else ""
    legend = ", ".join(
        f'<span style="color:{color}">■</span> rank {rank}'
        for rank, color in enumerate(colors[1:17])
    )
    rest = f" and {num_ranks - 16} more" if num_ranks > 16 else ""
    head = f"<p>Rows are queries, columns are keys: {legend}{rest}. Drag to zoom.</p>"
    return head + _figure(figure, height, 180 * columns) + note


def _cells(plan: Plan, panel: Panel, size: int) -> np.ndarray:
    """Return (size, size): the rank that computes the middle of each cell; -1 where nobody does."""
    cells = np.full((size, size), -1, dtype=np.int16)
    queries, keys = (
        (np.arange(size) + 0.5) * length / size
        for length in (plan.grid.query_length, plan.grid.key_length)
    )
    for rank, corners, _ in panel.areas:
        (left, right), (top, bottom) = (
            (min(side), max(side)) for side in zip(*corners, strict=True)
        )
        first, last = np.searchsorted(queries, (top, bottom))
        start, stop = np.searchsorted(keys, (left, right))
        part = cells[first:last, start:stop]
        if len(corners) == 3:
            below = queries[first:last, None] - top >= keys[None, start:stop] - left
            part[below] = rank
        else:
            part[:] = rank
    return cells


def _timeline(plan: Plan, machine: Machine) -> str:
    """Draw two lanes for each rank: its tiles, and what it exchanges."""
    from plotly.graph_objects import Bar, Figure

    events = loads_of(plan, machine).events(machine)
    ranks = np.arange(plan.grid.world_size)
    figure = Figure()
    for event in events:
        figure.add_trace(
            Bar(
                name=event.name,
                y=ranks + (0.2 if event.is_exchange else -0.2),
                x=event.seconds * 1e3,
                base=event.start_s * 1e3,
                width=0.36,
                orientation="h",
                marker={
                    "color": "#e69f00" if event.is_exchange else "#0072b2",
                    "line": {"width": 0},
                },
                hovertemplate=f"{event.name}, rank %{{y:.0f}}: %{{x:.3g}} ms<extra></extra>",
            )
        )
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_yaxes(autorange="reversed", title="rank", **_whole_ticks(len(ranks)))
    figure.update_xaxes(title="ms; blue: tiles, orange: exchanges")
    return _figure(figure, min(900, 180 + 24 * len(ranks)))


def _bytes(plan: Plan) -> str:
    """Draw who sends how much to whom; with many ranks, of blocks of ranks."""
    from plotly.graph_objects import Figure, Heatmap

    world_size = plan.grid.world_size
    together = -(-world_size // MAX_ENDS)
    size = -(-world_size // together)
    sent = np.zeros((size, size))
    for columns in (columns for stage in plan.columns for columns in stage):
        ends = columns[:, SOURCE] // together, columns[:, DESTINATION] // together
        np.add.at(sent, ends, plan.bytes_of(columns) / 2**20)
    trace = Heatmap(
        z=sent.astype(np.float32),
        colorscale="Viridis",
        colorbar={"title": "MiB"},
        hovertemplate="%{y} to %{x}: %{z:.4g} MiB<extra></extra>",
    )
    figure = Figure(trace)
    what = "rank" if together == 1 else f"ranks, {together} by {together}"
    ticks = _whole_ticks(size)
    figure.update_yaxes(autorange="reversed", title=f"from {what}", **ticks)
    figure.update_xaxes(title=f"to {what}", **ticks)
    return _figure(figure, 450)


def _whole_ticks(count: int) -> dict[str, Any]:
    """Return ticks at each of a few ranks; plotly puts some between them."""
    return {"dtick": 1} if count <= 16 else {}


def held_bytes(plan: Plan) -> np.ndarray:
    """Return (stages, P): what each rank holds of others during the tiles of each stage.

    That is everything fetched so far, the next stage's fetch, and results that are being sent home.
    """
    fetched, home = plan.loads[:, 0, 1], plan.loads[:, 1].sum(1)
    arrived = fetched.cumsum(0)
    return (
        np.concatenate([arrived[1:], arrived[-1:]])
        + home
        + np.roll(home, 1, axis=0) * (np.arange(len(home))[:, None] > 0)
    )


def _memory(plan: Plan, rank: int, machine: Machine) -> str:
    """Draw what ranks hold of others, beside their own shards, from the start of each stage on."""
    from plotly.graph_objects import Figure, Scatter

    held = held_bytes(plan) / 2**20
    events = [e for e in loads_of(plan, machine).events(machine) if not e.is_exchange]
    at = [(int(event.name.split()[-1]), event.start_s * 1e3) for event in events]
    ends = max((event.start_s + event.seconds.max() for event in events), default=0.0) * 1e3
    figure = Figure()
    for name, values, color in (
        ("the most of any rank", held.max(1), "#d55e00"),
        ("mean of ranks", held.mean(1), "#009e73"),
        (f"rank {rank}", held[:, rank], "#0072b2"),
    ):
        ys = [float(values[stage]) for stage, _ in at]
        line = {"shape": "hv", "color": color}
        xs = [*(start for _, start in at), ends]
        figure.add_trace(Scatter(name=name, x=xs, y=[*ys, *ys[-1:]], mode="lines", line=line))
    figure.update_layout(legend={"orientation": "h", "y": -0.25})
    figure.update_xaxes(title="ms")
    figure.update_yaxes(title="MiB", rangemode="tozero")
    return _figure(figure, 340)


def _alternatives(recipe: Recipe, machine: Machine) -> str:
    open_recipe = replace(recipe, strategy="auto", stages=0, chunks=0, keep=0, late=0)
    trials = sorted(weigh(open_recipe, machine), key=lambda trial: trial.seconds)
    rows = [
        (
            escape(trial.recipe.strategy),
            f"{trial.recipe.stages}{', own tiles halved' if trial.recipe.late else ''}",
            f"{trial.seconds * 1e3:.3g}",
            f"{trial.num_bytes / 2**20:.4g}",
            str(trial.num_calls),
            f"{trial.balance:.3f}",
        )
        for trial in trials
    ]
    this = recipe.strategy, recipe.stages, recipe.late
    keys = [(it.recipe.strategy, it.recipe.stages, it.recipe.late) for it in trials]
    head = ("strategy", "stages", "predicted ms", "MiB received, most", "tiles, most", "balance")
    rule = (
        f"In bold: this plan. Where work can be even, auto drops balances over {MAX_IMBALANCE};"
        f" of plans within {NEGLIGIBLE:.0%} of the fastest it takes the one that moves least."
    )
    return f"<p>{rule}</p>" + _table(head, rows, keys.index(this) if this in keys else -1)


def _program(plan: Plan, rank: int) -> str:
    """Return the program of a rank, with its exchanges marked."""
    lines = [
        f"<b>{line}</b>" if line.strip().startswith(("fetch", "home")) else line
        for line in escape(format_program(plan, rank)).splitlines()
    ]
    return f"<pre>{chr(10).join(lines)}</pre>"
