"""Pieces that layers share: what is in them, what stays outside, and what code they become."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch.distributed.tensor.experimental import implicit_replication

from benchmarks.compile_time import Attentions
from cp_inductor import CrossCompiled, cross_compile
from cp_inductor.backend.captured import Captured
from cp_inductor.backend.compile import kind_of
from cp_inductor.graph.collectives import is_collective
from cp_inductor.inspect import compile_for
from cp_inductor.inspect.cross_compile import Done
from cp_inductor.passes.lower_attention import Piece
from cp_inductor.passes.nodes import tiles_of
from cp_inductor.tiles.kernel_table import FLEX_OPS
from cp_inductor.torch_private.tracing import INVOKE_SUBGRAPH
from tests.support.packed import packed_on_meta

LIST_BLOCKS = torch.ops.cp_inductor.list_blocks.default


def compiled(layers: int) -> CrossCompiled:
    """Compile forward and backward for a GPU."""
    pytest.importorskip("triton")
    how: Any = {"world_size": 4, "target": "cuda:sm_90", "options": {"plan": "runtime"}}
    with implicit_replication():
        return cross_compile(Attentions(layers), partial(packed_on_meta, tokens=256), **how)


@cache
def graphs(layers: int) -> Mapping[str, fx.GraphModule]:
    """Return what Inductor would be given."""
    found: dict[str, fx.GraphModule] = {}

    def keep(gm: fx.GraphModule, inputs: Any, **how: Any) -> Any:
        found[kind_of(how)] = gm
        return lambda *_: pytest.fail("nothing runs here")

    def stop(*_: Any) -> None:
        raise Done

    with (
        mock.patch.object(compile_for, "compile_fx_inner", keep),
        mock.patch.object(Captured, "runner", return_value=stop),
    ):
        compiled(layers)
    return found


def pieces_of(gm: fx.GraphModule) -> list[fx.GraphModule]:
    return [module for module in gm.modules() if isinstance(module, Piece)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_layers_call_the_same_pieces(kind: str) -> None:
    two, three, four = (graphs(layers)[kind] for layers in (2, 3, 4))
    calls = [Counter(node.target for node in gm.graph.nodes) for gm in (two, three, four)]
    # The first layer's query, and the last one's gradient, have another layout than the others.
    # Whatever is alike is cut, and a further layer brings no piece.
    assert pieces_of(three)
    assert len(pieces_of(three)) == len(pieces_of(four))
    assert calls[1][INVOKE_SUBGRAPH] < calls[2][INVOKE_SUBGRAPH]
    # Tables are the same for all layers, and stay outside.
    assert calls[0][LIST_BLOCKS] == calls[2][LIST_BLOCKS] > 0
    for piece in pieces_of(four):
        assert not any(map(is_collective, piece.graph.nodes))
    tiles = [tiles_of(node) for node in four.graph.nodes if node.target is INVOKE_SUBGRAPH]
    assert all(len(some) <= 1 for some in tiles), "nothing can be hidden by half of a piece"
    assert any(tiles)
    # One attention alone is not cut.
    alone = graphs(1)[kind]
    assert not pieces_of(alone)
    assert any(node.target in FLEX_OPS for node in alone.graph.nodes)


@pytest.mark.long
def test_further_layers_add_no_kernels() -> None:
    three, four = (compiled(layers).code for layers in (3, 4))
    for kind in ("forward", "backward"):
        kernels = [code[kind].count("async_compile.triton(") for code in (three, four)]
        assert kernels[0] == kernels[1]
