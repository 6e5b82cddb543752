"""The Triton code of tiles under a mask: one template of flex attention each, and no scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import FileCheck

from cp_inductor import CrossCompiled, cross_compile, flex_gradients_on_cpu
from cp_inductor.plan import Mask
from tests.support.packed import in_documents, in_window, packed_on_meta
from tests.support.plans import make_plan
from tests.support.wrapper import TILE, TILE_BACKWARD, Wrapper, allocations

pytest.importorskip("triton")

BATCH, HEADS, KV_HEADS, TOKENS = 2, 8, 2, 1000
WINDOW = 1500


def attend_capped(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """flex_attention with a soft cap, causal and within documents."""

    def is_allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return 30 * torch.tanh(score / 30)

    sizes = query.shape[0], None, query.shape[2], key.shape[2]
    block_mask = create_block_mask(is_allowed, *sizes, device=query.device)
    result = flex_attention(
        query, key, value, score_mod=cap, block_mask=block_mask, enable_gqa=True
    )
    assert isinstance(result, Tensor)
    return result


MODELS: dict[str, Callable[..., Tensor]] = {
    "packed": in_documents,
    "window": partial(in_window, window=WINDOW),
    "capped": attend_capped,
}
RULES = {
    "capped": "(k-q<=0)&Eq(t0(b,k),t0(b,q));30*Tanh(s/30)",
    "packed": "(k-q<=0)&Eq(t0(b,k),t0(b,q))",
    "window": f"(k-q<=0)&(q-k-{WINDOW - 1}<=0)",
}


@cache
def code_of(rank: int, world_size: int, mask: str, target: str = "cuda:sm_90") -> CrossCompiled:
    heads, options = (HEADS, KV_HEADS), {"plan": "static"}
    arguments = partial(
        packed_on_meta, tokens=TOKENS, batch=BATCH, heads=heads, has_whole_documents=True
    )
    how: dict[str, Any] = {"world_size": world_size, "rank": rank, "target": target}
    with implicit_replication(), flex_gradients_on_cpu():
        return cross_compile(MODELS[mask], arguments, options=options, **how)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "rank", "world_size"), [("packed", 2, 4), ("capped", 2, 4), ("window", 517, 1024)]
)
def test_a_template_for_each_tile_under_a_mask(mask: str, rank: int, world_size: int) -> None:
    plan = make_plan(world_size, TOKENS, HEADS, KV_HEADS, mask=RULES[mask])
    tiles = [tile.mask for stage in plan.program(rank) for tile in stage.tiles]
    compiled = code_of(rank, world_size, mask)
    for kind, call in (("forward", TILE), ("backward", TILE_BACKWARD)):
        code = compiled.code[kind]
        assert "efficient_attention" not in code
        assert code.count(call) == len(tiles) - tiles.count(Mask.PARTIAL)
        launches = [c for c in Wrapper.read(code).calls if c.kind.startswith("triton_tem")]
        assert len(launches) == tiles.count(Mask.PARTIAL)
        assert tiles and (launches or mask == "window")
        templates = [s for s in Wrapper.read(code).sources.values() if "SPARSE_Q_BLOCK_SIZE" in s]
        for source in templates:
            assert "HAS_FULL_BLOCKS : tl.constexpr = True" in source
            # KV heads are not repeated.
            assert f"GQA_SHARED_HEADS : tl.constexpr = {HEADS // KV_HEADS}" in source
            assert ("tanh" in source) == (mask == "capped")
        # Nothing has a value for every score.
        shapes = [shape for shape, _ in allocations(code)]
        assert shapes
        assert not any(len(s) > 1 and min(s[-2:]) >= TOKENS // 2 for s in shapes)


@pytest.mark.long
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100"])
def test_templates_compile_to_machine_code(target: str) -> None:
    kernels = code_of(0, 2, "packed", target).compile_kernels()
    assert {k.graph for k in kernels if k.name.startswith("triton_tem")} == {"forward", "backward"}


def attend_tuned(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """What is no option of how to compute is not carried: not all rows see a key."""

    def late(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k >= 700) & (documents[b, q] == documents[b, k])

    lengths = (query.shape[2], key.shape[2])
    mask = create_block_mask(late, query.shape[0], None, *lengths, device=query.device)
    options: Any = {"fwd_BLOCK_M": 16, "fwd_num_warps": 2, "bwd_BLOCK_N1": 16}
    options["ROWS_GUARANTEED_SAFE"] = True
    out: Any = flex_attention(
        query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options
    )
    return out


MODELS["tuned"] = attend_tuned


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_kernel_options_are_carried_to_the_templates() -> None:
    code = code_of(1, 2, "tuned").code
    sources = {
        kind: [s for s in Wrapper.read(code[kind]).sources.values() if "SPARSE_Q_BLOCK_SIZE" in s]
        for kind in ("forward", "backward")
    }
    assert all(sources.values())
    for source in sources["forward"]:
        assert "BLOCK_M : tl.constexpr = 16" in source
        assert "num_warps=2" in source
    for source in sources["backward"]:
        assert "BLOCK_N1 : tl.constexpr = 16" in source
    for source in (*sources["forward"], *sources["backward"]):
        assert "ROWS_GUARANTEED_SAFE : tl.constexpr = False" in source


# --- Heads that are too short for flex attention ------------------------------------------------


LENGTH = 1024


def short_heads(mesh: DeviceMesh) -> list[Any]:
    whole = torch.zeros(1, 4, LENGTH, 8, dtype=torch.bfloat16)
    heads = [distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_() for _ in range(3)]
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    return [*heads, distribute_tensor(ids, mesh, [Shard(1)])]


def test_masks_of_short_heads_are_fused() -> None:
    """The mask of a tile is one kernel of the tile's size, from indices."""
    with implicit_replication():
        compiled = cross_compile(in_documents, short_heads, world_size=4, rank=1)
    for name, op in (
        ("forward", "_scaled_dot_product_efficient_attention.default("),
        ("backward", "_scaled_dot_product_efficient_attention_backward.default("),
    ):
        code = compiled.code[name]
        # Indices compared, documents compared, and what is added to the scores: in one kernel.
        check = FileCheck().check("async_compile.triton(").check(" <= ").check(" == ")
        check.check("tl.where(").check("tl.store(").check("def call(").check(op).run(code)
        # The bias has a row for each of the rank's queries, and no more.
        shapes = [shape for shape, _ in allocations(code)]
        assert (1, 1 if name == "forward" else 4, LENGTH // 4, LENGTH // 4) in shapes
        assert max(map(math.prod, shapes)) < LENGTH * LENGTH
