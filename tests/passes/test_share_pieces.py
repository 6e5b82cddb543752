"""Pieces that layers share: what is in them, what stays outside, and what code they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor import CrossCompiled, cross_compile
from cp_inductor.graph.collectives import is_collective
from cp_inductor.passes.share_pieces import Piece, share_pieces
from cp_inductor.tiles.tile_ops import FLEX_OPS
from cp_inductor.torch_private.tracing import (
    INVOKE_SUBGRAPH,
    fakes_of_shapes,
    trace_fake,
)

WORLD, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 4, 256, 4, 2, 64
LIST_BLOCKS = torch.ops.cp_inductor.list_blocks.default


@cache
def compiled(layers: int) -> CrossCompiled:
    """Compile packed attention, forward and backward, layer by layer on the same documents."""
    pytest.importorskip("triton")

    def model(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        place = torch.arange(query.shape[2])
        mask = documents[:, None, :, None] == documents[:, None, None]
        mask = mask & (place[:, None] >= place)
        for _ in range(layers):
            query = query + F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=True
            )
        return query

    def arguments(mesh: DeviceMesh) -> list[Tensor]:
        like = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
        shapes = [(1, n, TOKENS * WORLD, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)]
        tokens = [distribute_tensor(torch.empty(s, **like), mesh, [Shard(2)]) for s in shapes]
        documents = torch.empty(1, TOKENS * WORLD, dtype=torch.int64, device="meta")
        return [*tokens, distribute_tensor(documents, mesh, [Shard(1)])]

    with implicit_replication():
        return cross_compile(
            model, arguments, world_size=WORLD, target="cuda:sm_90", options={"plan": "runtime"}
        )


def pieces_of(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, Piece)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_further_layers_add_calls_and_no_code(kind: str) -> None:
    two, four = compiled(2), compiled(4)
    graphs = [one.graphs[kind] for one in (two, four)]
    # The first layer's query has another layout than those of the others.
    calls = [Counter(node.target for node in gm.graph.nodes) for gm in graphs]
    pieces = [pieces_of(gm) for gm in graphs]
    assert pieces[1], "nothing was cut"
    per_layer = calls[1][INVOKE_SUBGRAPH] // len(pieces[1])
    assert per_layer >= 3
    # Tables are the same for all layers, and stay outside.
    assert calls[0][LIST_BLOCKS] == calls[1][LIST_BLOCKS] > 0
    templates = [one.code[kind].count("async_compile.triton(") for one in (two, four)]
    assert templates[1] <= templates[0]
    for gm in graphs:
        for piece in pieces_of(gm):
            assert not any(map(is_collective, piece.graph.nodes))


def test_a_graph_of_one_attention_is_not_cut() -> None:
    one = compiled(1)
    assert not any(pieces_of(gm) for gm in one.graphs.values())
    tiles = [node for node in one.graphs["forward"].graph.nodes if node.target in FLEX_OPS]
    assert tiles


# --- The cut ----------------------------------------------------------------------------------


def cut(function: Callable[..., list[Tensor]], *shapes: tuple[int, ...]) -> fx.GraphModule:
    fakes = fakes_of_shapes([(shape, torch.float32) for shape in shapes])
    gm = trace_fake(function, fakes, {})
    share_pieces(gm)
    return gm


def run(gm: fx.GraphModule, *tensors: Tensor) -> list[Tensor]:
    """Run a graph whose pieces are run as they are written."""

    class Runner(fx.Interpreter):
        def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
            if target is INVOKE_SUBGRAPH:
                return fx.Interpreter(args[0]).run(*args[2:])
            return super().call_function(target, args, kwargs)

    return list(Runner(gm).run(*tensors))


def test_results_have_memory_of_their_own() -> None:
    def function(a: Tensor, b: Tensor) -> list[Tensor]:
        product = (a @ b).sin()
        left, right = product.exp().split(2, 1)
        view = product.t()
        return [left, right * 2, view, view[1:], a[1:]]

    tensors = [torch.randn(4, 3), torch.randn(3, 4)]
    gm = cut(function, (4, 3), (3, 4))
    (piece,) = pieces_of(gm)
    (output,) = piece.graph.find_nodes(op="output")
    # product.exp(), right * 2 and product: no views, and nothing twice.
    assert [str(node.target) for node in output.args[0]] == [
        "aten.exp.default",
        "aten.mul.Tensor",
        "aten.sin.default",
    ]
    for found, expected in zip(run(gm, *tensors), function(*tensors), strict=True):
        assert torch.equal(found, expected)


def test_conditions_of_floats_stay_within() -> None:
    def function(a: Tensor) -> list[Tensor]:
        most = a.amax(1)
        return [torch.where(most == float("-inf"), 0.0, most).exp().log() + 1]

    gm = cut(function, (4, 3))
    (piece,) = pieces_of(gm)
    given = torch.randn(4, 3)
    given[1] = float("-inf")
    assert torch.equal(run(gm, given)[0], function(given)[0])
    assert len(piece.graph.find_nodes(op="placeholder")) == 1


def test_what_is_too_small_is_left() -> None:
    gm = cut(lambda a: [a.sin().cos()], (4, 3))
    assert not pieces_of(gm)


def test_a_piece_is_not_run_in_place_of_its_code() -> None:
    gm = cut(lambda a: [a.sin().cos().exp().log()], (4, 3))
    (piece,) = pieces_of(gm)
    with pytest.raises(AssertionError, match="run by the code"):
        piece(torch.randn(4, 3))
