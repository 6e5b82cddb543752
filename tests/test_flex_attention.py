"""flex_attention over a sharded sequence: numbers, what is read of its functions, and refusals.

Held against flex_attention of torch in float64 on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention.flex_attention import (
    AuxRequest,
    and_masks,
    create_block_mask,
    flex_attention,
)

from cp_inductor import flex_gradients_on_cpu
from cp_inductor.dtensor.shard import stored_positions
from tests.ranks import run_ranks
from tests.reference import assert_close, make_qkv

AOT = "cp_aot_eager"
LENGTH, BATCH, HEADS = 37, 2, 4
KEYS = 29

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="read in torch 2.13"),
]

DOCUMENTS = torch.tensor([[0] * 8 + [1] * 29, [0] * 3 + [1] * 9 + [2] * 25])
PREFIXES = torch.tensor([5, 19])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TEMPERATURES = torch.linspace(0.5, 1.5, LENGTH, dtype=torch.float64)
RELATIVE = torch.randn(
    HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64
)
PAIRS = torch.randn(
    BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64
)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (q - k < 9)


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return DOCUMENTS[b, q] == DOCUMENTS[b, k]


def prefix(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k < PREFIXES[b]) | (k <= q)


def late(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The first five queries see nothing."""
    return k <= q - 5


def of_heads(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The heads see windows of different lengths."""
    return (q >= k) & (q - k < 4 * (h + 1))


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + (k - q) * torch.exp2(-2.0 * (h + 1))


def alibi_of_table(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + SLOPES[h] * (k - q)


def relative(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s + RELATIVE[h, q - k + LENGTH]


def pairs(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """As Hugging Face adds a mask tensor."""
    return s + PAIRS[b][0][q][k]


def softcap(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return 2.0 * torch.tanh(s / 2.0)


def softcap_and_bias(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return softcap(s, b, h, q, k) + PAIRS[b, 0, q, k]


def temperature(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s * TEMPERATURES[q]


def masking(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q >= k, s, -float("inf"))


def halved_far_away(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q - k > 7, 0.5 * s, s)


@dataclass(frozen=True)
class Case:
    """A call of flex_attention.

    Attributes:
        mask: a mask_mod; None for no BlockMask.
        block_mask: (B, H) of the BlockMask; None broadcasts.
        returns: what becomes of output and lse.
    """

    name: str
    mask: Callable[..., Tensor] | None = None
    score: Callable[..., Tensor] | None = None
    dtype: torch.dtype = torch.float64
    num_kv_heads: int = HEADS
    kv_len: int = LENGTH
    scale: float | None = None
    block_mask: tuple[int | None, int | None] = (None, None)
    returns: Callable[[Tensor, Tensor], Tensor] | None = None


def with_sink(out: Tensor, lse: Tensor) -> Tensor:
    """As models with attention sinks do it."""
    return out * torch.sigmoid(lse - 0.5).unsqueeze(-1).to(out.dtype)


def lse_alone(out: Tensor, lse: Tensor) -> Tensor:
    return lse.unsqueeze(-1).expand(out.shape).to(out.dtype)


CASES = (
    Case("no mask"),
    Case("causal, grouped", causal, num_kv_heads=2, scale=0.3),
    Case("window", window),
    Case("documents", and_masks(causal, documents), block_mask=(BATCH, None)),
    Case("prefix", prefix, block_mask=(BATCH, None)),
    Case("windows of heads", of_heads, block_mask=(None, HEADS)),
    Case("rows that see nothing", late),
    Case("keys of another length", window, kv_len=KEYS),
    Case("ALiBi", causal, alibi),
    Case("ALiBi of a table, bfloat16", causal, alibi_of_table, dtype=torch.bfloat16),
    Case("relative", None, relative),
    Case("pairs", causal, pairs),
    Case("softcap", window, softcap),
    Case("softcap, mqa, bfloat16", causal, softcap, torch.bfloat16, num_kv_heads=1),
    Case("softcap and bias", None, softcap_and_bias),
    Case("temperature", causal, temperature),
    Case("a score that masks", None, masking),
    Case("scores that are halved", causal, halved_far_away),
    Case("a sink", window, returns=with_sink),
    Case("a sink, bfloat16", window, dtype=torch.bfloat16, returns=with_sink),
    Case("a sink, softcap", causal, softcap, returns=with_sink),
    Case("lse alone", causal, returns=lse_alone),
)


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def function_of(case: Case) -> Callable[..., Tensor]:
    mask = None
    if case.mask is not None:
        mask = create_block_mask(case.mask, *case.block_mask, LENGTH, case.kv_len, device="cpu")

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        aux = None if case.returns is None else AuxRequest(lse=True)
        found: Any = flex_attention(
            query,
            key,
            value,
            score_mod=case.score,
            block_mask=mask,
            scale=case.scale,
            enable_gqa=case.num_kv_heads != HEADS,
            return_aux=aux,
        )
        return found if case.returns is None else case.returns(found[0], found[1].lse)

    return run


def expect(case: Case) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return query, key, value and a gradient; and what comes of them in float64."""
    torch._dynamo.reset()
    whole = make_qkv(
        LENGTH,
        kv_len=case.kv_len,
        dtype=case.dtype,
        num_heads=HEADS,
        num_kv_heads=case.num_kv_heads,
        batch=BATCH,
        head_dim=16,
    )
    *leaves, grad_out = (tensor.double() for tensor in whole)
    for leaf in leaves:
        leaf.requires_grad_()
    out = function_of(case)(*leaves)
    return whole, [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def run_case(case: Case, backend: str, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    whole, expected = expect(case)
    torch._dynamo.reset()
    counters.clear()
    order = torch.arange(LENGTH)
    if options.get("layout") == "zigzag":
        order = stored_positions(LENGTH, mesh.size())
    *leaves, grad_out = (
        distribute_tensor(tensor[:, :, order[: tensor.shape[2]]], mesh, [Shard(2)])
        for tensor in whole
    )
    for leaf in leaves:
        leaf.requires_grad_()
    with implicit_replication():
        compiled = torch.compile(
            function_of(case), backend=backend, fullgraph=True, dynamic=False, options=options
        )
        out = compiled(*leaves)
        grads = torch.autograd.grad(out, leaves, grad_out, materialize_grads=True)
    for what, actual, reference in zip(
        ("out", "dq", "dk", "dv"), (out.detach(), *grads), expected, strict=True
    ):
        reference = reference[:, :, order[: reference.shape[2]]]
        assert_close(actual.full_tensor(), reference, case.dtype, what)
    assert counters["cp_inductor"]["sites_rewritten"] == 1


def run_cases(backend: str, names: tuple[str, ...] = (), **options: Any) -> None:
    mesh, failures = world_mesh(), []
    for case in CASES:
        if not names or case.name in names:
            try:
                with flex_gradients_on_cpu():
                    run_case(case, backend, mesh, options)
            except Exception as error:
                failures.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_numerics(world_size: int) -> None:
    run_ranks(world_size, run_cases, AOT)


def run_zigzag() -> None:
    """Other rules than causal and full need contiguous shards, of whatever attention."""
    run_cases(AOT, ("no mask", "causal, grouped", "lse alone"), layout="zigzag")


@pytest.mark.slow
def test_numerics_of_zigzag() -> None:
    run_ranks(2, run_zigzag)
