"""torch's own context parallelism in the same process: whose shards, whose handlers, in what order.

torch permutes batches by default (head-tail), and says so in flags of the process; see
`cp_inductor.dtensor.limits` for what of that can be known, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import _attention as torchs
from torch.distributed.tensor.experimental import context_parallel as torchs_context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as flags
from torch.distributed.tensor.parallel import parallelize_module

import cp_inductor
from tests.support.combinations import AOT, EAGER, compiled, make_mesh
from tests.support.graphs import Attention
from tests.support.processes import run_python
from tests.support.ranks import on_ranks
from tests.support.reference import attend, attend_with_grads, make_qkv, shard, with_grads

# Two ranks make quarters of it that are not round.
LENGTH = 20

attend_by_name = F.scaled_dot_product_attention


class OverDTensors(Attention):
    """As torchtitan prepares an inner attention."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sharded = [
            DTensor.from_local(tensor, self.mesh, [Shard(2)], run_check=False)
            for tensor in (query, key, value)
        ]
        out: DTensor = super().forward(*sharded)
        return out.to_local()


@contextmanager
def torchs_flags() -> Iterator[None]:
    """Leave torch's flags as they were: it keeps them for the life of the process."""
    before = flags._dispatch_mode, flags._cp_options.enable_load_balance
    try:
        yield
    finally:
        flags._dispatch_mode, flags._cp_options.enable_load_balance = before


@contextmanager
def dispatching() -> Iterator[None]:
    torchs._enable_context_parallel_dispatcher()
    try:
        yield
    finally:
        torchs._disable_context_parallel_dispatcher()


def head_tail(length: int = LENGTH) -> Any:
    return torchs._HeadTailLoadBalancer(length, dist.get_world_size(), torch.device("cpu"))


def cut(tensors: Sequence[Tensor], mesh: DeviceMesh, balancer: Any) -> list[Tensor]:
    """Have torch cut (B, H, S, D)."""
    dims = [2] * len(tensors)
    pieces = torchs._context_parallel_shard(mesh, list(tensors), dims, load_balancer=balancer)
    return [piece.detach().clone() for piece in pieces]


def check_against_float64(run: Callable[..., Tensor], mesh: DeviceMesh, balancer: Any) -> None:
    """Compare what `run` makes of query, key and value that torch cut, with one process."""
    whole = make_qkv(LENGTH)
    found = with_grads(run, cut(whole, mesh, balancer))
    for actual, wanted in zip(found, attend_with_grads(*whole, is_causal=True), strict=True):
        torch.testing.assert_close(actual, *cut([wanted.float()], mesh, balancer))


PERMUTED = "in the order of the ranks, got shards of torch's context parallelism"


@pytest.mark.parametrize("form", [EAGER, AOT, "aot_eager"])
@on_ranks(2)
def test_shards_that_torch_has_permuted_are_refused(form: str) -> None:
    """Shards that torch's balancer may have permuted are refused; those in order are right."""
    mesh = make_mesh(2, names=("cp",))

    def over_dtensors() -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return compiled(OverDTensors(mesh), form)

    def styled() -> Callable[..., Tensor]:
        torch._dynamo.reset()
        style = cp_inductor.ContextParallel()
        return compiled(parallelize_module(Attention(), mesh, style), form)

    for make in (over_dtensors, styled):
        for around in (nullcontext, dispatching):
            with torchs_flags(), around():
                # Other backends wrap what is raised while they trace.
                with pytest.raises(Exception, match=PERMUTED) as refused:
                    check_against_float64(make(), mesh, head_tail())
                if form != "aot_eager":
                    assert isinstance(refused.value, cp_inductor.UnsupportedPlacement)
                check_against_float64(make(), mesh, None)


@on_ranks(2)
def test_a_graph_is_not_run_on_permuted_shards() -> None:
    """Flags change behind a forward, or behind a compile."""
    mesh = make_mesh(2, names=("cp",))
    run = compiled(OverDTensors(mesh), AOT)
    query, key, value, grad = make_qkv(LENGTH)
    with torchs_flags():
        for one in (run, OverDTensors(mesh)):
            pieces = [piece.requires_grad_() for piece in cut((query, key, value), mesh, None)]
            out = one(*pieces)
            cut([query], mesh, head_tail())
            out.backward(*cut([grad], mesh, None))  # it is that of its forward
        cut([query], mesh, head_tail())
        with pytest.raises(cp_inductor.UnsupportedPlacement, match=PERMUTED):
            run(*pieces)


@on_ranks(2)
def test_a_region_shards_its_own_buffers() -> None:
    """Our context knows that it has cut its buffers into contiguous pieces."""
    mesh = make_mesh(2, names=("cp",))
    query, key, value, _ = make_qkv(LENGTH)
    whole = attend(query.double(), key.double(), value.double(), is_causal=True).float()
    context = cp_inductor.context_parallel

    def buffers() -> dict[str, Any]:
        return {"buffers": [t.clone() for t in (query, key, value)], "buffer_seq_dims": [2] * 3}

    for unshard in (torchs.context_parallel_unshard, cp_inductor.context_parallel_unshard):
        named = buffers()
        with torchs_flags():
            # Whatever flag torch was left with.
            cut([query], mesh, head_tail())
            with context(mesh, **named):
                (out,) = unshard(mesh, [Attention()(*named["buffers"])], [2])
            assert torchs._cp_options.enable_load_balance
        torch.testing.assert_close(out, whole)
    # Not by torch's ring, and its flag, while its dispatcher is on.
    named = buffers()
    with torchs_flags(), dispatching(), context(mesh, **named):
        out = cp_inductor.context_parallel_unshard(mesh, [Attention()(*named["buffers"])], [2])[0]
    torch.testing.assert_close(out, whole)
    # No buffers: what is in it was cut by somebody else.
    pieces = [shard(t, dist.get_rank(), 2).clone() for t in (query, key, value)]
    for unshard in (torchs.context_parallel_unshard, cp_inductor.context_parallel_unshard):
        with context(mesh):
            (out,) = unshard(mesh, [Attention()(*pieces)], [2])
        torch.testing.assert_close(out, whole)
    with torchs_flags():
        cut([query], mesh, head_tail())
        refused = pytest.raises(cp_inductor.UnsupportedPlacement, match=PERMUTED)
        with context(mesh), refused:
            Attention()(*pieces)


@on_ranks(2)
def test_unshard_refuses_what_a_load_balancer_has_permuted() -> None:
    mesh = make_mesh(2, names=("cp",))
    batch = torch.randn(3, LENGTH, 2)
    with torchs_flags():
        (piece,) = torchs._context_parallel_shard(mesh, [batch], [1], load_balancer=head_tail())
        for balancer in (head_tail(), None):
            with pytest.raises(cp_inductor.UnsupportedPlacement, match="load_balancer="):
                cp_inductor.context_parallel_unshard(mesh, [piece], [1], balancer)


@pytest.mark.parametrize("form", [EAGER, AOT, "aot_eager"])
@on_ranks(2)
def test_torchs_context_is_followed_where_it_permutes_nothing(form: str) -> None:
    """torch's own context around a model: refused if its flag says that buffers are permuted."""
    mesh = make_mesh(2, names=("cp",))
    query, key, value, _ = make_qkv(LENGTH)
    whole = attend(query.double(), key.double(), value.double(), is_causal=True).float()
    for is_balanced in (True, False):
        torch._dynamo.reset()
        buffers = [tensor.clone() for tensor in (query, key, value)]
        named: dict[str, Any] = {"buffers": buffers, "buffer_seq_dims": [2] * 3}
        run = compiled(Attention(), form)
        with torchs_flags():
            torchs._cp_options.enable_load_balance = is_balanced
            with torchs_context_parallel(mesh, **named):
                if is_balanced:
                    with pytest.raises(Exception, match=PERMUTED):
                        run(*buffers)
                    with pytest.raises(cp_inductor.UnsupportedPlacement, match="load_balancer="):
                        cp_inductor.context_parallel_unshard(mesh, buffers, [2] * 3)
                else:
                    (out,) = cp_inductor.context_parallel_unshard(mesh, [run(*buffers)], [2])
    torch.testing.assert_close(out, whole)
    # Two that both cut buffers are one too many.
    with (
        torchs_flags(),
        torchs_context_parallel(mesh, **named),
        pytest.raises(cp_inductor.UnsupportedPlacement, match="nested"),
        cp_inductor.context_parallel(mesh, buffers=[query.clone()], buffer_seq_dims=[2]),
    ):
        pass
    with torchs_flags(), torchs_context_parallel(mesh, **named):
        # Which has replaced the function of F, and not the one that was imported by its name.
        assert F.scaled_dot_product_attention is not attend_by_name
        local = [tensor.clone() for tensor in buffers]
        with cp_inductor.local_attention():
            alone = F.scaled_dot_product_attention(*local)
    torch.testing.assert_close(alone, attend_by_name(*local))


LATE_IMPORT = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _attention as torchs, context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))
aten = torch.ops.aten
ops = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
)

def owners():
    table = DTensor._op_dispatcher._custom_op_handlers
    return [getattr(table.get(op), "__module__", "nobody").split(".")[0] for op in ops]

x = torch.ones(1, 8)
with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
    torch.compile(lambda x: F.relu(x), backend="eager")(x)
    import cp_inductor
    assert owners() == ["torch", "torch", "cp_inductor"], owners()
assert owners() == ["cp_inductor"] * 3, owners()
torchs._enable_context_parallel_dispatcher()
assert owners() == ["torch", "torch", "cp_inductor"], owners()
torchs._disable_context_parallel_dispatcher()
assert owners() == ["cp_inductor"] * 3, owners()

graphs = []

def backend(gm, inputs):
    graphs.append(gm)
    return gm.forward

def is_over_shards(function, *inputs):
    graphs.clear()
    with cp_inductor.context_parallel(mesh):
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    values = [node.meta.get("example_value") for gm in graphs for node in gm.graph.nodes]
    return any(isinstance(value, DTensor) for value in values)

q = torch.ones(1, 2, 4, 8)
assert is_over_shards(lambda q: F.scaled_dot_product_attention(q, q, q), q)
heads = torch.nn.MultiheadAttention(8, 2, batch_first=True)
assert is_over_shards(lambda x: heads(x, x, x, need_weights=False)[0], q[0])
"""


@pytest.mark.slow
def test_imported_under_torchs_context() -> None:
    """torch's handlers stay where they are, ours are there afterwards, and modes are asked."""
    run_python("-c", LATE_IMPORT)
