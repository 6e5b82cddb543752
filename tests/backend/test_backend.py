"""Switches, options, hooks, counters, logs; numerics through both backends and Inductor."""

from __future__ import annotations

import io
import time
import warnings
import weakref
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor.backend import progress
from cp_inductor.backend.partition import Partition
from cp_inductor.passes.check_mesh import _warn_of_no_shards
from tests.support.graphs import AttentionBlock, attend_causal, generate_code
from tests.support.processes import run_python
from tests.support.ranks import fake_mesh, fake_rank, on_ranks, world_mesh
from tests.support.reference import (
    assert_all_close,
    assert_shards_close,
    attend_with_grads,
    make_qkv,
    on_mesh,
    shard,
    with_grads,
)


def attend_under_autocast(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return attend_causal(query, key, value)


def write_to_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_causal(query, key, value).mul_(2)


def write_to_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    query = query * 1
    out = attend_causal(query, key, value)
    query.mul_(3)
    return out * 2


def write_to_a_view_of_the_key(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key = key * 1
    out = attend_causal(query, key, value)
    key[:, :1].mul_(3)
    return out * 2


def attend_twice(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first = attend_causal(query, key, value)
    return attend_causal(first, key, value) * 2


def write_to_what_is_attended_again(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first = attend_causal(query, key, value)
    out = attend_causal(first, key, value)
    first.mul_(3)
    return out * 2


def write_in_a_checkpoint(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = checkpoint(write_to_out, query, key, value, use_reentrant=False)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.slow
@on_ranks(2)
def test_what_is_written_to_in_place_is_saved_as_it_was() -> None:
    """What autograd counts of a DTensor it does not count of the local tensor that is saved."""
    mesh, whole = world_mesh(), make_qkv(8)
    wide = [tensor.double() for tensor in whole]
    once = with_grads(lambda *qkv: attend_causal(*qkv) * 2, wide)
    twice = with_grads(attend_twice, wide)
    for function, expected in (
        *((write_to_out, once), (write_to_query, once), (write_to_a_view_of_the_key, once)),
        *((write_in_a_checkpoint, once), (write_to_what_is_attended_again, twice)),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="cp_aot_eager", fullgraph=True)
        found = with_grads(compiled, on_mesh(whole, mesh, Shard(2)))
        assert_all_close(found, expected, torch.float32, function.__name__)


def write_behind(name: str, options: dict[str, Any] | None, mesh: DeviceMesh) -> str:
    """Write to what a compiled attention got or returned, and differentiate; say what comes."""
    whole = make_qkv(8)
    leaves = [distribute_tensor(t, mesh, [Shard(2)]) if options is None else t for t in whole[:3]]
    for leaf in leaves:
        leaf.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(attend_causal, backend="cp_aot_eager", options=options, fullgraph=True)
    for _ in range(2):
        # A step of an optimizer between two steps is none of our business.
        out = compiled(*leaves)
        torch.autograd.grad(out.sum(), leaves)
        with torch.no_grad():
            leaves[2].mul_(0.5)
    out = compiled(*leaves)
    if name == "out":
        out.mul_(2)
    elif name == "a view of out":
        out[:, 0].mul_(2)
    elif name != "nothing":
        with torch.no_grad():
            leaves["qkv".index(name)].mul_(2)
    loss = out.sum()
    try:
        torch.autograd.grad(loss, leaves, retain_graph=True)
        if name == "nothing":
            with torch.no_grad():
                leaves[1].mul_(2)
        torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return type(error).__name__
    return "differentiated"


@on_ranks(2)
def test_what_is_written_to_behind_the_graph_is_refused_in_its_backward() -> None:
    """Over DTensors as autograd does it over plain tensors."""
    mesh = world_mesh()
    names = ("q", "k", "v", "out", "a view of out", "nothing")
    # A graph that gives its buffers away can be differentiated once.
    with torch._functorch.config.patch(donated_buffer=False):
        assert {write_behind(name, None, mesh) for name in names} == {"ModifiedInPlace"}
        assert {write_behind(name, {"mesh": mesh}, mesh) for name in names} == {"RuntimeError"}


@on_ranks(2)
def test_versions_keep_no_memory() -> None:
    mesh = world_mesh()
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in make_qkv(8)[:3])
    compiled = torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True)
    for is_differentiated in (False, True):
        inputs = [t * 1 for t in (q, k, v)]
        out = compiled(*inputs)
        held = [weakref.ref(t.to_local().untyped_storage()) for t in (*inputs, out)]
        loss = out.sum()
        del inputs, out
        if is_differentiated:
            loss.backward()
        else:
            del loss
        assert [ref() for ref in held] == [None] * 4


@pytest.mark.parametrize("is_distributed", [True, False])
@on_ranks(2)
def test_autocast_numerics(is_distributed: bool) -> None:
    """Float32 in, bfloat16 inside and out, float32 gradients."""
    rank, world_size, mesh = dist.get_rank(), dist.get_world_size(), world_mesh()
    whole = make_qkv(5 * world_size)
    rounded = [tensor.bfloat16() for tensor in whole]
    expected = attend_with_grads(*rounded, is_causal=True)
    options = None if is_distributed else {"mesh": mesh}
    compiled = torch.compile(
        attend_under_autocast, backend="cp_aot_eager", options=options, fullgraph=True
    )
    given = (*whole[:3], rounded[3])
    if is_distributed:
        found = with_grads(compiled, on_mesh(given, mesh, Shard(2)))
    else:
        found = with_grads(compiled, (shard(t, rank, world_size).contiguous() for t in given))
    assert found[0].dtype == torch.bfloat16
    assert_shards_close([one.bfloat16() for one in found], expected, torch.bfloat16)


@on_ranks(2)
def test_regions_that_are_compiled_once() -> None:
    """Two layers are calls of one subgraph, over plain shards; DTensors are refused."""
    region = torch.compiler.nested_compile_region(torch.nn.Module.__call__)
    first, second = (AttentionBlock(8, 2).double() for _ in range(2))
    whole = torch.randn(1, 10, 8, dtype=torch.float64)
    how: Any = {"backend": "cp_aot_eager", "fullgraph": True, "options": {"mesh": world_mesh()}}
    compiled = torch.compile(lambda x: region(second, region(first, x)), **how)
    own = shard(whole, dist.get_rank(), 2, dim=1).contiguous().requires_grad_()
    whole.requires_grad_()
    for out in (second(first(whole)), compiled(own)):
        out.square().sum().backward()
    torch.testing.assert_close(own.grad, shard(whole.grad, dist.get_rank(), 2, dim=1))
    # A region that is an attention and nothing else has gradients as well.
    bare = torch.compiler.nested_compile_region(attend_causal)
    attend = torch.compile(lambda *qkv: bare(*qkv) + bare(*qkv), **how)
    qkv = [torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3)]
    attend(*qkv).sum().backward()
    assert all(one.grad is not None for one in qkv)


class CountingPass(CustomGraphPass):
    """A pass of a user's, where ours is about to go."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.num_calls += 1
        assert not any(str(node.target) == "control_deps" for node in graph.nodes)

    def uuid(self) -> object:
        return "counting"


@pytest.mark.parametrize("where", ["config", "options"])
def test_hooks_of_the_user_still_run(where: str) -> None:
    hook = CountingPass()
    setting = {"post_grad_custom_post_pass": hook}
    with fake_rank(1, 2):
        mesh = world_mesh()
        tensors = make_qkv(8, head_dim=16)[:3]
        if where == "options":
            code = generate_code(attend_causal, *tensors, options={"mesh": mesh, **setting})
        else:
            with torch._inductor.config.patch(setting):
                code = generate_code(attend_causal, *tensors, options={"mesh": mesh})
                assert torch._inductor.config.post_grad_custom_post_pass is hook
    assert hook.num_calls == 1
    assert "all_to_all_single" in code[0]
    assert torch._inductor.config.post_grad_custom_post_pass is None


class CountingPartitioner(CustomPartitionerFn):
    """A partitioner of a user's."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return min_cut_rematerialization_partition(*args, **kwargs)

    def uuid(self) -> object:
        return "counting"


def test_the_partitioner_of_the_user_still_runs() -> None:
    """And what the forward writes to is saved as it was."""

    def scale(x: Tensor, scales: Tensor) -> Tensor:
        out = x * scales.clone()
        scales.mul_(2)
        return out

    partitioner, scales = CountingPartitioner(), torch.tensor([2.0, 3.0])
    options = {"custom_partitioner_fn": partitioner, "force_disable_caches": True}
    compiled = torch.compile(scale, backend="cp_inductor", fullgraph=True, options=options)
    x = torch.ones(2, requires_grad=True)
    compiled(x, scales).sum().backward()
    assert partitioner.num_calls == 1
    assert x.grad is not None and x.grad.tolist() == [2, 3] and scales.tolist() == [4, 6]
    keys = [Partition(own).uuid() for own in (None, partitioner)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("backend", ["cp_aot_eager", "cp_inductor"])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("strategyy", "use strategy, or leave it out"),
        ("check_agreement", "set cp_inductor.config.check_agreement, or CP_INDUCTOR_CHECK"),
    ],
)
def test_options_that_nobody_reads_are_refused(backend: str, name: str, remedy: str) -> None:
    with pytest.raises(cp_inductor.InvalidArgument, match=remedy):
        torch.compile(torch.sin, backend=backend, options={name: "heads"})(torch.ones(3))


LOGGED = """
import os
os.dup2(1, 2)  # what is logged is printed
import torch
from tests.support.graphs import attend_causal
from tests.support.ranks import fake_mesh
from tests.support.reference import make_qkv
with fake_mesh(0, 2) as mesh:
    options = {"mesh": mesh, "strategy": "ring"}
    compiled = torch.compile(attend_causal, backend="cp_aot_eager", options=options)
    compiled(*make_qkv(8)[:3])
"""


@pytest.mark.slow
def test_logs_and_trace_artifacts(tmp_path: Path) -> None:
    said = run_python("-c", LOGGED, TORCH_LOGS="+cp_inductor", TORCH_TRACE=str(tmp_path))
    for words in (
        "sdpa_0 (graphs.py:",
        "causal on axis 'cp', rank 0 of 2, ring in 1 stages, flash_cpu",
        "rank 0: tile q[0:1] x kv[0:1] h[0:4] causal",
        "fetch: kv[0:1] h[0:4] 0 -> 1",
        "cp_inductor_dynamo_graph_before",
        "cp_inductor_inference_graph_after",
        "torch.ops._c10d_functional.all_to_all_single.default",
    ):
        assert words in said
    trace = "".join(path.read_text() for path in tmp_path.iterdir())
    for kind in ("dynamo", "inference"):
        for moment in ("before", "after"):
            assert f'"name": "cp_inductor_{kind}_graph_{moment}"' in trace


def test_a_forgotten_mesh_is_warned_of_once() -> None:
    """Whoever passes shards and forgets to say so would attend within each."""
    _warn_of_no_shards.cache_clear()
    query, key, value, _ = make_qkv(8)

    def compiled(**more: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True, **more)

    with fake_rank(1, 2):
        compiled()(query, key, value)  # the first rank says it for all
    with fake_rank(0, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled(options={"mesh": None})(query, key, value)
            compiled(options={"mesh": world_mesh()})(query, key, value)
            sharded = [distribute_tensor(t, world_mesh(), [Shard(2)]) for t in (query, key, value)]
            compiled()(*sharded)
        with pytest.warns(cp_inductor.SequenceWarning, match=r'options=\{"mesh": mesh\}'):
            compiled()(query, key, value)
        compiled()(query, key, value)
        _warn_of_no_shards.cache_clear()  # of DTensors that every rank has whole
        whole = [distribute_tensor(t, world_mesh(), [Replicate()]) for t in (query, key, value)]
        with pytest.warns(cp_inductor.SequenceWarning, match="no attention of this graph is over"):
            compiled()(*whole)
    with fake_rank(0, 1):
        _warn_of_no_shards.cache_clear()
        compiled()(query, key, value)


# --- Ways of compiling that lose exchanges are refused ------------------------------------------


def heads(mesh: DeviceMesh) -> list[DTensor]:
    return [DTensor.from_local(torch.randn(1, 2, 6, 8), mesh, [Shard(2)]) for _ in range(3)]


def test_compile_on_one_rank_is_refused() -> None:
    model = torch.compile(attend_causal, backend="cp_aot_eager", fullgraph=True)
    with fake_mesh(0, 2) as mesh, dist.config.patch(compile_on_one_rank=True):
        tensors = heads(mesh)
        with pytest.raises(cp_inductor.CPError, match="unset TORCH_COMPILE_ON_ONE_RANK"):
            model(*tensors)


@pytest.mark.parametrize("backend", ["cp_aot_eager", "cp_inductor"])
def test_aot_compile_is_refused(backend: str) -> None:
    def compiled(model: Any, **kwargs: Any) -> Any:
        return torch.compile(model, backend=backend, fullgraph=True, **kwargs)

    refused = partial(pytest.raises, cp_inductor.CPError, match="aot_compile")
    with fake_mesh(0, 2) as mesh:
        tensors = heads(mesh)
        with refused():
            compiled(attend_causal).aot_compile((tuple(tensors), {}))
        shards = tuple(tensor.to_local() for tensor in tensors)
        with refused():
            compiled(attend_causal, options={"mesh": mesh}).aot_compile((shards, {}))
        model = cp_inductor.parallelize(AttentionBlock(), mesh, seq_dims={"x": 1})
        with refused():
            compiled(model).forward.aot_compile(((torch.randn(1, 6, 32),), {}))


# --- What is said of a long compile, and to whom.


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)


def said_of(num_attentions: int = 2, screen: io.StringIO | None = None) -> str:
    screen = screen or Terminal()
    with redirect_stderr(screen), progress.compile_announced(num_attentions):
        time.sleep(0.2)
    return screen.getvalue()


def test_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_of(0) == ""  # without attention
    assert said_of(screen=io.StringIO()) == ""  # into a file
    with redirect_stderr(None), progress.compile_announced(2):  # as under pythonw
        pass
    monkeypatch.setattr(progress, "PATIENCE_S", 0.3)
    assert said_of() == ""  # fast enough
    screen = Terminal()
    with (
        redirect_stderr(screen),
        pytest.raises(ValueError, match="refused"),
        progress.compile_announced(2),
    ):
        raise ValueError("refused")
    time.sleep(0.5)
    assert screen.getvalue() == ""


def test_of_a_compile() -> None:
    screen = Terminal()
    with redirect_stderr(screen), fake_mesh(0, 2) as mesh:
        generate_code(attend_causal, *make_qkv(8)[:3], options={"mesh": mesh})
    assert screen.getvalue().count("cp_inductor: compiling a graph with 1 attention.") == 1
