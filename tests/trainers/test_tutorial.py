"""docs/tutorial.md: its files are run, and print what the page says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import cp_inductor
from cp_inductor.__main__ import main
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
FILES = dict(re.findall(r'^```python title="(.+?)"\n(.*?)^```', PAGE, re.M | re.S))
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
