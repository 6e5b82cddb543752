"""How many kernels an attention is beside flash calls and collectives, and what they move.

Code of a middle rank of eight; three eighths of the way is what no strategy treats apart.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from cp_inductor import CrossCompiled, cross_compile
from tests.codegen.kernel_traffic import Traffic, traffic_of
from tests.graphs import attend_causal

pytest.importorskip("triton")

WORLD_SIZE, RANK = 8, 3
HEADS, TOKENS, HEAD_DIM = 32, 4096, 128


@cache
def code_of(strategy: str) -> CrossCompiled:
    shape = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    tensors = [torch.empty(1, HEADS, TOKENS, HEAD_DIM, **shape) for _ in range(3)]
    options = {"strategy": strategy}
    return cross_compile(attend_causal, tensors, world_size=WORLD_SIZE, rank=RANK, options=options)


def launches(strategy: str) -> dict[str, list[Traffic]]:
    return {kind: traffic_of(code) for kind, code in code_of(strategy).code.items()}


# strategy -> kernels forward, backward, and MB of both: what is there today, and a little more.
LIMITS = {
    "heads": (12, 20, 1200),
    "ring": (12, 20, 1450),
    "blocks": (19, 26, 3500),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LIMITS)
def test_kernels_are_few(strategy: str) -> None:
    forward, backward, megabytes = LIMITS[strategy]
    found = launches(strategy)
    assert 0 < len(found["forward"]) <= forward
    assert 0 < len(found["backward"]) <= backward
    assert sum(one.moved for kind in found for one in found[kind]) <= megabytes * 1e6


@pytest.mark.slow
def test_what_ranks_share_the_heads_of_is_put_together_once() -> None:
    """Each of out, lse, dq, dk and dv is written by one kernel, and each message by one."""
    found = launches("heads")
    rows = HEADS * TOKENS * HEAD_DIM * 2
    numbers = HEADS * TOKENS * 4
    written = [one.written for one in found["forward"]]
    assert written.count(rows) == written.count(numbers) == 1
    assert [one.written for one in found["backward"]].count(rows) == 3
    num_stages = code_of("heads").code["forward"].count("_flash_attention.default(")
    # Forward: two messages for each stage, and two results. Backward: besides, delta, what stands
    # in for out in each stage, and three results.
    assert len(found["forward"]) == 2 * num_stages + 2
    assert len(found["backward"]) == 3 * num_stages + 4
