"""How many kernels an attention is beside flash calls and collectives, and what they move.

Code of a middle rank of eight; three eighths of the way is what no strategy treats apart.

With its long cases it takes more than 90 CPU seconds: every case generates the code of a whole
attention, with up to 29 tiles, or of a rank of 1024.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from cp_inductor import CrossCompiled, cross_compile
from tests.support.graphs import attend_causal
from tests.support.kernel_traffic import Traffic, traffic_of

pytest.importorskip("triton")

WORLD_SIZE = 8
HEADS, TOKENS, HEAD_DIM = 32, 4096, 128


@cache
def code_of(strategy: str, kv_heads: int = HEADS, world_size: int = WORLD_SIZE) -> CrossCompiled:
    shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    query = torch.empty(1, HEADS, TOKENS, HEAD_DIM, **shape)
    key = torch.empty(1, kv_heads, TOKENS, HEAD_DIM, **shape)
    options, rank = {"strategy": strategy}, world_size * 3 // 8
    return cross_compile(
        attend_causal, (query, key, key), world_size=world_size, rank=rank, options=options
    )


def launches(
    strategy: str, kv_heads: int = HEADS, world_size: int = WORLD_SIZE
) -> dict[str, list[Traffic]]:
    code = code_of(strategy, kv_heads, world_size).code
    return {kind: traffic_of(of_kind) for kind, of_kind in code.items()}


# (strategy, heads of keys, ranks) -> kernels forward, backward, and MB of both: at most 12 and 20,
# and a little more than the MB of today. What needs more kernels has today's number.
LIMITS = {
    ("auto", 32, 8): (12, 20, 1000),
    ("auto", 8, 8): (12, 20, 620),
    ("heads_own_forward", 32, 8): (12, 20, 1000),
    ("heads_own", 32, 8): (14, 20, 1500),
    ("heads2_own+blocks", 32, 8): (12, 20, 1900),
    ("ring", 32, 8): (12, 20, 1400),
    ("blocks", 32, 8): (12, 20, 2400),
    ("auto", 32, 1024): (12, 20, 5700),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case[0] == "ring" else pytest.mark.long, id="-".join(map(str, case))
        )
        for case in LIMITS
    ],
)
def test_kernels_are_few(case: tuple[str, int, int]) -> None:
    forward, backward, megabytes = LIMITS[case]
    found = launches(*case)
    assert 0 < len(found["forward"]) <= forward
    assert 0 < len(found["backward"]) <= backward
    assert sum(one.moved for kind in found for one in found[kind]) <= megabytes * 1e6
