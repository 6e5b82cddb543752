"""docs/tutorial.md: its files are run, and print what the page says; so are its blocks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import cp_inductor
from cp_inductor.__main__ import main
from tests.support.combinations import make_batch, make_model, mean_loss
from tests.support.ranks import run_ranks, world_mesh

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
FILES = dict(re.findall(r'^```python title="(.+?)"\n(.*?)^```', PAGE, re.M | re.S))
DIFF = re.findall(r"^```diff.*?\n(.*?)^```", PAGE, re.M | re.S)[0].splitlines()
SHOWN = dict(re.findall(r'^```text title="(.+?)"\n(.*?)^```', PAGE, re.M | re.S))


def run_file(name: str, folder: str, is_compiled: bool = True) -> str:
    """Run a file of the page in this process, which has a group already; return what it prints."""
    code = FILES[name].replace('backend="cp_inductor"', 'backend="cp_aot_eager"')
    assert ("cp_aot_eager" in code) == (name == "train.py")
    before = os.getcwd()
    model = ModuleType("model")
    model.__dict__["__file__"] = "model.py"
    exec(FILES["model.py"], model.__dict__)
    said = io.StringIO()
    os.chdir(folder)
    try:
        with (
            patch.dict(sys.modules, model=model),
            patch.object(dist, "init_process_group"),
            patch.object(dist, "destroy_process_group"),
            contextlib.nullcontext() if is_compiled else patch.object(torch, "compile", eager),
            contextlib.redirect_stdout(said),
        ):
            exec(code, {"__name__": "__main__"})
    finally:
        os.chdir(before)
    return said.getvalue()


def eager(model: Any, **_: Any) -> Any:
    """Stand in for torch.compile where its tens of seconds are too many."""
    return model


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\S+)", text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "is_compiled"), [(2, False), pytest.param(4, True, marks=pytest.mark.long)]
)
def test_the_tutorial(ranks: int, is_compiled: bool, tmp_path: Path) -> None:
    """Ranks train as one process does, which reads what they save; the outputs are the page's."""
    one = run_file("one.py", str(tmp_path))
    first, *others = run_ranks(ranks, run_file, "train.py", str(tmp_path), is_compiled)
    assert not any(others)
    loaded = run_file("load.py", str(tmp_path))
    losses = [*numbers(one), *numbers(loaded)]
    assert len(losses) == 5
    assert numbers(first) == pytest.approx(losses, abs=3e-4)
    command = f"torchrun --standalone --nproc-per-node {ranks} train.py"
    shown = SHOWN["python one.py"], SHOWN[command], SHOWN["python load.py"]
    strip = re.compile(r"\d+\.\d+").sub
    assert [strip("", text) for text in (one, first, loaded)] == [strip("", text) for text in shown]
    if torch.__version__.partition("+")[0] == "2.13.0":  # the text is a file of torch
        assert numbers("".join(shown)) == pytest.approx(numbers(one + first + loaded), abs=2e-3)


def test_three_lines_make_a_script_parallel() -> None:
    """Two more make the mesh, which all scripts of ranks have; `test_the_tutorial` runs both."""
    before, after = ([line[1:] for line in DIFF if line[:1] in f" {sign}"] for sign in "-+")
    assert len(set(after) - set(before)) == 3 + 2
    assert "\n".join(before) in FILES["one.py"]
    assert set(after) <= set(FILES["train.py"].splitlines())


@pytest.mark.slow
@pytest.mark.long
def test_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("model.py", "report.py"):
        (tmp_path / name).write_text(FILES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)
    with cp_inductor.config.patch(machine="auto"):  # as readers have it; tests have a slower one
        assert main(["explain", "report.py:build", "--world-size", "4"]) == 0
    said = capsys.readouterr().out
    (shown,) = (text for title, text in SHOWN.items() if "explain" in title)
    assert said.startswith(shown.removesuffix("...\n"))


# --- After the first step: blocks of code ------------------------------------------------------

# A step of Adam is lr / 3 for every weight, however small its gradient; sums in another order move
# the smallest of them.
ADAM = 0.01 / 3 / 10
WAYS = ("Plain shards", "A region")


def blocks(*titles: str) -> str:
    """Return the page's blocks with these titles, in its order."""
    page = PAGE.partition("## After the first step")[2]
    found = re.findall(r'^```python title="(.+?)"\n(.*?)^```', page, re.M | re.S)
    assert {title for title, _ in found} == {*WAYS, "all"}
    return "\n".join(code for title, code in found if title in titles)


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = make_model()

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(self.decoder(ids, positions), labels)


def training(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return {
        "cp_inductor": cp_inductor,
        "torch": torch,
        "dist": dist,
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "batches": [make_batch(), make_batch(seed=3)],
    }


def run_page(way: str) -> tuple[float, float, dict[str, Tensor]]:
    """Run the page as it stands; return the losses of its step and evaluation, and the weights."""
    mesh, model = world_mesh(), WithLoss()
    names = training(model) | {"mesh": mesh}
    if way == "Plain shards":
        options = {"mesh": mesh}
        backend = "cp_aot_eager"
        names["model"] = torch.compile(model, backend=backend, fullgraph=True, options=options)
    exec(blocks(way, "all"), names)
    return names["loss"], names["evaluated"], model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_page(way: str) -> None:
    """Accumulate, clip, step, evaluate."""
    one = training(WithLoss()) | {"cp_inductor": Mock(), "mesh": None}
    exec("def step(*whole):\n    loss = model(*whole)\n    if torch.is_grad_enabled():\n"
         "        loss.backward()\n    return loss.item()", one)  # fmt: skip
    exec(blocks("all"), one)
    for loss, evaluated, weights in run_ranks(2, run_page, way):
        assert (loss, evaluated) == pytest.approx((one["loss"], one["evaluated"]), rel=1e-5)
        torch.testing.assert_close(weights, one["model"].state_dict(), rtol=0, atol=ADAM)
