"""python -m cp_inductor."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from cp_inductor.__main__ import main, size
from cp_inductor.plan import plan_attention

SIZES = ("plan", "--world-size", "4", "--seq-len", "8192", "--heads", "8", "--head-dim", "64")


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "blocks", "--stages", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["strategy"] == "blocks"
    assert summary["flops, busiest / mean"] <= 1.02
    assert summary["forward exchanges"] >= 3


def test_verbose_prints_the_plan_and_its_backward(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "rows", "--verbose"]) == 0
    plan = plan_attention(seq_len=8192, world_size=4, num_heads=8, head_dim=64, strategy="rows")
    assert f"{plan}\n{plan.backward()}" in capsys.readouterr().out


def test_a_refusal_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "heads3+blocks"]) == 1
    assert "UnsupportedStrategy" in capsys.readouterr().err


def test_a_wrong_call_is_another() -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan"])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SIZES, "--rank", "99"), "expected --rank to be an integer from 0 to 3, got 99"),
        ((*SIZES, "--rank", "-1"), "got -1"),
        (("plan", "--world-size", "0", "--seq-len", "8"), "--world-size to be an integer from 1"),
        ((*SIZES, "--mask", "foo("), "InvalidText: the mask 'foo(': "),
        ((*SIZES, "--mask", "k <= q)"), "unmatched ')'"),
        ((*SIZES, "--kv-heads", "3"), "num_kv_heads that divides num_heads=8, got 3"),
        ((*SIZES, "--machine", "gpu:ib400[bytes_per_s=nan]"), "bytes_per_s to be a finite number"),
        ((*SIZES, "--machine", "gpu[flops_per_s=0]:ib400"), "flops_per_s to be a finite number"),
        ((*SIZES, "--stages", "-1"), "stages to be an integer from 0"),
        (("explain", "nowhere:x", "--world-size", "2", "--rank", "2"), "--rank"),
        (("code", "nowhere:x", "--world-size", "-2"), "--world-size"),
        (("estimate", "x:x", "--world-size", "2", "--optimizer-states", "-1"), "optimizer_states"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not said.out
    assert words in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (("estimate",), "cp-inductor[triton]"),
        (("code",), "cp-inductor[triton]"),
        (("explain", "--html", "page.html"), "cp-inductor[draw]"),
    ],
)
def test_what_is_not_installed_is_said_before_the_model_is_made(
    arguments: tuple[str, ...],
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in ("compile_for", "page"):
        monkeypatch.setattr(f"cp_inductor.inspect.{module}.find_spec", lambda name: None)
    command, *rest = arguments
    assert main([command, "nowhere:build", "--world-size", "2", *rest]) > 0
    assert f"pip install '{remedy}'" in capsys.readouterr().err


def test_lengths_have_units_and_numbers_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert [size(text) for text in ("65536", "64k", "1M", "2K")] == [65536, 65536, 1 << 20, 2048]
    for text in ("64q", "k", ""):
        with pytest.raises(ValueError, match="invalid literal"):
            size(text)
    call = ["plan", "--world-size", "4", "--seq-len", "8k", "--strategy", "blocks"]
    assert main(call) == 0
    text = capsys.readouterr().out
    assert re.search(
        r"^forward received, most +[\d.]+ MiB  \(by the rank that receives most\)$", text, re.M
    )
    assert re.search(r"^backward predicted +[\d.]+ ms$", text, re.M)


def test_a_picture_is_drawn_or_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SIZES, "--draw", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    for path in (tmp_path / "nowhere" / "plan.png", tmp_path / "plan.gif"):
        assert main([*SIZES, "--draw", str(path)]) == 2
        assert path.name in capsys.readouterr().err


MODEL = """
import torch
import beside
import cp_inductor
from torch.distributed.tensor import Shard, distribute_tensor

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(9, 64), torch.nn.Embedding(64, 64)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        x = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

def build(mesh):
    ids = distribute_tensor(torch.zeros(1, 64, dtype=torch.long), mesh, [Shard(1)])
    return cp_inductor.parallelize(Model(), mesh), (ids,)

def broken(mesh):
    return [].pop()

def nonsense(mesh):
    return Model()

def wrong(mesh):
    return torch.nn.Linear(3, 3), (torch.zeros(1, 2),)
"""


@pytest.mark.slow
def test_a_model_that_makes_its_own_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whose file imports another one beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "model_of_positions.py"
    path.write_text(MODEL)
    rest = ("--world-size", "4", "--target", "cpu")
    assert main(["explain", f"{path}:build", *rest, "--json"]) == 0
    (attention,) = json.loads(capsys.readouterr().out)["attentions"]
    assert attention["verdict"] == "rewritten"
    assert main(["explain", f"{path}:broken", *rest]) == 1
    said = capsys.readouterr().err
    assert f"got IndexError: pop from empty list ({path}:22)" in said and said.count("\n") == 1
    assert main(["code", "nowhere_at_all:build", *rest]) == 1
    assert "No module named 'nowhere_at_all'" in capsys.readouterr().err
    for more, words in (
        (("missing",), "no attribute 'missing'"),
        (("nonsense",), r"\(model, args\)"),
        (("wrong",), "CannotLoad.*a model that runs on its arguments.*RuntimeError"),
        (("build", "--inference", "--graph", "backward"), "expected inference, the graphs that"),
        (("build", "--mesh-shape", "2,2", "--mesh-names", "a,a"), "none of them twice, got"),
        (("build", "--mesh-shape=-2,-2"), "a mesh of 4 ranks, got a mesh of -2 x -2"),
    ):
        assert main(["code", f"{path}:{more[0]}", *rest, *more[1:]]) > 0
        assert re.search(words, capsys.readouterr().err)
