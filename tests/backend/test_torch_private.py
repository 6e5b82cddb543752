"""What we lean on inside torch: each assumption fails here, loudly, when it moves."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.rules import attention as parallel
from cp_inductor.errors import UnsupportedAttention
from cp_inductor.inspect import pretend
from cp_inductor.tiles.tile_ops import TILE_OPS
from cp_inductor.torch_private import arguments, checkpoint, dynamo, groups, leaned_on, tracing
from cp_inductor.torch_private.triton import triton_for_this_torch
from tests.support.ranks import fake_rank


def test_torch_is_one_that_was_read() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    assert (2, 11) <= (major, minor) < (2, 16), "read the shim's sources in this version first"


LEANED_ON = {**leaned_on.LEANED_ON, **leaned_on.LEANED_ON_WITH_TRITON}


@pytest.mark.parametrize("place", sorted(LEANED_ON))
def test_private_names_are_where_they_were_read(place: str) -> None:
    if "triton" in place:
        pytest.importorskip("triton")
    assert leaned_on.what_moved(place, LEANED_ON[place]) is None


def test_what_moved_is_seen() -> None:
    assert "gone" in str(leaned_on.what_moved("torch._inductor.nowhere:x", ()))
    assert "gone" in str(leaned_on.what_moved("torch._inductor.config:x.y", ()))
    moved = leaned_on.what_moved("torch._inductor.compile_fx:compile_fx", ("gone",))
    assert moved is not None and moved.startswith("it no longer takes gone, but model_")


def test_the_triton_of_this_torch() -> None:
    triton = pytest.importorskip("triton")
    assert triton.__version__.split("+")[0] == triton_for_this_torch()


INDICES = [
    *(0, -1, slice(1, 3), Ellipsis, None),
    *((..., 0), (slice(None), 1), (None, 0, ..., None), (slice(0, 2), slice(1, 3, 2))),
    *((0, torch.tensor([1, 0, 1])), (..., torch.tensor([0, 3]))),
    (torch.tensor([1, 0]), slice(None), torch.tensor([2, 0])),
    (slice(None), torch.tensor([[True, False, True]] * 3)),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_fakes_are_indexed_as_tensors_are(index: object) -> None:
    tensor = torch.arange(2 * 3 * 3 * 5).reshape(2, 3, 3, 5)
    result = pretend._index(tensor, index)
    assert torch.equal(result, tensor[index])


def test_groups_have_names() -> None:
    with fake_rank(2, 3):
        for group in (dist.group.WORLD, dist.new_group([0, 2])):
            assert groups.group_of(group.group_name) is group


def test_mesh_axis_ranks_also_under_fakes() -> None:
    with fake_rank(5, 6):
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("a", "b"))
        with torch._subclasses.fake_tensor.FakeTensorMode():
            assert groups.mesh_axis_ranks(mesh, 0) == (1, 3, 5)
            assert groups.mesh_axis_ranks(mesh, 1) == (4, 5)
        assert groups.mesh_axis_ranks(DeviceMesh("cpu", [2, 5, 1]), 0) == (2, 5, 1)


@pytest.mark.parametrize("op", [*parallel.FORWARD_OPS, *parallel.BACKWARD_OPS], ids=str)
def test_dtensor_calls_our_handlers(op: torch._ops.OpOverload) -> None:
    assert op in DTensor._op_dispatcher._custom_op_handlers


@pytest.mark.parametrize("op", parallel.FORWARD_OPS, ids=str)
def test_arguments_of_the_forward_ops(op: torch._ops.OpOverload) -> None:
    names = [argument.name for argument in op._schema.arguments]
    assert names[:3] == ["query", "key", "value"]
    assert {"dropout_p", "is_causal", "scale"} <= set(names)
    assert len(op._schema.returns) >= 2


@pytest.mark.parametrize("op", parallel.BACKWARD_OPS, ids=str)
def test_arguments_of_the_backward_ops(op: torch._ops.OpOverload) -> None:
    names = [argument.name for argument in op._schema.arguments]
    assert names[0] in ("grad_out", "grad_out_")
    assert names[1:4] == ["query", "key", "value"]
    assert {"out", "logsumexp", "is_causal", "scale"} <= set(names)
    assert len(op._schema.returns) in (3, 4)


def test_collectives_that_are_lowered_to() -> None:
    start = torch.ops._c10d_functional.all_to_all_single.default
    names = [argument.name for argument in start._schema.arguments]
    assert names == ["input", "output_split_sizes", "input_split_sizes", "group_name"]


def test_waits_survive_dead_code_elimination() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = torch.ops._c10d_functional.all_to_all_single.default
    started = graph.call_function(start, (x, [1], [1], "0"))
    graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (started,))
    graph.output(x)
    graph.eliminate_dead_code()
    assert len(graph.nodes) == 4


def test_the_pin_is_what_it_was() -> None:
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    parameters = list(inspect.signature(preserve_node_ordering).parameters)
    assert parameters[:2] == ["graph", "additional_deps_map"]


def test_no_decomposition_takes_the_tiles_apart() -> None:
    from torch._inductor.decomposition import select_decomp_table

    assert not TILE_OPS & set(select_decomp_table())


def test_errors_come_through_the_compiler_as_they_are() -> None:
    error = UnsupportedAttention(site="here", expected="this", got="that", remedy="do so")

    def backend(gm: fx.GraphModule, inputs: object) -> None:
        raise dynamo.as_backend_error(error)

    with pytest.raises(UnsupportedAttention, match="here: expected this, got that; do so") as it:
        torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert it.value.remedy == "do so"
    assert type(it.value).__module__ == "cp_inductor.errors"


def test_bind_arguments() -> None:
    op = torch.ops.aten.scaled_dot_product_attention.default
    bound = arguments.bind_arguments(op, (1, 2, 3), {"is_causal": True})
    assert bound == {
        "query": 1,
        "key": 2,
        "value": 3,
        "attn_mask": None,
        "dropout_p": 0.0,
        "is_causal": True,
        "scale": None,
        "enable_gqa": False,
    }


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_that_computes_again_is_known(is_reentrant: bool) -> None:
    known: list[bool] = []

    def step(x: Tensor) -> Tensor:
        known.append(checkpoint.is_recomputing())
        return x.sin().sin()

    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: known.append(checkpoint.is_recomputing()))
    run = torch.utils.checkpoint.checkpoint
    run(step, x, use_reentrant=is_reentrant).sum().backward()
    assert known == [False, True, False]
    assert not checkpoint.is_recomputing()


def test_a_functions_cacheability_can_be_declared() -> None:
    assert isinstance(torch._inductor.config.unsafe_marked_cacheable_functions, dict)


def test_fakes_of_a_device_that_is_not_there_have_methods() -> None:
    with FakeTensorMode(), pretend.fakes_without_devices():
        ones = tracing.fake_on(torch.ones(2, 3), torch.device("cuda", 0))
        mask = tracing.fake_on(torch.ones(2, 3, dtype=torch.bool), torch.device("cuda", 0))
        results = [~mask, ones.copy_(ones), ones.t().contiguous(), ones[0, 1:]]
    assert [tuple(result.shape) for result in results] == [(2, 3), (2, 3), (3, 2), (2,)]
    assert {result.device.type for result in results} == {"cuda"}
