"""Cross-compilation: what goes in, comes out, is refused; and that torch stays as it was."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor import MissingTriton, UnsupportedAttention, UnsupportedPlacement, cross_compile
from tests.examples_of_models import mixed
from tests.support.graphs import AttentionBlock, attend_causal, generate_code
from tests.support.ranks import fake_mesh, fake_rank, run_ranks, world_mesh
from tests.support.reference import make_qkv
from tests.support.wrapper import START, TILE

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("ring")

EFFICIENT = "torch.ops.aten._scaled_dot_product_efficient_attention.default("


Block = partial(AttentionBlock, 64, 4, has_norm=True)


def two_layers(**kwargs: Any) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Block(), Block()).to(**{"dtype": torch.bfloat16, **kwargs})


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*(shape or (1, 128, 64)), dtype=dtype, device="meta")


def heads(dtype: torch.dtype = torch.bfloat16, head_dim: int = 32) -> Tensor:
    return torch.empty(1, 4, 64, head_dim, dtype=dtype, device="meta")


# --- What goes in -----------------------------------------------------------------------------


def test_dtensors_of_another_world() -> None:
    with fake_mesh(0, 2) as mesh:
        x = distribute_tensor(torch.zeros(1, 4, 256, 32, dtype=torch.bfloat16), mesh, [Shard(2)])
        compiled = cross_compile(attend_causal, (x, x, x), world_size=8, rank=5)
        assert dist.get_world_size() == 2
    assert "(1, 4, 32, 32)" in compiled.code["inference"]


@pytest.mark.slow
def test_two_mesh_axes() -> None:
    """Whole tensors, by placements and by options."""
    tensors = (torch.empty(4, 4, 250, 32, dtype=torch.bfloat16, device="meta"),) * 3
    where: dict[str, Any] = {"world_size": 8, "rank": 5, "placements": [Shard(0), Shard(2)]}
    code = cross_compile(attend_causal, tensors, mesh_shape=(2, 4), **where).code["inference"]
    # Rank 5 is second of its four: it sends to one, or receives. They hold 63, 63, 63 and 61.
    assert "(2, 4, 63, 32)" in code
    assert "[0, 0, 0, 0]" not in code.split(START)[1].split("\n")[0]
    where = {"world_size": 8, "mesh_dim_names": ("seq", "tp"), "options": {"mesh": "seq"}}
    by_name = cross_compile(attend_causal, tensors, mesh_shape=(4, 2), **where)
    assert "(4, 4, 250, 32)" in by_name.code["inference"]


def test_dynamic_lengths() -> None:
    query = heads()
    torch._dynamo.mark_dynamic(query, 2)
    compiled = cross_compile(attend_causal, (query, query, query), world_size=2, rank=1)
    code = compiled.code["inference"]
    assert "s" in code.split(START)[1].split("\n")[0]
    fixed = cross_compile(attend_causal, (heads(),) * 3, world_size=2, rank=1)
    assert "16384" in fixed.code["inference"].split(START)[1].split("\n")[0]


@pytest.mark.parametrize(
    ("target", "dtype", "kernel"),
    [
        ("cuda:sm_90", torch.float16, TILE),
        ("cuda:b200", torch.bfloat16, TILE),
        ("cuda:a100", torch.bfloat16, TILE.replace("cudnn", "flash")),
        ("cuda:sm_90", torch.float32, EFFICIENT),
    ],
)
def test_kernels_of_the_target(target: str, dtype: torch.dtype, kernel: str) -> None:
    code = cross_compile(attend_causal, (heads(dtype),) * 3, world_size=2, rank=1, target=target)
    assert code.code["inference"].count(kernel) == 2


def test_a_region_is_generated_once() -> None:
    region = torch.compiler.nested_compile_region(attend_causal)
    compiled = cross_compile(lambda x: region(*[region(x, x, x)] * 3), (heads(),), world_size=2)
    assert compiled.code["inference"].count(TILE) == 1


def test_odd_head_dims_are_padded() -> None:
    code = cross_compile(attend_causal, (heads(head_dim=36),) * 3, world_size=2, rank=1).code
    assert "(1, 4, 64, 40)" in code["inference"]


@pytest.mark.slow
def test_decompositions_are_the_targets() -> None:
    """A layer norm saves its statistics in float32 on a GPU, in the input's dtype on the CPU."""
    gpu = cross_compile(two_layers(), (tokens(),), world_size=2).code["forward"]
    cpu = cross_compile(two_layers(), (tokens(),), world_size=2, target="cpu").code["forward"]
    assert "(1, 128, 1), (128, 1, 1), torch.float32" in gpu
    assert "(1, 128, 1), (128, 1, 1), torch.bfloat16" in cpu


def test_attention_that_is_not_sharded_uses_the_targets_kernel() -> None:
    def model(x: Tensor, local: Tensor) -> Tensor:
        out = attend_causal(x, x, x).full_tensor()
        return out.sum() + attend_causal(local, local, local)

    local = heads().requires_grad_()
    with fake_mesh(0, 2) as mesh:
        x = distribute_tensor(torch.zeros(1, 4, 64, 32, dtype=torch.bfloat16), mesh, [Shard(2)])
        code = cross_compile(model, (x, local), world_size=2).code
    assert "flash_attention_for_cpu.default(" not in "".join(code.values())
    assert code["forward"].count(TILE) == 2


# --- Whole models -----------------------------------------------------------------------------


def test_rotary_by_slices() -> None:
    """Its backward puts slices into uniform constants, which Inductor folds by making them."""

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        turned = torch.cat((-query[..., 16:], query[..., :16]), -1)
        return attend_causal(turned, key, value)

    tensors = [heads().requires_grad_() for _ in range(3)]
    gpu = cross_compile(model, tensors, world_size=2).code
    assert TILE[:40] in gpu["backward"]
    assert "device_str='cuda'" in gpu["backward"]


# --- What comes out ---------------------------------------------------------------------------


def without_count(codes: Iterable[str]) -> list[str]:
    """Return code without its first line, in which torch counts graphs."""
    return [code[code.index("\n") :] for code in codes]


def real_and_cross(shape: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the code that this rank of a job generates, and that of cross-compiling for it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = [tensor.requires_grad_() for tensor in make_qkv(**shape)[:3]]
    cross = cross_compile(attend_causal, tensors, world_size=world_size, rank=rank, target="cpu")
    other = cross_compile(attend_causal, tensors, world_size=7, rank=rank, target="cpu")
    real = generate_code(attend_causal, *tensors, options={"mesh": world_mesh()})
    again = cross_compile(attend_causal, tensors, world_size=world_size, rank=rank, target="cpu")
    texts = [without_count(made.code.values()) for made in (again, cross, other)]
    assert texts[0] == texts[1] != texts[2]
    # The group of the job is as it was.
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size
    return real, list(cross.code.values())


@pytest.mark.long
def test_as_a_real_rank_generates_it() -> None:
    shape = {"seq_len": 40, "head_dim": 16, "num_kv_heads": 2, "dtype": torch.bfloat16}
    for real, cross in run_ranks(3, real_and_cross, shape):
        assert without_count(real) == without_count(cross)


@pytest.mark.parametrize(
    ("target", "name", "is_model"),
    [
        pytest.param("cuda:sm_80", "sm_80", False, marks=pytest.mark.long),
        ("cuda:sm_90", "sm_90", False),
        pytest.param("cuda:b200", "sm_100", False, marks=pytest.mark.long),
        pytest.param("cuda:sm_90", "sm_90", True, marks=pytest.mark.long),
    ],
)
def test_kernels_become_machine_code(target: str, name: str, is_model: bool) -> None:
    function: Any = two_layers() if is_model else attend_causal
    inputs = [tokens()] if is_model else [heads().requires_grad_() for _ in range(3)]
    compiled = cross_compile(function, inputs, world_size=4, rank=2, target=target)
    for gm in compiled.graphs.values():
        values = [node.meta.get("val") for node in gm.graph.nodes]
        # Scalars may be on the CPU, as they are where there is a GPU.
        devices = {v.device.type for v in values if isinstance(v, Tensor) and v.ndim}
        assert devices == {"cuda"}
    kernels = compiled.compile_kernels()
    assert {kernel.graph for kernel in kernels} == {"forward", "backward"}
    assert len({kernel.name for kernel in kernels}) >= (8 if is_model else 2)
    code = "".join(compiled.code.values())
    for kernel in kernels:
        assert f"{kernel.name}.run(" in code
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.architecture == name
        assert 0 < kernel.registers <= 255
        assert 0 <= kernel.shared_bytes <= 227 * 1024
        assert kernel.spill_bytes == 0


# --- What stays as it was ---------------------------------------------------------------------


@contextmanager
def nothing_changed() -> Iterator[None]:
    def state() -> dict[str, Any]:
        from triton.runtime.driver import driver

        return {
            "inductor": pickle.dumps(torch._inductor.config.get_config_copy()["fx_graph_cache"]),
            "joint": torch._inductor.config.joint_custom_pre_pass,
            "functorch": torch._functorch.config.enable_autograd_cache,
            "interfaces": dict(device_interface.get_registered_device_interfaces()),
            "properties": torch.cuda.get_device_properties,
            "count": torch.cuda.device_count(),
            "is_available": torch.cuda.is_available(),
            "version": torch.version.cuda,
            "triton": driver._active,
            "has_triton": torch.utils._triton.has_triton(),
            "group": dist.group.WORLD,
            "names": dict(dist.distributed_c10d._world.pg_names),
            "hook": sys.excepthook,
            "modes": torch._C._len_torch_dispatch_stack(),
            "functions": torch._C._len_torch_function_stack(),
            "counters": {name: dict(counter) for name, counter in counters.items()},
            "generate": torch._inductor.graph.GraphLowering.compile_to_module,
            "index": torch._subclasses.fake_tensor.FakeTensor.__getitem__,
            "contiguous": torch._subclasses.fake_tensor.FakeTensor.contiguous,
            "grad": torch.is_grad_enabled(),
            "random": torch.get_rng_state().tolist(),
        }

    before = state()
    yield
    after = state()
    assert {name: value for name, value in after.items() if before[name] != value} == {}


@pytest.mark.parametrize(("target", "has_group"), [("cpu", True), ("cuda:sm_90", False)])
def test_torch_is_left_as_it_was(target: str, has_group: bool) -> None:
    cross_compile(attend_causal, (heads(),) * 3, world_size=2)  # torch registers what it has
    with fake_rank(1, 3) if has_group else nothing_changed(), nothing_changed():
        cross_compile(attend_causal, (heads(),) * 3, world_size=4, rank=3, target=target)
        with pytest.raises(UnsupportedAttention, match="attn_mask=None"):
            cross_compile(mixed, (heads(),) * 3, world_size=2, target=target)
        with pytest.raises(RuntimeError, match="of ours"):
            cross_compile(attend_causal, _fails, world_size=2, target=target)


def _fails(mesh: Any) -> tuple[Tensor, ...]:
    raise RuntimeError("of ours")


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(Block(), Block()).bfloat16()
    model[1].out.weight = model[0].out.weight  # tied
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict().items()}
    compiled = cross_compile(torch.compile(model), (tokens(),), world_size=2)
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0].data_ptr()
        assert torch.equal(tensor, before[name][1])
    # Tied weights are one input of the graph.
    inputs = compiled.graphs["forward"].graph.find_nodes(op="placeholder")
    assert len(inputs) == len(list(model.parameters())) + 1


# --- What is refused --------------------------------------------------------------------------


def under_autocast(device: str) -> Any:
    def model(query: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return attend_causal(query, query, query)

    return cross_compile(model, (heads(torch.float32),), world_size=2)


def compiled_with(dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
    return cross_compile(attend_causal, (heads(dtype),) * 3, **{"world_size": 2, **how})


def with_a_branch() -> Any:
    def model(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (attend_causal(x, x, x),))

    return cross_compile(model, (heads(),), world_size=1)


REFUSALS = """
with_a_branch() -> UnsupportedTarget: no subgraphs but of nested_compile_region | traced again
compiled_with(target="cuda:sm_70") -> UnsupportedTarget: one of cpu, cuda:sm_80 | 'cuda:sm_70'
compiled_with(options={"max_autotune_gemm": True}) -> UnsupportedTarget: max_autotune
compiled_with(mode="max-autotune") -> UnsupportedTarget: max-autotune
compiled_with(target="cpu").compile_kernels() -> UnsupportedTarget: whose code is C
under_autocast("cpu") -> UnsupportedTarget: autocast
under_autocast("cuda") -> UnsupportedTarget: autocast
compiled_with(torch.float64) -> UnsupportedKernel: torch.float64 with head dim 32 on cuda
compiled_with(world_size=4, rank=4) -> ProcessGroupError: a rank from 0 to 3, got 4
compiled_with(world_size=4, mesh_shape=(2, 3)) -> UnsupportedPlacement: a mesh of 4 ranks
compiled_with(world_size=16, mesh_shape=(2, 2, 2, 2)) -> UnsupportedPlacement: mesh_dim_names
"""


@pytest.mark.filterwarnings("ignore:.*Disabling")
@pytest.mark.parametrize("row", REFUSALS.split("\n")[1:-1])
def test_refusals(row: str) -> None:
    call, _, said = row.partition(" -> ")
    error, _, parts = said.partition(": ")
    with pytest.raises(getattr(cp_inductor, error)) as refused:
        eval(call)
    assert [part for part in parts.split(" | ") if part not in str(refused.value)] == []


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cp_inductor.inspect.compile_for.find_spec", lambda name: None)
    with pytest.raises(MissingTriton, match=r"pip install 'cp-inductor\[triton\]'"):
        cross_compile(attend_causal, (heads(),) * 3, world_size=2)
    assert cross_compile(attend_causal, (heads(),) * 3, world_size=2, target="cpu").code


def test_dtensors_of_axes_that_are_not_there() -> None:
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        x = distribute_tensor(torch.zeros(2, 4, 64, 32), mesh, [Replicate(), Shard(2)])
        with implicit_replication(), pytest.raises(UnsupportedPlacement, match="axes"):
            cross_compile(attend_causal, (x, x, x), world_size=4)
