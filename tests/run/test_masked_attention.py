"""Masks and biases through the compiler: numbers and gradients.

All cases are long: every kind of mask is a graph of its own, on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from cp_inductor.dtensor.axis import first_batch_and_head
from tests.support.combinations import AOT, EAGER, compiled, make_mesh
from tests.support.packed import in_documents, in_window, under_alibi
from tests.support.random_attention import keep_of
from tests.support.ranks import fake_rank, on_ranks, run_ranks, world_mesh
from tests.support.reference import (
    assert_all_close,
    attend_with_grads,
    full,
    make_qkv,
    on_mesh,
    shard,
    with_grads,
)


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped)


def padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return sdpa(query, key, value, mask[:, None, None, :].bool())


def wide(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A bias in float32 at the least: of bfloat16, numbers of this size are 2 apart."""
    q, k = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    bias = (q * 7 + k * 13) % 11 * 0.3 + 300.0
    # Of a float64 query, torch would read a bias in float32 as float64.
    return sdpa(query, key, value, bias.to(torch.promote_types(query.dtype, bias.dtype)))


def blind_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The first five queries see nothing."""
    q, k = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None]
    return sdpa(query, key, value, k <= q - 5)


SEED = torch.Generator().manual_seed(1)
LENGTH, BATCH, HEADS = 21, 2, 4
DOCUMENTS = torch.tensor([[0] * 8 + [1] * 13, [0] * 3 + [1] * 9 + [2] * 9])
PADDING = (torch.tensor([21, 15])[:, None] > torch.arange(LENGTH)).long()
PAIRS = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7
LONGER = (torch.rand(1, 1, LENGTH + 9, LENGTH + 9, generator=SEED) < 0.6).tril()
# Numbers of documents at the ends of dtypes; the last ones are equal in int8, and not before.
ORDER = torch.tensor([[0] * 6 + [1] * 8 + [2] * 7, [1] * 4 + [0] * 9 + [1] * 8])
IDS = (
    torch.tensor([-128, 127, -1], dtype=torch.int8)[ORDER],
    torch.tensor([255, 0, 128], dtype=torch.uint8)[ORDER],
    torch.tensor([-32768, 32767, 255], dtype=torch.int16)[ORDER],
    torch.tensor([3, 259, 128])[ORDER],
)


class Longer(nn.Module):
    """As GPT-2 does it: a mask of the longest sequence, and of that what is needed.

    And masks that are not what they seem where integers do not wrap.
    """

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", LONGER)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, longer: Tensor, *ids: Tensor
    ) -> Tensor:
        """Return the sum of an attention under each mask, each with a weight of its own."""
        n, place = query.shape[2], torch.arange(query.shape[2])
        masks = [self.bias[:, :, :n, :n], longer[:, :, :n, :n]]
        masks.append(longer[:, :, 3 : n + 3, 5 : n + 5] | (place == place[:, None]))
        int8, uint8, int16, int64 = ids
        for one in (int8, uint8, int16, int64.to(torch.int8), uint8 - 1):
            masks.append((one[:, :, None] == one[:, None])[:, None] & (place <= place[:, None]))
        outs = [w * sdpa(query, key, value, mask) for w, mask in enumerate(masks, start=1)]
        return torch.stack(outs).sum(0)


@dataclass(frozen=True)
class Case:
    """A function of query, key, value and inputs, which one process computes in float64.

    Attributes:
        inputs: whole, of 21 tokens and 2 batch entries.
        placements: of the inputs, on an axis that shards the sequence.
        options: of the compile.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = ()
    placements: tuple[Placement, ...] = ()
    dtype: torch.dtype = torch.float64
    shape: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    num_attentions: int = 1

    def tensors(self) -> tuple[Tensor, ...]:
        """Return query, key, value and the gradient of the result."""
        sizes = {"num_heads": HEADS, "batch": BATCH, **self.shape}
        return make_qkv(LENGTH, dtype=self.dtype, **sizes)

    def expected(self) -> tuple[Tensor, ...]:
        """Return result and gradients."""
        wide = (tensor.double() for tensor in self.tensors())
        return with_grads(lambda *qkv: self.function(*qkv, *self.inputs), wide)


# A plan for all batches. One that is made at run time costs three times as much to trace.
STATIC = {"plan": "static"}
windowed = partial(in_window, window=9)
SHARD, WHOLE = Shard(1), Replicate()

CASES = (
    Case("window, bfloat16, mqa", windowed, dtype=torch.bfloat16, shape={"num_kv_heads": 1}),
    Case("documents", in_documents, (DOCUMENTS,), (SHARD,)),
    Case("documents, whole", in_documents, (DOCUMENTS,), (WHOLE,), torch.float32, {}, STATIC),
    Case("padding", padded, (PADDING,), (SHARD,), shape={"num_kv_heads": 2}, options=STATIC),
    Case("ALiBi", under_alibi),
    Case("a bias in float32, bfloat16", wide, dtype=torch.bfloat16),
    Case("a mask", sdpa, (PAIRS,), (WHOLE,)),
    Case("rows of a mask", sdpa, (PAIRS,), (Shard(2),)),
    Case("rows that see nothing", blind_rows),
    # gloo moves no int16.
    Case(
        *(
            "longer masks",
            Longer(),
            (LONGER.roll(5, -1), *IDS),
            (WHOLE, SHARD, SHARD, WHOLE, SHARD),
        ),
        num_attentions=8,
    ),
)


def run_case(case: Case, backend: str, mesh: DeviceMesh, batch: tuple[Placement, ...] = ()) -> None:
    """Hold a case over a mesh against one process.

    Args:
        batch: placements on an axis before that of the sequence: of queries, and of the inputs,
            which are whole on the axis of the sequence then.
    """
    torch._dynamo.reset()
    counters.clear()
    of_inputs = [[place] for place in case.placements]
    if batch:
        of_inputs = [[batch[1], WHOLE]] * len(case.inputs)
    inputs = [
        distribute_tensor(tensor, mesh, places, src_data_rank=None)
        for tensor, places in zip(case.inputs, of_inputs, strict=True)
    ]
    with implicit_replication():
        compiled = torch.compile(
            case.function, backend=backend, fullgraph=True, dynamic=False, options=case.options
        )
        sharded = on_mesh(case.tensors(), mesh, *batch[:1], Shard(2))
        found = with_grads(lambda *qkv: compiled(*qkv, *inputs), sharded)
    assert_all_close(found, case.expected(), case.dtype)
    assert counters["cp_inductor"]["sites_rewritten"] == case.num_attentions


def run_cases(backend: str, names: tuple[str, ...] = ()) -> None:
    mesh, failures = world_mesh(), []
    for case in CASES:
        if not names or case.name in names:
            try:
                run_case(case, backend, mesh)
            except AssertionError as error:
                failures.append(f"{case.name}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.long
@on_ranks(3)
def test_numerics() -> None:
    run_cases("cp_aot_eager")


@pytest.mark.long
@on_ranks(2)
def test_inductor_numerics() -> None:
    run_cases("cp_inductor", ("documents", "rows that see nothing"))


# Where the inputs of cases are on the axis of the batch.
OF_BATCHES = {"documents": Shard(0), "padding": WHOLE, "a mask": Shard(0)}


@pytest.mark.long
@on_ranks(4)
def test_batch_on_another_axis() -> None:
    """Batch entries on one axis of the mesh, the sequence on another; masks follow."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    for case in CASES:
        if case.name in OF_BATCHES:
            run_case(case, "cp_aot_eager", mesh, (Shard(0), OF_BATCHES[case.name]))


# --- Gradients of biases ----------------------------------------------------------------------

BIASES = (
    ((1, 4, 21, 21), Replicate()),
    ((1, 4, 21, 21), Shard(2)),
    ((2, 1, 21, 21), Shard(2)),
    ((21, 21), Replicate()),
    ((1, 4, 1, 21), Replicate()),
)


def with_bias(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    shape = (*query.shape[:2], query.shape[2], key.shape[2])
    is_future = torch.arange(key.shape[2]) > torch.arange(query.shape[2])[:, None]
    return sdpa(query, key, value, bias.masked_fill(is_future, float("-inf")).expand(shape))


@pytest.mark.long
@on_ranks(3)
def test_bias_gradients() -> None:
    mesh = world_mesh()
    for shape, placement in BIASES:
        torch._dynamo.reset()
        *qkv, grad_out = make_qkv(LENGTH, dtype=torch.float64, num_kv_heads=2)
        generator = torch.Generator().manual_seed(3)
        bias = torch.randn(shape, generator=generator, dtype=torch.float64)
        expected = with_grads(with_bias, (*qkv, bias, grad_out))
        *qkv, grad_out = on_mesh((*qkv, grad_out), mesh, Shard(2))
        sharded = (*qkv, distribute_tensor(bias, mesh, [placement]), grad_out)
        with implicit_replication():
            compiled = torch.compile(with_bias, backend="cp_aot_eager", fullgraph=True)
            found = with_grads(compiled, sharded)
        assert_all_close(found, expected, torch.float64, str(shape))


# --- Which probabilities are dropped depends on where they are in the whole attention alone.

DROPOUT_P = 0.3
DROPPED_LENGTH = 29


def drop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=DROPOUT_P, is_causal=True)


def check_against_one_process(tensors: Sequence[Tensor], whole: tuple[Tensor, ...]) -> None:
    """Hold out, dq, dk and dv against what one process drops after the same `manual_seed`."""
    torch.manual_seed(3)
    batch, num_heads, length, _ = whole[0].shape
    seed = int(torch.randint(0, 1 << 31, ()))
    keep = keep_of(seed, (batch, num_heads, length, length), DROPOUT_P)
    expected = attend_with_grads(*whole, is_causal=True, keep=keep)
    assert_all_close(tensors, expected, torch.float64)


def check_other_axis(form: str, batch: int, length: int, other: Placement, in_region: bool) -> None:
    """DTensors, over an axis for the batch or the heads, and one for the sequence.

    In a region DTensors shard the heads alone, and the region says that the sequence is sharded.
    """
    mesh = make_mesh(2, 2, names=("other", "cp"))
    whole = given = make_qkv(length, dtype=torch.float64, batch=batch)
    placements = (mesh, [other, Shard(2)])
    if in_region:
        given = tuple(shard(t, mesh["cp"].get_local_rank(), 2).contiguous() for t in whole)
        placements = (mesh["other"], [other])

    def run(*qkv: Tensor) -> Tensor:
        with cp_inductor.context_parallel(mesh["cp"]), implicit_replication():
            return compiled(drop, form, fullgraph=True)(*qkv)

    torch.manual_seed(3)
    found = with_grads(run, (distribute_tensor(t, *placements) for t in given))
    tensors = [full(tensor) for tensor in found]
    if in_region:
        tensors = cp_inductor.context_parallel_unshard(mesh["cp"], tensors, [2] * 4)
    check_against_one_process(tensors, whole)


# Batch, length, placement on the other axis, and whether a region has the sequence. Dynamo learns
# placements by the rules of DTensor for what SDPA consists of. They cannot flatten what is cut
# unevenly, nor batch and heads where heads are cut.
OTHER_AXES = {
    EAGER: (
        (3, DROPPED_LENGTH, Shard(0), False),
        (2, DROPPED_LENGTH, Shard(1), False),
        (2, DROPPED_LENGTH, Replicate(), False),
        (2, 28, Shard(1), True),
    ),
    AOT: ((4, 28, Shard(0), False), (1, 28, Shard(1), False), (2, 28, Shard(1), True)),
}


@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
def test_no_two_batch_entries_or_heads_drop_the_same(form: str) -> None:
    for case in OTHER_AXES[form]:
        run_ranks(4, check_other_axis, form, *case)


def test_where_shards_begin() -> None:
    """As DTensor cuts: two axes over one dim, the last ranks with less, or with nothing."""
    for rank in range(6):
        with fake_rank(rank, 6):
            mesh = make_mesh(2, 3, names=("dp", "more"))
            for batch in (1, 4, 5, 13):
                whole = torch.arange(batch)[:, None, None, None].expand(-1, 2, 3, 1)
                for placements in (
                    (Shard(0), Shard(0)),
                    (Shard(0), Shard(1)),
                    (Shard(2), Shard(0)),
                ):
                    # Every rank has the whole: nothing need be sent.
                    tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                    first, head = first_batch_and_head(tensor)
                    local = tensor.to_local()
                    assert not local.numel() or first == local[0, 0, 0, 0]
                    assert head == (min(rank % 3, 2) if placements[1] == Shard(1) else 0)


# --- How much, and by which seed ---


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_how_much_is_dropped(dropout_p: float) -> None:
    keep = keep_of(12345, (2, 4, 96, 128), dropout_p)
    kept = (keep != 0).double()
    assert torch.allclose(keep[keep != 0], torch.tensor(1 / (1 - dropout_p), dtype=torch.float64))
    deviation = (dropout_p * (1 - dropout_p)) ** 0.5

    def check(mean: Tensor, count: float) -> None:
        assert ((mean - (1 - dropout_p)).abs() < 5.5 * deviation / count**0.5).all()

    check(kept.mean(), kept.numel())
    check(kept.mean((0, 1, 2)), 2 * 4 * 96)  # of every key
    check(kept.mean((0, 1, 3)), 2 * 4 * 128)  # of every query
    check(kept.mean((2, 3)), 96 * 128)  # of every batch entry and head
    centred = (kept - (1 - dropout_p)) / deviation
    for dim in range(4):
        correlation = (
            centred.narrow(dim, 1, kept.shape[dim] - 1)
            * centred.narrow(dim, 0, kept.shape[dim] - 1)
        ).mean()
        assert correlation.abs() < 6 / kept.numel() ** 0.5 * 2**0.5
    other = (keep_of(12346, (2, 4, 96, 128), dropout_p) != 0).double()
    assert ((other - (1 - dropout_p)) / deviation * centred).mean().abs() < 6 / kept.numel() ** 0.5


def test_all_may_be_dropped() -> None:
    assert keep_of(1, (2, 4, 5, 7), 1.0).eq(0).all()


@pytest.mark.long
@on_ranks(1)
def test_dropout_through_inductor() -> None:
    """Its numbers are other ones than those of eager code, and follow the seed as well."""
    whole = make_qkv(DROPPED_LENGTH, dtype=torch.float64)
    sharded = on_mesh(whole, world_mesh(), Shard(2))
    through_inductor = torch.compile(drop, backend="cp_inductor", fullgraph=True)
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        with implicit_replication():
            results.append(torch.stack([full(t) for t in with_grads(through_inductor, sharded)]))
    assert counters["cp_inductor"]["sites_rewritten"] == 1
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2])
