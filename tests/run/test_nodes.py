"""Four gloo ranks as two nodes of two: what crosses is passed on, as on one process."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import (
    assert_shards_close,
    attend_with_grads,
    make_qkv,
    on_mesh,
    with_grads,
)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.slow
@on_ranks(4)
def test_two_nodes_of_two_ranks() -> None:
    from torch.distributed.tensor import Shard

    whole = make_qkv(133, num_kv_heads=2)
    options = {"machine": "2xcpu:tcp x 2:eth10", "strategy": "nodes2+blocks", "stages": 2}
    compiled = torch.compile(attend, backend="cp_aot_eager", fullgraph=True, options=options)
    found = with_grads(compiled, on_mesh(whole, world_mesh(), Shard(2)))
    assert_shards_close(found, attend_with_grads(*whole, is_causal=True), torch.float32)
