"""python -m cp_inductor."""

from __future__ import annotations

import json

import pytest

from cp_inductor.__main__ import main
from cp_inductor.plan import Plan

SIZES = ("plan", "--world-size", "4", "--seq-len", "8192", "--heads", "8", "--head-dim", "64")


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "blocks", "--stages", "2", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["strategy"] == "blocks"
    assert summary["flops, busiest / mean"] <= 1.02
    assert 1 < summary["bytes received / lower bound"] < 2
    assert summary["forward exchanges"] >= 3


def test_every_line_parses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "rows", "--layout", "zigzag", "--verbose"]) == 0
    text = capsys.readouterr().out
    forward, backward = (f"plan {part}" for part in text.split("\nplan ")[1:])
    plan = Plan.parse(forward.rstrip("\n"))
    assert plan.backward() == Plan.parse(backward.rstrip("\n"))


def test_one_rank_and_the_cost(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--rank", "3", "--cost"]) == 0
    text = capsys.readouterr().out
    assert "forward, rank 3:" in text
    assert "rank 2: tile" not in text
    assert "received_bytes = " in text


def test_a_refusal_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIZES, "--strategy", "heads3+blocks"]) == 1
    assert "UnsupportedStrategy" in capsys.readouterr().err


def test_a_wrong_call_is_another() -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan"])
    assert exit_.value.code == 2
