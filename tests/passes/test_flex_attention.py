"""flex_attention over a sharded sequence: numbers, what is read of its functions, and refusals.

Held against flex_attention of torch in float64 on one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import UnsupportedAttention, flex_gradients_on_cpu
from cp_inductor.passes.capture_attention import list_attentions
from cp_inductor.torch_private.modes import name_of_function
from tests.support.graphs import captured_graph, rules_of
from tests.support.ranks import fake_mesh, on_ranks, world_mesh
from tests.support.reference import (
    assert_all_close,
    assert_close,
    assert_shards_close,
    make_qkv,
    on_mesh,
    with_grads,
)

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
LEARNED = torch.zeros(LENGTH, requires_grad=True)
PAIRS = torch.randn(
    BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64
)


masks = SimpleNamespace(
    causal=lambda b, h, q, k: q >= k,
    window=lambda b, h, q, k: (q >= k) & (q - k < 9),
    documents=lambda b, h, q, k: DOCUMENTS[b, q] == DOCUMENTS[b, k],
    prefix=lambda b, h, q, k: (k < PREFIXES[b]) | (k <= q),
    late=lambda b, h, q, k: k <= q - 5,  # the first five queries see nothing
    of_heads=lambda b, h, q, k: (q >= k) & (q - k < 4 * (h + 1)),
)
scores = SimpleNamespace(
    alibi=lambda s, b, h, q, k: s + (k - q) * torch.exp2(-2.0 * (h + 1)),
    alibi_of_table=lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    relative=lambda s, b, h, q, k: s + RELATIVE[h, q - k + LENGTH],
    pairs=lambda s, b, h, q, k: s + PAIRS[b][0][q][k],  # as Hugging Face adds a mask tensor
    softcap=lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0),
    softcap_and_bias=lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0) + PAIRS[b, 0, q, k],
    temperature=lambda s, b, h, q, k: s * TEMPERATURES[q],
    masking=lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    halved_far_away=lambda s, b, h, q, k: torch.where(q - k > 7, 0.5 * s, s),
)


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
    Case("causal, grouped", masks.causal, num_kv_heads=2, scale=0.3),
    Case("documents", and_masks(masks.causal, masks.documents), block_mask=(BATCH, None)),
    Case("prefix", masks.prefix, block_mask=(BATCH, None)),
    Case("windows of heads", masks.of_heads, block_mask=(None, HEADS)),
    Case("rows that see nothing", masks.late),
    Case("keys of another length", masks.window, kv_len=KEYS),
    Case("ALiBi", masks.causal, scores.alibi),
    Case("ALiBi of a table, bfloat16", masks.causal, scores.alibi_of_table, dtype=torch.bfloat16),
    Case("relative", None, scores.relative),
    Case("pairs", masks.causal, scores.pairs),
    Case("softcap, mqa, bfloat16", masks.causal, scores.softcap, torch.bfloat16, num_kv_heads=1),
    Case("softcap and bias", None, scores.softcap_and_bias),
    Case("temperature", masks.causal, scores.temperature),
    Case("a score that masks", None, scores.masking),
    Case("scores that are halved", masks.causal, scores.halved_far_away),
    Case("a sink", masks.window, returns=with_sink),
    Case("a sink, softcap", masks.causal, scores.softcap, returns=with_sink),
    Case("lse alone", masks.causal, returns=lse_alone),
)


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


def expect(case: Case) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
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
    return whole, with_grads(function_of(case), (tensor.double() for tensor in whole))


def run_case(case: Case, backend: str, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    whole, expected = expect(case)
    torch._dynamo.reset()
    counters.clear()
    with implicit_replication():
        compiled = torch.compile(
            function_of(case), backend=backend, fullgraph=True, dynamic=False, options=options
        )
        found = with_grads(compiled, on_mesh(whole, mesh, Shard(2)))
    assert_all_close(found, expected, case.dtype)
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


# One of each kind: a mask of heads and one of batch entries, a bias, a changed score, lse.
SOME = ("windows of heads", "documents", "relative", "softcap, mqa, bfloat16", "a sink")


@pytest.mark.long
@on_ranks(3)
def test_numerics() -> None:
    run_cases(AOT)
    run_cases(AOT, SOME, plan="static")


@pytest.mark.long
@on_ranks(2)
def test_numerics_through_inductor() -> None:
    run_cases("cp_inductor", ("softcap and bias", "a sink"))


# --- Models: shared masks, masks made inside, checkpoints, autocast, plain shards ---------------


class Block(nn.Module):
    """Two layers that share a BlockMask, which is made inside."""

    def __init__(self, has_checkpoint: bool = False) -> None:
        super().__init__()
        self.has_checkpoint = has_checkpoint

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend twice."""
        mask = and_masks(masks.causal, masks.documents)
        made = create_block_mask(mask, BATCH, None, query.shape[2], key.shape[2], device="cpu")
        for _ in range(2):
            args = (query, key, value, made)
            if self.has_checkpoint:
                query = query + checkpoint(self.attend, *args, use_reentrant=False)
            else:
                query = query + self.attend(*args)
        return query

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        """Attend once."""
        out, aux = flex_attention(
            query, key, value, scores.alibi_of_table, mask, return_aux=AuxRequest(lse=True)
        )
        return with_sink(out, aux.lse)


@pytest.mark.long
@pytest.mark.parametrize("how", ["DTensors", "region"])
@on_ranks(2)
def test_layers_share_a_mask_that_is_made_inside(how: str) -> None:
    mesh = world_mesh()
    whole = make_qkv(36, dtype=torch.float64, num_heads=HEADS, batch=BATCH, head_dim=16)
    with flex_gradients_on_cpu():
        expected = with_grads(Block(), whole)
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(Block(has_checkpoint=True), backend=AOT, fullgraph=True)
        if how == "DTensors":
            with implicit_replication():
                actual = with_grads(compiled, on_mesh(whole, mesh, Shard(2)))
        else:
            *leaves, grad_out = local = [tensor.detach().clone() for tensor in whole]
            dims = [2] * len(local)
            with cp_inductor.context_parallel(mesh, buffers=local, buffer_seq_dims=dims):
                out = compiled(*(leaf.requires_grad_() for leaf in leaves))
                out.backward(grad_out)
                actual = (out.detach(), *(leaf.grad for leaf in leaves))
    assert_shards_close(actual, expected, torch.float64, how)
    assert counters["cp_inductor"]["sites_rewritten"] == 2


@on_ranks(2)
def test_autocast() -> None:
    mesh = world_mesh()
    case = Case("autocast", masks.causal, scores.softcap_and_bias, torch.bfloat16)
    with flex_gradients_on_cpu():
        whole, expected = expect(case)
    torch._dynamo.reset()
    leaves = [distribute_tensor(t.detach().float(), mesh, [Shard(2)]) for t in whole[:3]]
    with implicit_replication(), torch.autocast("cpu", torch.bfloat16):
        out = torch.compile(function_of(case), backend=AOT, fullgraph=True)(*leaves)
    assert_close(out.full_tensor(), expected[0], torch.bfloat16, "out")


# --- Graphs -----------------------------------------------------------------------------------


def leaves_of_rank(mesh: DeviceMesh, length: int = LENGTH) -> list[Tensor]:
    whole = make_qkv(length, num_heads=HEADS, batch=BATCH, head_dim=16)[:3]
    return [distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in whole]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A rank that sends and receives: a fake group does not receive where nothing is sent."""
    with fake_mesh(1, 3) as mesh:
        yield mesh


def test_a_mask_that_is_made_inside_is_not_computed(mesh: DeviceMesh) -> None:
    graph = captured_graph(Block(), *leaves_of_rank(mesh, 36))
    assert rules_of(graph) == ["(k-q<=0)&Eq(t0(b,k)-t0(b,q),0);(k-q)*x1(h);float32"] * 2
    names = [name_of_function(node.target) for node in graph.graph.nodes]
    assert not [name for name in names if "arange" in name or "batch_dim" in name], names
    assert not graph.graph.find_nodes(op="get_attr")


def test_what_is_read(mesh: DeviceMesh) -> None:
    rules = {
        "full": (None, None),
        "causal": (None, scores.masking),
        "(k-q<=0)&(-k+q-8<=0);2*Tanh(0.5*s)": (masks.window, scores.softcap),
        "True;x0(h,-k+q+37);float32": (None, scores.relative),
        "k-q<=0;s*x0(q)": (masks.causal, scores.temperature),
    }
    functions = [function_of(Case("", *mods)) for mods in rules.values()]

    def model(*heads: Tensor) -> list[Tensor]:
        return [function(*heads) for function in functions]

    assert rules_of(captured_graph(model, *leaves_of_rank(mesh))) == list(rules)


# --- Refusals -----------------------------------------------------------------------------------


def without_gradient(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    with torch.no_grad():
        return 2 * s


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (lambda s, b, h, q, k: torch.clamp(s, max=3.0), "has corners"),
        (lambda s, b, h, q, k: s * torch.special.bessel_j0(q.float()), r"calls aten\.\S*bessel_j0"),
        (lambda s, b, h, q, k: torch.where(s > 0, s, 0.1 * s), r"calls aten\.gt"),
        (lambda s, b, h, q, k: 2 * s.detach(), "keeps the gradient from the score"),
        (without_gradient, "keeps the gradient from the score"),
        (lambda s, b, h, q, k: torch.zeros_like(s) - 0.1 * (q - k), "does not depend on the score"),
        (
            lambda s, b, h, q, k: s * LEARNED[q],
            r"becomes s\*x0\(q\), which reads \w*learned_; detach it",
        ),
        (
            lambda s, b, h, q, k: 2.0 * torch.tanh(s / 2.0) + LEARNED[q],
            r"becomes .*Tanh\(0.5\*s\).*, which reads \w*learned_; detach it",
        ),
    ],
)
def test_refused_functions(mesh: DeviceMesh, score: Callable[..., Tensor], message: str) -> None:
    with flex_gradients_on_cpu(), pytest.raises(UnsupportedAttention, match=message) as caught:
        captured_graph(function_of(Case("", masks.causal, score)), *leaves_of_rank(mesh))
    assert "flex_0 (test_flex_attention.py:" in str(caught.value)


def test_kernel_options(mesh: DeviceMesh) -> None:
    """Those that say how to compute are arguments of the op; the others change nothing."""
    told: list[tuple[Any, ...]] = []
    for options in (
        None,
        {"BACKEND": "TRITON", "PRESCALE_QK": False, "BLOCKS_ARE_CONTIGUOUS": True},
        {"num_warps": 4, "bwd_BLOCK_M1": 64},
    ):
        torch._dynamo.reset()
        tuned = partial(flex_attention, kernel_options=options)
        (this,) = list_attentions(captured_graph(tuned, *leaves_of_rank(mesh)))
        told.append(this.attention.arguments)
    torch._dynamo.reset()
    flash = partial(flex_attention, kernel_options={"BACKEND": "FLASH"})
    with pytest.warns(UserWarning, match="flex_0 .*FLASH.* by Triton's templates"):
        (this,) = list_attentions(captured_graph(flash, *leaves_of_rank(mesh)))
    assert told[0] == told[1] == this.attention.arguments
    assert told[2] == (*told[0], "{'bwd_BLOCK_M1': 64, 'num_warps': 4}")
    tuned = partial(flex_attention, kernel_options={"BLOCK_M": 256})
    with pytest.raises(UnsupportedAttention, match=r"BLOCK_M to divide 128.*with BLOCK_M=256"):
        captured_graph(tuned, *leaves_of_rank(mesh))


def test_refused_results(mesh: DeviceMesh) -> None:
    """Torch itself does not give them on the CPU, but its op has them."""
    mask = create_block_mask(masks.causal, None, None, LENGTH, LENGTH, device="cpu")

    def model(query: Tensor, key: Tensor, value: Tensor) -> Any:
        op = torch.ops.higher_order.flex_attention
        return op(query, key, value, scores.softcap, mask.as_tuple(), 0.25, {})[2]

    with pytest.raises(UnsupportedAttention, match="max_scores=True; ask for AuxRequest"):
        captured_graph(model, *leaves_of_rank(mesh))


def test_a_block_mask_of_blocks_alone(mesh: DeviceMesh) -> None:
    """Its blocks are tensors, of which a plan knows nothing: all pairs would be computed."""
    number, indices = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1).int()
    mask = BlockMask.from_kv_blocks(number, indices, seq_lengths=(LENGTH, LENGTH))

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, block_mask=mask)

    with pytest.raises(UnsupportedAttention, match="got one without a mask_mod"):
        captured_graph(model, *leaves_of_rank(mesh))


def test_documents_of_a_shard_are_not_those_of_the_sequence(mesh: DeviceMesh) -> None:
    def model(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
        length = query.shape[2]
        mask = create_block_mask(
            lambda b, h, q, k: ids[b, q] == ids[b, k], BATCH, None, length, length, device="cpu"
        )
        return flex_attention(query, key, value, block_mask=mask)

    shards = [tensor.to_local() for tensor in leaves_of_rank(mesh, 36)]
    compiled = torch.compile(model, backend=AOT, fullgraph=True, options={"mesh": mesh})
    with pytest.raises(UnsupportedAttention, match="capture the tensors of the whole sequence"):
        compiled(*shards, DOCUMENTS[:, 12:24])


def test_gradients_on_the_cpu_are_allowed_within_the_context_alone() -> None:
    query = torch.rand(1, 2, 8, 16, requires_grad=True)
    before = torch.nn.attention.flex_attention._validate_device
    with flex_gradients_on_cpu():
        assert flex_attention(query, query, query).requires_grad
    assert torch.nn.attention.flex_attention._validate_device is before
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(query, query, query)
