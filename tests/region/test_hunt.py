"""What `tests/support/hunt.py` says of its first programs, and that it finds what is wrong."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random
from unittest import mock

import pytest
import torch

from cp_inductor.run import merge
from tests.support.hunt import (
    BAD,
    WAYS,
    Program,
    Verdict,
    check_drawn,
    draw,
    expand,
    is_program,
    join,
    judge_by_hashes,
    judge_on_rank,
    names_same_cause,
    source_of,
)
from tests.support.idioms import FAMILIES, LOSSES, TABLES
from tests.support.ranks import run_ranks

# So many programs of each way, from a seed on; the long case runs more, the command hundreds.
FIRST = 10040
SAMPLES = {"eager": 8, "aot": 2, "region": 14, "region_aot": 2, "mesh": 4}


def first_programs(way: str, seed: int, number: int) -> list[Program]:
    programs = filter(is_program, (draw(seed, [way]) for seed in count(seed)))
    return [next(programs) for _ in range(number)]


def kinds_if_none_is_bad(programs: list[Program]) -> Counter[str]:
    """Judge programs on the ranks of as few worlds as there are sizes."""
    found: dict[Program, Verdict] = {}
    for ranks in {program.ranks for program in programs}:
        some = [program for program in programs if program.ranks == ranks]
        every = run_ranks(ranks, judge_on_rank, some, deadline_s=120 + 60 * len(some))
        found |= {p: join(said) for p, *said in zip(some, *every, strict=True)}
    assert {program: said for program, said in found.items() if said.kind in BAD} == {}
    return Counter(verdict.kind for verdict in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_first_programs(way: str) -> None:
    kinds = kinds_if_none_is_bad(first_programs(way, FIRST, SAMPLES[way]))
    # Over plain shards most programs are refused, and in some samples nearly all.
    assert kinds["RIGHT"] >= SAMPLES[way] / 10, kinds


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_more_programs(way: str) -> None:
    kinds_if_none_is_bad(first_programs(way, 100, 12))


@pytest.mark.slow
def test_ranks_that_hash_strings_in_their_own_order() -> None:
    """DTensor chose placements by the order of a set: of pooled states the ranks' differed."""
    losses = ["F.glu(x.mean(1)).sum()", "F.cosine_similarity(x.amax(1), x.mean(1)).sum()"]
    for text in ("y.tanh()", "y.where(y > 0, x[1].T @ x[1])", "torch.atleast_1d(y)"):
        losses.append(f"y = x[0].T @ x[0]; {text}.sum()")
    programs = [Program(0, "eager", (), loss=loss, lengths=(8,)) for loss in losses]
    verdicts = judge_by_hashes(programs)
    assert [verdict.kind for verdict in verdicts] == ["RIGHT"] * 5, verdicts


def judge_broken(programs: list[Program]) -> list[Verdict]:
    """Lose a hundredth of what is found in each attention."""
    original = merge.combine

    def lose(*args: object, **kwargs: object) -> object:
        found = original(*args, **kwargs)
        return found._replace(out=found.out * 0.99)

    with mock.patch.object(merge, "combine", lose):
        return judge_on_rank(programs)


@pytest.mark.slow
def test_a_broken_attention_is_found() -> None:
    for (verdict,) in run_ranks(2, judge_broken, [Program(0, "region", ("m.attend(x)",))]):
        assert verdict.kind == "WRONG"
        assert "loss 0 off by" in verdict.why


def test_every_row_is_python() -> None:
    for family in (*FAMILIES, *LOSSES):
        for number, row in enumerate(TABLES[family]):
            text, *_ = expand(row, Random(number)).split("  # ")
            compile(source_of(Program(0, "eager", (text,)))[0], f"{family}: {row}", "exec")


def test_numbers_that_ranks_draw_alike_are_found() -> None:
    drawn = (torch.rand(2, 32, 16) < 0.5).double()
    assert check_drawn(drawn, 2) == ""
    drawn[:, 16:] = drawn[:, :16]
    assert check_drawn(drawn, 2) == "two ranks drew the same numbers"
    assert check_drawn(drawn * 0, 2) == "100% of what was drawn is 0"


def test_ranks_must_refuse_together() -> None:
    one, other = Verdict("REFUSED", "A: 17 tokens"), Verdict("REFUSED", "A: 16 tokens")
    assert join([one, other]) == one
    assert join([one, Verdict("REFUSED", "B: 16 tokens")]).kind == "MIXED"
    assert join([one, Verdict("RIGHT")]).kind == "MIXED"
    assert join([Verdict("RIGHT"), Verdict("WRONG", "loss")]) == Verdict("WRONG", "loss")
    assert join([Verdict("REFUSED", "RanksDisagree: rank 1 said"), one]) == one
    assert names_same_cause("A: x", "RanksDisagree: rank 0 said A: x")
