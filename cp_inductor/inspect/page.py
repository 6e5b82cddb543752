"""Write a report as one page of HTML, which needs no network and no script; matplotlib draws.

    what, where, when
    attentions   found or refused, with their lines, and why; those alike together
    each plan    who computes what, for all heads . when . what from whom to whom . memory over time
                 . what strategy="auto" weighs . the program of this rank
    the program  the lowered graph and the generated code, starts and waits marked; if compiled

Attentions with the same plan share its pictures. Where the batch decides, the page has the plan of
all pairs that the mask allows for some batch.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from cp_inductor.errors import InvalidArgument
from cp_inductor.inspect.cross_compile import CrossCompiled
from cp_inductor.plan import Machine, Plan
from cp_inductor.plan.facade import format_program
from cp_inductor.plan.ir import DESTINATION, SOURCE
from cp_inductor.plan.planner import (
    MAX_IMBALANCE,
    NEGLIGIBLE,
    Recipe,
    backward_plan,
    forward_plan,
    weigh,
)
from cp_inductor.plan.simulate import loads_of

# Ends of a side of the matrix of bytes; with more ranks, each stands for several.
MAX_ENDS = 256
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 1.5rem auto; padding: 0 1rem; max-width: 75rem }
img { max-width: 100% } .wide { overflow-x: auto } table { border-collapse: collapse }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top }
.chosen { font-weight: bold } .rewritten { color: #009e73 } .refused { color: #d55e00 }
pre { max-height: 30rem; overflow: auto } pre b { color: #56b4e9 } pre b.wait { color: #e69f00 }
"""


def page_of(
    title: str, facts: Mapping[str, str], attentions: Sequence[Any], compiled: CrossCompiled | None
) -> str:
    """Return the page of a report about some facts, with the `AttentionReport` of each attention.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    check_matplotlib()
    alike: dict[str, list[Any]] = {}
    plans: dict[tuple[str, int, str], list[str]] = {}
    for report in attentions:
        alike.setdefault(str(replace(report, site="")), []).append(report)
        if report.facts.get("recipe"):
            key = report.facts["recipe"], report.facts["rank"], report.facts["machine"]
            plans.setdefault(key, []).append(report.site)
    rows = ([name, escape(value, quote=False)] for name, value in facts.items() if value)
    parts = [f"<h1>{escape(title)}</h1>", _table((), rows)]
    for text, (first, *others) in alike.items():
        sites = escape(", ".join(report.site for report in (first, *others)))
        parts.append(f'<h2 class="{first.verdict}">{sites}</h2><pre>{escape(text.strip())}</pre>')
    for key, sites_of_plan in plans.items():
        parts += [f"<h2>The plan of {escape(', '.join(sites_of_plan))}</h2>", *_plan(*key)]
    if compiled is not None:
        for name, graph in compiled.graphs.items():
            text = graph.print_readable(print_output=False)
            parts += [f"<h2>The {name} graph of rank {compiled.rank}, lowered</h2>", _marked(text)]
        for name, code in compiled.code.items():
            parts += [f"<h2>The {name} code of rank {compiled.rank}</h2>", _marked(code)]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body>"
        "</html>"
    )


def check_matplotlib() -> None:
    """Raise InvalidArgument if matplotlib is not installed; ask before anything takes time."""
    if find_spec("matplotlib") is None:
        raise InvalidArgument(
            site="html",
            expected="matplotlib, which draws",
            got="an installation without it",
            remedy="pip install 'cp-inductor[draw]'",
        )


# A call of a collective, or of what waits for it, in graphs and in code.
CALL = re.compile(r"_c10d_functional\.(\w+)\.default\(")


def _marked(text: str) -> str:
    """Return a program with the lines marked that start exchanges, and that wait for them."""

    def marked(line: str) -> str:
        call = CALL.search(line)
        kind = "wait" if call and call[1] == "wait_tensor" else "start"
        return f'<b class="{kind}">{line}</b>' if call else line

    return f"<p>Blue lines start exchanges, orange lines wait.</p>{_lines(text, marked)}"


def _lines(text: str, mark: Callable[[str], str]) -> str:
    return "<pre>" + "\n".join(map(mark, escape(text).splitlines())) + "</pre>"


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
    with TemporaryDirectory() as folder:
        plan.draw(path := Path(folder) / "plan.png")
        tiles = _image(path.read_bytes(), "who computes what")
    parts = ["<h3>Who computes what</h3>", tiles]
    parts += ["<h3>When, from whom to whom, and what it takes</h3>"]
    parts += [_course(way, rank, machine) for way in (plan, backward)]
    parts += ['<h3>What strategy="auto" weighs</h3>', _alternatives(recipe, machine)]
    for way in (plan, backward):
        parts += [f"<h3>The {way.direction.value} of rank {rank}</h3>"]
        parts += [_lines(format_program(way, rank), _mark_exchange)]
    return parts


def _mark_exchange(line: str) -> str:
    return f"<b>{line}</b>" if line.strip().startswith(("fetch", "home")) else line


def _image(png: bytes, what: str) -> str:
    return f'<img alt="{what}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def _course(plan: Plan, rank: int, machine: Machine) -> str:
    """Draw the predicted timeline of all ranks, who sends how much to whom, and memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), layout="constrained")
    times, ends, memory = figure.subplots(1, 3)
    events = loads_of(plan, machine).events(machine)
    ranks = np.arange(plan.grid.world_size)
    for event in events:
        place = ranks + (0.2 if event.is_exchange else -0.2)
        color = "#e69f00" if event.is_exchange else "#0072b2"
        times.barh(place, event.seconds * 1e3, 0.36, event.start_s * 1e3, color=color)
    times.set(xlabel="ms; blue: tiles, orange: exchanges", ylabel="rank")
    times.invert_yaxis()
    sent = bytes_between(plan) / 2**20
    together = -(-len(ranks) // len(sent))
    what = "rank" if together == 1 else f"{together} ranks"
    figure.colorbar(ends.imshow(sent), ax=ends, label="MiB")
    ends.set(xlabel=f"to {what}", ylabel=f"from {what}")
    for axis in (times.yaxis, ends.xaxis, ends.yaxis):
        axis.get_major_locator().set_params(integer=True)
    held = held_bytes(plan) / 2**20
    tiles = [event for event in events if not event.is_exchange]
    edges = [event.start_s * 1e3 for event in tiles]
    edges.append(max((e.start_s + e.seconds.max() for e in events), default=0.0) * 1e3)
    stages = [int(event.name.split()[-1]) for event in tiles]
    for name, values in (
        ("the most of any rank", held.max(1)),
        ("mean of ranks", held.mean(1)),
        (f"rank {rank}", held[:, rank]),
    ):
        memory.stairs(values[stages], edges, label=name, baseline=None)
    memory.set(xlabel="ms", ylabel="MiB of others", ylim=(0, None))
    memory.legend(fontsize=8)
    figure.suptitle(f"{plan.direction.value}, as predicted")
    figure.savefig(png := BytesIO(), dpi=100)
    return _image(png.getvalue(), f"the course of the {plan.direction.value}")


def bytes_between(plan: Plan) -> np.ndarray:
    """Return (ends, ends): the bytes from whom to whom; with many ranks, of blocks of ranks."""
    world_size = plan.grid.world_size
    together = -(-world_size // MAX_ENDS)
    sent = np.zeros((-(-world_size // together),) * 2)
    for moved in (moved for stage in plan.stages for moved in (stage.fetch, stage.home)):
        ends = moved.columns[:, SOURCE] // together, moved.columns[:, DESTINATION] // together
        np.add.at(sent, ends, plan.bytes_of(moved))
    return sent


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
    chosen = recipe.strategy, recipe.stages, recipe.late
    keys = [(it.recipe.strategy, it.recipe.stages, it.recipe.late) for it in trials]
    head = ("strategy", "stages", "predicted ms", "MiB received, most", "tiles, most", "balance")
    rule = (
        f"In bold: this plan. Where work can be even, auto drops balances over {MAX_IMBALANCE};"
        f" of plans within {NEGLIGIBLE:.0%} of the fastest it takes the one that moves least."
    )
    return f"<p>{rule}</p>" + _table(head, rows, keys.index(chosen) if chosen in keys else -1)
