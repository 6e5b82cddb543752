"""What `tests/support/hunt.py` says of its first programs, and that it finds what is wrong."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cp_inductor.run import merge
from tests.support.hunt import (
    BAD,
    Program,
    Verdict,
    check_drawn,
    draw_many,
    expand,
    join,
    judge_many,
    judge_on_rank,
    names_same_cause,
    over_dtensors,
    source_of,
)
from tests.support.idioms import FAMILIES, LOSSES, TABLES
from tests.support.processes import run_python
from tests.support.ranks import fake_mesh, on_ranks

# So many programs of each way, from a seed on; the command runs hundreds. Those of a long case are
# of more seeds; compiled programs take seconds each.
SAMPLES: list[Any] = [
    *(("eager", 10040, 3), ("region", 10040, 10), ("mesh", 10040, 2)),
    *(
        pytest.param(way, seed, number, marks=pytest.mark.long)
        for way, seed, number in (
            *(("eager", 10040, 6), ("region", 10040, 14), ("mesh", 10040, 4)),
            *(("aot", 10040, 6), ("region_aot", 10040, 6)),
            *(("eager", 100, 12), ("region", 100, 12), ("mesh", 100, 6)),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "seed", "number"), SAMPLES)
def test_programs(way: str, seed: int, number: int) -> None:
    said = judge_many([*islice(draw_many(seed, [way]), number)])
    verdicts = {program: join(of_ranks) for program, of_ranks in said.items()}
    assert {p: verdict for p, verdict in verdicts.items() if verdict.kind in BAD} == {}
    # Over plain shards most programs are refused, and in some samples nearly all.
    kinds = Counter(verdict.kind for verdict in verdicts.values())
    assert kinds["RIGHT"] >= number / 10, kinds


# Losses of pooled states, of which ranks chose other placements, and waited for each other.
POOLED = ["F.glu(x.mean(1)).sum()", "F.cosine_similarity(x.amax(1), x.mean(1)).sum()"]
POOLED += [
    f"y = x[0].T @ x[0]; {text}.sum()"
    for text in ("y.tanh()", "y.where(y > 0, x[1].T @ x[1])", "torch.atleast_1d(y)")
]


class Printing(TorchDispatchMode):
    """Prints the collectives that run, in their order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # which takes it apart first
            return NotImplemented
        if "c10d" in func.namespace and "wait" not in str(func):
            print(func)
        return func(*args, **(kwargs or {}))


def print_collectives() -> None:
    """Print what the first of two ranks starts for each of the losses."""
    with fake_mesh(0, 2), Printing():
        for loss in POOLED:
            print(loss)
            over_dtensors(Program(0, "eager", (), loss=loss, lengths=(8,)))


@pytest.mark.long
def test_ranks_that_hash_strings_in_their_own_order() -> None:
    """DTensor chose placements by the order of a set: of pooled states the ranks' differed."""
    program = "import tests.region.test_hunt as hunt; hunt.print_collectives()"
    first, other = (run_python("-c", program, PYTHONHASHSEED=seed) for seed in "01")
    assert first == other
    assert "all_reduce" in first


@pytest.mark.slow
@on_ranks(2)
def test_a_broken_attention_is_found() -> None:
    """One that loses a hundredth of what is found."""
    original = merge.combine

    def lose(*args: object, **kwargs: object) -> object:
        found = original(*args, **kwargs)
        return found._replace(out=found.out * 0.99)

    with mock.patch.object(merge, "combine", lose):
        (verdict,) = judge_on_rank([Program(0, "region", ("m.attend(x)",))])
    assert verdict.kind == "WRONG" and "loss 0 off by" in verdict.why


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
