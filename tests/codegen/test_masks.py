"""The mask of a tile in generated code, where the head dim is too small for flex attention.

It is one fused kernel of the tile's size, from indices.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing import FileCheck

from cp_inductor import cross_compile
from tests.support.packed import in_documents

pytest.importorskip("triton")

LENGTH, WORLD_SIZE = 1024, 4


def arguments(mesh: DeviceMesh) -> list[Any]:
    whole = torch.zeros(1, 4, LENGTH, 8, dtype=torch.bfloat16)
    heads = [distribute_tensor(whole, mesh, [Shard(2)]).requires_grad_() for _ in range(3)]
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    return [*heads, distribute_tensor(ids, mesh, [Shard(1)])]


def test_masks_are_fused() -> None:
    with implicit_replication():
        compiled = cross_compile(
            in_documents, arguments, world_size=WORLD_SIZE, rank=1, target="cuda:sm_90"
        )
    for name, op in (
        ("forward", "_scaled_dot_product_efficient_attention.default("),
        ("backward", "_scaled_dot_product_efficient_attention_backward.default("),
    ):
        code = compiled.code[name]
        # Indices compared, documents compared, and what is added to the scores: in one kernel.
        check = FileCheck().check("async_compile.triton(").check(" <= ").check(" == ")
        check.check("tl.where(").check("tl.store(").check("def call(").check(op).run(code)
        # The bias has a row for each of the rank's queries, and no more.
        shapes = re.findall(r"empty_strided_cuda\(\(([\d, ]+)\)", code)
        sizes = [[int(size) for size in shape.split(",") if size.strip()] for shape in shapes]
        own = LENGTH // WORLD_SIZE
        assert [1, 1 if name == "forward" else 4, own, own] in sizes
        assert max(torch.Size(size).numel() for size in sizes) < LENGTH * LENGTH
