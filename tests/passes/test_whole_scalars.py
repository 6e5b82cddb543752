"""Scalars that a compiled graph returns: the whole of them, so that `item()` can be logged."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cp_inductor.passes.whole_scalars import whole_scalars
from tests.support.ranks import fake_rank, on_ranks, world_mesh


def losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total / 7, F.cross_entropy(logits, labels), logits.detach().sum(), logits * 2


@on_ranks(2)
def test_item_is_whole() -> None:
    mesh = world_mesh()
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (7,), generator=generator)
    labels[4:] = -100
    expected_leaf = logits.clone().requires_grad_()
    expected = losses(expected_leaf, labels)
    (3 * expected[0] + expected[1]).backward()

    leaf = distribute_tensor(logits, mesh, [Shard(0)]).requires_grad_()
    compiled = torch.compile(losses, backend="cp_aot_eager", fullgraph=True)
    found = compiled(leaf, distribute_tensor(labels, mesh, [Shard(0)]))
    for actual, wanted in zip(found[:3], expected[:3], strict=True):
        assert abs(actual.item() - wanted.item()) < 1e-12
        assert isinstance(actual, DTensor)
        torch.testing.assert_close(actual.full_tensor(), wanted)  # and not twice the sum
    assert found[3].placements == (Shard(0),)
    (3 * found[0] + found[1]).backward()
    assert isinstance(leaf.grad, DTensor) and expected_leaf.grad is not None
    torch.testing.assert_close(leaf.grad.full_tensor(), expected_leaf.grad)


def returning(values: list[Any]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = []
    for place, value in enumerate(values):
        nodes.append(graph.placeholder(f"value_{place}"))
        nodes[-1].meta["example_value"] = value
    graph.output(tuple(nodes))
    return fx.GraphModule(torch.nn.Module(), graph)


def part(mesh: DeviceMesh, *shape: int) -> DTensor:
    return DTensor.from_local(torch.zeros(shape), mesh, [Partial()], run_check=False)


def returned(gm: fx.GraphModule) -> list[str]:
    (output,) = gm.graph.find_nodes(op="output")
    return [str(node.target) for node in output.all_input_nodes]


def test_only_parts_of_scalars_are_summed() -> None:
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        check_graph(mesh)


def check_graph(mesh: DeviceMesh) -> None:
    with FakeTensorMode():
        whole = DTensor.from_local(torch.zeros(()), mesh, [Replicate()])
        gm = returning([part(mesh), part(mesh, 3), whole, torch.zeros(()), 3])
        whole_scalars(gm)
        assert returned(gm) == ["redistribute", "value_1", "value_2", "value_3", "value_4"]
        (made,) = gm.graph.find_nodes(op="call_method", target="redistribute")
        assert made.meta["example_value"].placements == (Replicate(),)
        whole_scalars(gm)
        assert len(gm.graph.find_nodes(op="call_method")) == 1
