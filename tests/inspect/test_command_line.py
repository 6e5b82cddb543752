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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SIZES, "--rank", "99"), "expected --rank to be an integer from 0 to 3, got 99"),
        ((*SIZES, "--rank", "-1"), "got -1"),
        (("plan", "--world-size", "0", "--seq-len", "8"), "--world-size to be an integer from 1"),
        ((*SIZES, "--mask", "foo("), "InvalidText: the mask 'foo(': "),
        ((*SIZES, "--mask", "k <= q)"), "')' where the expression was at its end"),
        ((*SIZES, "--kv-heads", "3"), "num_kv_heads that divides num_heads=8, got 3"),
        ((*SIZES, "--gbytes-per-s", "nan"), "bytes_per_s to be a finite number above zero"),
        ((*SIZES, "--tflops", "0"), "flops_per_s to be a finite number above zero"),
        ((*SIZES, "--stages", "-1"), "stages to be an integer from 0"),
        (("explain", "nowhere:x", "--world-size", "2", "--rank", "2"), "--rank"),
        (("code", "nowhere:x", "--world-size", "-2"), "--world-size"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not said.out
    assert words in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize("mask", ["full", "(k-q<=0)&(q-k-700<=0)", "q//512==k//512", "k<=q"])
def test_no_plan_moves_less_than_the_bound(mask: str, capsys: pytest.CaptureFixture[str]) -> None:
    for strategy in ("rows", "blocks", "allgather"):
        assert main([*SIZES, "--mask", mask, "--strategy", strategy, "--json"]) == 0
        summary = json.loads(capsys.readouterr().out)
        assert summary.get("bytes received / lower bound", 1.0) >= 1.0
