"""A report as a page: what it says, what it draws, and that it needs no network."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from cp_inductor.__main__ import main
from cp_inductor.inspect.explain import AttentionReport, Report
from cp_inductor.plan.colors import colors_of
from cp_inductor.plan.cost import cost_of, sizes_of
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.planner import Recipe, backward_plan, forward_plan, resolve
from cp_inductor.plan.simulate import predict_timeline

REFUSAL = {"error": "UnsupportedAttention", "expected": "a mask <= k", "got": "b", "remedy": "c"}


MACHINE = Machine.parse("h100:ib100")


def report_of(world_size: int, **changes: Any) -> tuple[Report, Recipe]:
    length = 256 * world_size
    sizes = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "itemsize": 2, "keep": 0}
    recipe = Recipe(
        world_size=world_size, query_length=length, key_length=length, rule="causal",
        **(sizes | {"strategy": "auto", "stages": 0} | changes),
    )  # fmt: skip
    recipe = resolve(recipe, site="here", machine=MACHINE)
    facts = {"recipe": recipe.format(), "rank": 1, "mask": "causal", "machine": MACHINE.format()}
    attentions = (
        AttentionReport("sdpa (model.py:3)", "rewritten", {}, facts),
        AttentionReport("sdpa_1 (model.py:5)", "rewritten", {}, facts),
        AttentionReport("sdpa_2 (model.py:9)", "refused", REFUSAL),
    )
    return Report(attentions), recipe


def figures(page: str) -> list[list[dict[str, Any]]]:
    """Return the traces of each figure, arrays decoded."""

    def decode(value: dict[str, Any]) -> Any:
        if "bdata" not in value:
            return value
        array = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
        shape = tuple(map(int, str(value["shape"]).split(","))) if "shape" in value else (-1,)
        return array.reshape(shape)

    calls = re.findall(r'Plotly\.newPlot\(\s*"[\w-]+",\s*(\[.*?\]),\s*\{"template"', page, re.S)
    return [json.loads(call, object_hook=decode) for call in calls]


@pytest.mark.parametrize("strategy", ["auto", "heads2+blocks", "rows"])
def test_what_the_page_says_and_draws(strategy: str, tmp_path: Path) -> None:
    report, recipe = report_of(4, strategy=strategy)
    report.html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    for text in ("sdpa (model.py:3), sdpa_1 (model.py:5)", "sdpa_2 (model.py:9)", "a mask &lt;= k"):
        assert text in page
    assert all(color in page for color in colors_of(4))
    tiles, *others = figures(page)
    assert len(others) == 6
    plan = forward_plan(recipe)
    # Half of each head's cells, shared as the plan shares pairs.
    cells = np.stack([trace["z"] for trace in tiles])
    assert (cells >= 0).mean() == pytest.approx(0.5, abs=0.01)
    counts = np.bincount(cells[cells >= 0], minlength=4)
    pairs = [plan.num_pairs_of(rank) for rank in range(4)]
    assert counts / counts.sum() == pytest.approx(np.array(pairs) / sum(pairs), abs=0.01)
    for one, (timeline, (sent,), memory) in zip(
        (plan, backward_plan(recipe)), (others[:3], others[3:]), strict=True
    ):
        peak = cost_of(one).peak_bytes.subs(sizes_of(one))
        assert max(memory[0]["y"]) * 2**20 == pytest.approx(float(peak))
        received = [one.bytes_received(rank) for rank in range(4)]
        assert sent["z"].sum(0) * 2**20 == pytest.approx(received)
        ends = max(float((bar["x"] + bar["base"]).max()) for bar in timeline)
        assert ends == pytest.approx(predict_timeline(one, MACHINE).total_s * 1e3)
    assert page.count('class="chosen"') == 1
    assert f'class="chosen"><td>{recipe.strategy}</td>' in page


@pytest.mark.slow
def test_many_ranks_and_no_network(tmp_path: Path) -> None:
    report, _ = report_of(64, num_heads=32, num_kv_heads=8)
    report.html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", page)
    assert len(figures(page)) == 7
    node = shutil.which("node")
    for number, script in enumerate(re.findall(r"<script[^>]*>(.*?)</script>", page, re.S)):
        (tmp_path / f"{number}.js").write_text(script)
        if node is not None:
            subprocess.run([node, "--check", tmp_path / f"{number}.js"], check=True)


@pytest.mark.slow
def test_the_command_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.html"
    named = "tests.examples_of_models:distributed"
    call = ["explain", named, "--world-size", "2", "--target", "cpu", "--html", str(path)]
    assert main([*call, "--compiled"]) == 0
    assert "rewritten" in capsys.readouterr().out
    page = path.read_text()
    assert len(figures(page)) >= 7
    marked = [page.count(f'<b class="{kind}">') for kind in ("start", "wait")]
    assert marked[0] == marked[1] > 0  # what starts is waited for, in each graph and its code


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def in_browser(page: Path, shot: Path, width: int, *, is_dark: bool) -> np.ndarray:
    """Return what a browser shows of a page, (height, width, 3); fail if a script fails in it."""
    from PIL import Image

    assert CHROMIUM is not None
    # Headless windows are at least 500 pixels wide, so the page stands in a frame.
    frame = shot.with_suffix(".html")
    style = f"width:{width}px;height:2600px;border:0;position:absolute;left:0;top:0"
    frame.write_text(f'<!DOCTYPE html><iframe src="{page.as_uri()}" style="{style}"></iframe>')
    scheme = ["--blink-settings=preferredColorScheme=0"] * is_dark
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *scheme]
    flags += ["--enable-logging=stderr", "--virtual-time-budget=20000"]
    flags += ["--window-size=1280,2600", f"--screenshot={shot}"]
    run = subprocess.run(
        [CHROMIUM, *flags, frame.as_uri()], capture_output=True, text=True, timeout=240, check=True
    )
    assert "Uncaught" not in run.stderr and "CONSOLE" not in run.stderr, run.stderr
    return np.asarray(Image.open(shot).convert("RGB"))[:, :width]


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
@pytest.mark.parametrize("world_size", [4, 64, 1024])
def test_what_a_browser_shows(world_size: int, tmp_path: Path) -> None:
    heads = {"num_heads": 32, "num_kv_heads": 8} if world_size > 4 else {}
    report, _ = report_of(world_size, **heads)
    report.html(tmp_path / "report.html")
    colors = [tuple(bytes.fromhex(color[1:])) for color in colors_of(world_size)[:64]]
    for width in (1280, 390):
        for is_dark in (False, True):
            shot = tmp_path / f"{width}-{is_dark}.png"
            shown = in_browser(tmp_path / "report.html", shot, width, is_dark=is_dark)
            assert (shown[-1, 0].mean() < 64) is np.bool_(is_dark)
            pixels = shown.reshape(-1, 3)
            found = {tuple(color) for color in np.unique(pixels, axis=0).tolist()}
            present = sum(color in found for color in colors)
            assert present >= (len(colors) if width > 400 else 1), (width, present)
