"""Ranks that are about to run different attentions: refused on every rank, before a number leaves.

And ranks that are not: whoever compiles late, again, in parts or not at all is let through.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

import cp_inductor
import cp_inductor.trust.log
from cp_inductor.backend import compile as backends
from cp_inductor.backend.partition import Partition
from cp_inductor.ops.attention import attention
from cp_inductor.passes import pipeline
from cp_inductor.plan import Recipe, resolve
from cp_inductor.run.attention import ANY_RANK, Attention, PerBatch
from cp_inductor.trust import agreement, claims
from tests.support.graphs import attend_causal, attend_full
from tests.support.packed import in_documents
from tests.support.ranks import on_ranks, world_mesh
from tests.support.reference import (
    assert_all_close,
    assert_close,
    attend_with_grads,
    make_qkv,
    on_mesh,
    shard,
    with_grads,
)

ODD = 1  # the rank that is unlike the others
compiled: Any = partial(torch.compile, backend="cp_aot_eager", fullgraph=True)


def impatient_mesh(timeout_s: float) -> DeviceMesh:
    """A mesh of all ranks whose group waits no longer."""
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))


def refusal_of(run: Callable[[], Any]) -> str:
    """Return what a rank is told."""
    try:
        run()
    except cp_inductor.RanksDisagree as error:
        return str(error)
    return "nothing"


def assert_told_alike(message: str, *parts: str) -> None:
    """Every rank is told the same, but for the name of the site; to be called on all."""
    told = message.partition(": ")[2]
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, told)
    assert set(messages) == {told}, messages
    for part in parts:
        assert part in told, (part, message)


# --- Each thing that may differ ---------------------------------------------------------------

WORLD = 3
RECIPE = Recipe(WORLD, 24 * WORLD, 24 * WORLD, 4, 2, 16, 4, "causal", strategy="rows", stages=2)
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "mask": ({"rule": "full"}, "mask: causal on ranks 0 and 2, full on rank 1"),
    "strategy": ({"strategy": "blocks"}, "strategy: rows on ranks 0 and 2, blocks on rank 1"),
    "stages": ({"stages": 1}, "stages: 2 on ranks 0 and 2, 1 on rank 1"),
    "kept": ({"keep": 1}, "keep: 0 on ranks 0 and 2, 1 on rank 1"),
    "heads": ({"num_heads": 2}, "num_heads: 4 on ranks 0 and 2, 2 on rank 1"),
    "length": (
        {"query_length": 75, "key_length": 75},
        "queries: 24 on each rank on ranks 0 and 2, 25 on each rank on rank 1; keys: 24 on each",
    ),
    "scale": ({"scale": 0.5}, "scale: None on ranks 0 and 2, 0.5 on rank 1"),
    "dtype": ({"dtype": torch.bfloat16}, "dtype: float32 on ranks 0 and 2, bfloat16 on rank 1"),
    "batch": ({"batch": 1}, "batch entries: 2 on ranks 0 and 2, 1 on rank 1"),
    "kernel": ({"kernel": "flash_cuda"}, "kernel: flash_cpu on ranks 0 and 2, flash_cuda on rank"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p: 0.0 on ranks 0 and 2, 0.5 on rank 1"),
    "source": ({"source": "1234"}, "source of cp_inductor: "),
    "torch": ({"torch": "1.0"}, "torch: "),
}


def call_op(mesh: DeviceMesh, head_dim: int, *, has_grad: bool = False, **given: Any) -> Tensor:
    """Call the op as one of three ranks that holds RECIPE's part, but for what is given."""
    batch, dtype = given.pop("batch", 2), given.pop("dtype", torch.float32)
    scale, kernel = given.pop("scale", None), given.pop("kernel", "flash_cpu")
    dropout_p = given.pop("dropout_p", 0.0)
    source_hash = mock.Mock(return_value=given.pop("source", claims.source_hash()))
    version = given.pop("torch", torch.__version__)
    recipe = replace(RECIPE, head_dim=head_dim, itemsize=dtype.itemsize, **given)
    recipe = resolve(recipe, site="a test")
    sizes = {"num_heads": recipe.num_heads, "num_kv_heads": 2, "head_dim": head_dim}
    tensors = make_qkv(recipe.query_length, batch=batch, dtype=dtype, **sizes)[:3]
    rank = dist.get_rank()
    local = [shard(t, rank, WORLD).contiguous().requires_grad_(has_grad) for t in tensors]
    extras = [torch.tensor(7)] if dropout_p else []
    claims.describe_attention.cache_clear()
    pretended = mock.patch.multiple(claims, source_hash=source_hash)
    with pretended, mock.patch.object(torch, "__version__", version):
        name = mesh.get_group().group_name
        how = (rank, scale, kernel, name, dropout_p, False)
        out = attention(*local, extras, recipe.format(), *how)[0]
    claims.describe_attention.cache_clear()
    return out


@on_ranks(WORLD)
def test_each_difference_is_named_on_every_rank() -> None:
    mesh = world_mesh()
    for index, (given, part) in enumerate(DIFFERENCES.values()):
        given = given if dist.get_rank() == ODD else {}
        head_dim = 8 + 4 * index  # of a kind that was not agreed on before
        message = refusal_of(partial(call_op, mesh, head_dim, has_grad=index % 2 == 0, **given))
        assert message.startswith("cp_inductor::attention: ")
        assert_told_alike(message, "expected ranks 0, 1 and 2 to run the same", part)
        # Nobody is left behind: what they agree on is computed.
        whole = make_qkv(72, num_kv_heads=2, head_dim=head_dim)
        expected = shard(attend_with_grads(*whole, is_causal=True)[0], dist.get_rank(), WORLD)
        assert_close(call_op(mesh, head_dim), expected, torch.float32)


def test_nodes_of_plans_of_batches_are_compared() -> None:
    fields = []
    for nodes in ("", "2:8"):
        this = Attention(PerBatch("causal", 2, nodes), ANY_RANK, None, "flash_cpu", "of no group")
        planned = claims.Planned(this, torch.float32, (1, *[None] * 4), "a test", (4, 2, 8))
        claim = claims.describe_attention(planned, has_grad=None)
        fields.append(set(claim.fields.items()))
    assert fields[0] ^ fields[1] == {("nodes", "none"), ("nodes", "2:8")}


# --- Lengths ----------------------------------------------------------------------------------


def attend_in(form: str, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """Return causal attention over plain shards, or over DTensors made of them."""
    if form == "region":

        def in_region(*local: Tensor) -> Tensor:
            with cp_inductor.context_parallel(mesh):
                return attend_causal(*local)

        return in_region
    if form == "DTensors":

        def of_dtensors(*local: Tensor) -> Tensor:
            wrapped = [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in local]
            return attend_causal(*wrapped)

        return of_dtensors
    in_graph = compiled(attend_causal, options={"mesh": mesh})

    def of_any_length(*local: Tensor) -> Tensor:
        for tensor in local:
            torch._dynamo.mark_dynamic(tensor, 2)
        return in_graph(*local)

    return of_any_length if form == "dynamic" else in_graph


LENGTHS = "queries: 8 on each rank on rank 0, 9 on each rank on rank 1"


@pytest.mark.parametrize(
    ("form", "timeout_s", "lengths"),
    [
        *((form, 60.0, ((8, 9),)) for form in ("region", "DTensors", "cp_aot_eager")),
        # The ranks agreed on each of these lengths before.
        *((form, 2.0, ((8, 8), (9, 9), (7, 7), (8, 9))) for form in ("region", "dynamic")),
        # New on one rank alone: the other waits in its exchange, and this one does not send.
        ("region", 4.0, ((8, 8), (8, 9))),
    ],
)
@on_ranks(2)
def test_lengths_that_differ_are_told_on_every_rank(
    form: str, timeout_s: float, lengths: tuple[tuple[int, int], ...]
) -> None:
    """Attend with lengths of each rank in turn; the last time, one holds 8 tokens, the other 9."""
    attend = attend_in(form, impatient_mesh(timeout_s))
    rank, told = dist.get_rank(), ""
    for held in lengths:
        pieces = [t[:, :, : held[rank]].contiguous() for t in make_qkv(9)[:3]]
        try:
            attend(*pieces)
        except RuntimeError as error:
            told = f"{held} {type(error).__name__}: {error}"
    assert told.startswith("(8, 9) RanksDisagree"), told
    assert_told_alike(told, LENGTHS, "name it in options['seq_len']")


@on_ranks(2)
def test_gradients_that_one_rank_alone_turns_off_later() -> None:
    """Train twice alike; then a rank attends without gradients, and goes on to the next.

    The other would wait in the backward, or take the next exchange for it.
    """
    attend, told = attend_in("region", impatient_mesh(2)), ""
    for step, has_grad in enumerate((True, True, dist.get_rank() == 0, True)):
        pieces = [t[:, :, :8].clone().requires_grad_() for t in make_qkv(9)[:3]]
        try:
            with torch.set_grad_enabled(has_grad):
                out = attend(*pieces)
            if has_grad:
                out.sum().backward()
        except RuntimeError as error:
            told = f"{step} {type(error).__name__}: {error}"
            break
    assert told.startswith("2 RanksDisagree") and "on on rank 0, off on rank 1" in told, told


@on_ranks(3)
def test_a_shard_that_is_not_as_planned() -> None:
    """The plan says that the first of 3 ranks holds 4 of 10 tokens; a DTensor may say otherwise."""
    held = (4, 4, 2) if dist.get_rank() != 2 else (4, 4, 3)
    local = torch.rand(1, 2, held[dist.get_rank()], 8)
    sizes = {"shape": torch.Size((1, 2, 10, 8)), "stride": (160, 80, 8, 1)}
    wrapped = DTensor.from_local(local, world_mesh(), [Shard(2)], run_check=False, **sizes)
    assert_told_alike(
        refusal_of(lambda: attend_full(wrapped, wrapped, wrapped)),
        "queries: 10 in all on ranks 0 and 1, 3 where the plan of 10 has 2, at position 2, on rank",
    )


# --- Compiled models --------------------------------------------------------------------------


def make_dtensors(mesh: DeviceMesh, length: int = 24, **shape: Any) -> list[Tensor]:
    return [distribute_tensor(t, mesh, [Shard(2)]) for t in make_qkv(length, **shape)[:3]]


def layers(*attentions: Callable[..., Tensor], scale: float | None = None) -> Callable[..., Tensor]:
    """Return a model of attentions, one behind the other, whose result may be scaled."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for attention_of_layer in attentions:
            query = attention_of_layer(query, key, value)
        return query if scale is None else query * scale

    return attend


@pytest.mark.slow
@on_ranks(2)
def test_models_that_differ() -> None:
    """What a model is made of, how it is compiled, and whether it trains."""
    mesh, is_odd = world_mesh(), dist.get_rank() == ODD
    tensors = make_dtensors(mesh)

    def told(part: str, function: Any, given: list[Tensor] = tensors, **options: Any) -> str:
        torch._dynamo.reset()
        call = compiled(function, options=options or None)
        message = refusal_of(lambda: call(*given))
        assert_told_alike(message, part)
        return message

    causal_or_full = "mask: causal on rank 0, full on rank 1"
    line = told(causal_or_full, attend_full if is_odd else attend_causal)
    assert "attention (graphs.py:" in line  # the user's is named
    told("attentions: 2 on rank 0, 1 on rank 1", layers(*[attend_causal] * (1 if is_odd else 2)))
    both = [attend_causal, attend_full]
    told(causal_or_full, layers(*(reversed(both) if is_odd else both)))
    # The plans are the same, and yet the order of exchanges may not be.
    rows = {"strategy": "rows", "stages": 1}
    machine = {**rows, "machine": "cpu:tcp" if is_odd else ""}
    told("machine: gpu:ib400 on rank 0, cpu:tcp on rank 1", attend_causal, **machine)
    # The order of other exchanges may not be, or who computes attentions.
    schedule = {**rows, "schedule": "none" if is_odd else "local"}
    told("schedule: local on rank 0, none on rank 1", attend_causal, **schedule)
    shards = [one.to_local() for one in tensors]
    with cp_inductor.config.patch(enabled=not is_odd):
        plain = {"mesh": mesh, "seq_len": tensors[0].shape[2]}
        told("enabled: True on rank 0, False on rank 1", attend_causal, shards, **plain)
    with torch.set_grad_enabled(is_odd):
        others = make_dtensors(mesh, head_dim=32)
        told("gradients: off on rank 0, on on rank 1", attend_causal, others)
    # The attentions are the same, and the model around them is not: one rank in eval(), one whose
    # code holds another number, one whose weights are frozen.
    same = "expected ranks 0 and 1 to run the same, got program: "
    told(same, layers(attend_causal, scale=None if is_odd else 0.5))
    told("got calls of mul: 1 as ", layers(attend_causal, scale=0.25 if is_odd else 0.5))
    frozen = [one.detach().requires_grad_(not is_odd) for one in tensors]
    told("got inputs that require gradients: 3 on rank 0, 0 on rank 1", attend_causal, frozen)


class Checkpointed(nn.Module):
    """An attention in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rows = nn.Embedding(11, 4), nn.Linear(4, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(self.attend, self.tokens(ids), use_reentrant=False).square().mean()

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.rows(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind()
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.slow
@on_ranks(3)
def test_bodies_that_take_other_sizes_are_the_same_program() -> None:
    """At the second length a checkpoint takes a size as a symbol on some ranks only."""
    run = compiled(cp_inductor.parallelize(Checkpointed(), world_mesh()))
    for length in (6, 3):
        run(torch.arange(length)[None]).backward()


@on_ranks(2, deadline_s=120)
def test_ranks_whose_graphs_start_other_collectives() -> None:
    """One rank's graph sums once more, or sums something larger; its attentions are the same.

    They are told before the first one starts: there they would wait for each other.
    """
    mesh, is_odd = world_mesh(), dist.get_rank() == ODD
    shards = [shard(t, dist.get_rank(), dist.get_world_size()) for t in make_qkv(14)[:3]]
    counts = (
        "collectives of its forward: 2 all_to_all_single of float32, 1 all_reduce of float32, in",
        "2 all_redu",
    )
    sizes = ("got sizes of these in its forward: in order ",)
    for more, width, parts in ((is_odd, 1, counts), (False, 2 - is_odd, sizes)):
        torch._dynamo.reset()

        def attend(*qkv: Tensor, more: bool = more, width: int = width) -> Tensor:
            out = attend_causal(*qkv)
            sums = all_reduce(out.flatten()[:width], "sum", mesh)
            return out + (all_reduce(sums, "sum", mesh) if more else sums).sum()

        call = compiled(attend, options={"mesh": mesh, "check_sequence": False})
        assert_told_alike(refusal_of(partial(call, *shards)), *parts)


class KeepAll(CustomPartitionerFn):
    """A user's partitioner that computes nothing again, whatever is in a checkpoint."""

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        for node in gm.graph.nodes:
            node.meta.pop("recompute", None)
        return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "keep all"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cp_inductor", "cp_aot_eager"])
@on_ranks(2, deadline_s=120)
def test_ranks_whose_first_backwards_start_other_collectives(backend: str) -> None:
    """One rank computes an attention again in its backward, and the other has kept it.

    They are told before the forward starts, though the backward is lowered in its first call.
    """
    run = torch.compile(
        cp_inductor.parallelize(Checkpointed(), world_mesh()), backend=backend, fullgraph=True
    )
    partitioner = KeepAll() if dist.get_rank() == ODD else None
    with (
        torch._inductor.config.patch(custom_partitioner_fn=partitioner),
        mock.patch.object(backends, "Partition", partial(Partition, partitioner)),
    ):
        message = refusal_of(lambda: run(torch.arange(6)[None]))
    assert_told_alike(message, "collectives of its backward as traced: ", "1 attention of float32")


@on_ranks(2, deadline_s=90)
def test_who_was_interrupted_compares_again() -> None:
    """One rank waits, is interrupted, and calls again; the other comes with another scale.

    What the first has said before it was interrupted is not taken for agreed.
    """
    tensors, is_odd = make_dtensors(impatient_mesh(20)), dist.get_rank() == ODD
    scale = 0.5 if is_odd else None
    if is_odd:
        time.sleep(1)
    else:
        with (
            mock.patch.object(cp_inductor.trust.log.time, "sleep", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            F.scaled_dot_product_attention(*tensors, scale=scale)
    message = refusal_of(lambda: F.scaled_dot_product_attention(*tensors, scale=scale))
    assert "scale: None on rank 0, 0.5 on rank 1" in message
    assert refusal_of(lambda: F.scaled_dot_product_attention(*tensors)) == "nothing"


# What one rank alone is told, and in which form: that its program mixes tokens, that its heads do
# not divide by the ranks, that it has another part of seq_len than it should, that an index is out
# of range, or that a pass has a bug. Last is what the others are told of it.
FAILURES = {
    "region": ("SequenceMixed: query", "query"),
    "DTensors": ("UnsupportedStrategy: sdpa_0", "sdpa_0"),
    "seq_len": (
        "expected 4 of 10 tokens on rank 1 of axis 'cp', got a query of 5",
        "expected 4 of 10 tokens on rank 1 of axis 'cp', got a query of 5",
    ),
    "index": ("IndexError", "see the error on rank 1"),
    "bug": ("KeyError", "see the error on rank 1"),
}


def fail_on_one(form: str) -> str:
    """Let one rank fail where its graph is made; return what this one is told."""
    mesh, tensors, is_odd = world_mesh(), make_qkv(15)[:3], dist.get_rank() == ODD

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if is_odd and form == "region":
            query = query.flip(2)
        if is_odd and form == "index":
            query = query + query[:, :, 99:][:, :, 0:1].select(2, 7)
        return attend_full(query, key, value)

    options: dict[str, Any] = {"strategy": "heads"} if is_odd and form == "DTensors" else {}
    around: Any = contextlib.nullcontext()
    if form == "region":
        around = cp_inductor.context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 3)
    elif form == "DTensors":
        tensors = on_mesh(tensors, mesh, Shard(2))
    else:
        length = 5 if is_odd and form == "seq_len" else (4, 4, 2)[dist.get_rank()]
        tensors = [t[:, :, :length].contiguous() for t in tensors]
        options = {"mesh": mesh, "seq_len": 10}
    if is_odd and form == "bug":
        around = mock.patch.object(pipeline, "find_attention", side_effect=KeyError("a bug"))
    call = compiled(attend, options=options)
    with mock.patch.object(cp_inductor.trust.log, "PATIENCE_S", 1.0):
        try:
            with around:
                call(*tensors)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
@on_ranks(3)
def test_ranks_go_on_after_a_refusal() -> None:
    """One rank cannot make its graph, once or twice in turn; all make those in between.

    The others would wait for it for half an hour.
    """
    for number, (form, (own, part)) in enumerate(FAILURES.items()):
        started = time.monotonic()
        messages: list[Any] = [None] * 3
        dist.all_gather_object(messages, fail_on_one(form))
        assert time.monotonic() - started < 60
        first, refusal, last = messages
        assert own in refusal, refusal
        for message in (first, last):
            assert message.startswith("RanksDisagree: "), message
            assert "got rank 1, which refuses to: " in message and part in message, message
        if number % 2 == 0:
            torch._dynamo.reset()
            compiled(attend_causal)(*on_mesh(make_qkv(15 + number)[:3], world_mesh(), Shard(2)))


@pytest.mark.slow
@on_ranks(2, deadline_s=90)
def test_what_a_rank_calls_after_a_refusal_of_its_own_is_not_taken_for_what_others_wait_for() -> (
    None
):
    """In the second of four calls that are alike, one rank has a wrong mask."""
    mesh, length, is_odd = impatient_mesh(4.0), 4, dist.get_rank() == ODD
    tensors = [shard(t, dist.get_rank(), dist.get_world_size()) for t in make_qkv(2 * length)[:3]]
    said = []
    for call in range(4):
        mask = torch.ones(length, length, dtype=torch.bool)
        how = {"attn_mask": mask} if call == 1 and is_odd else {"is_causal": True}
        batch = torch.full((1, 2 * length), call)
        with cp_inductor.context_parallel(mesh, buffers=[batch], buffer_seq_dims=[1]):
            try:
                F.scaled_dot_product_attention(*tensors, **how)
                said.append("nothing")
            except cp_inductor.CPError as error:
                said.append(f"{type(error).__name__}: {error}")
    first, second, *others = said
    assert {first, *others} == {"nothing"}
    assert "expected an attn_mask over the whole sequence" in second
    # The other rank came to its second attention, and learns that this rank did not.
    assert second.startswith("RanksDisagree: ") != is_odd


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@on_ranks(2, deadline_s=120)
def test_who_alone_fails_in_a_graph_is_named_at_the_next_comparison(dropout_p: float) -> None:
    """An index of one rank is out of range, behind the exchanges.

    The other names it at its next attention, or where the graph's seeds are compared. What the
    failed graph has noted is not compared with the notes of the next.
    """
    mesh, is_odd = impatient_mesh(20), dist.get_rank() == ODD
    shards = [shard(t, dist.get_rank(), 2).contiguous() for t in make_qkv(8)[:3]]
    ids = torch.arange(4)[None] + 99 * is_odd

    def attend(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p)
        return out[:1, 0] + F.embedding(ids + (0 * out[0, 0, :, 0]).long(), torch.ones(9, 20))

    call = compiled(attend, options={"mesh": mesh})
    tensors = on_mesh(make_qkv(12)[:3], mesh, Shard(2))
    if is_odd:
        with pytest.raises(IndexError):
            call(*shards, ids)
    else:
        message = refusal_of(lambda: call(*shards, ids))
        if not dropout_p:
            assert message == "nothing"
            message = refusal_of(lambda: attend_causal(*tensors))
        assert "rank 1, which refuses to: IndexError: index out of range" in message
    attend_causal(*tensors)
    call(*shards, torch.arange(4)[None])


@on_ranks(2)
def test_switched_off() -> None:
    scale = 0.5 if dist.get_rank() == ODD else None

    def attend(*qkv: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, scale=scale)

    with cp_inductor.config.patch(check_agreement=False):
        tensors = make_dtensors(world_mesh())
        compiled(attend)(*tensors)
        attend(*tensors)


# --- No false alarm ---------------------------------------------------------------------------


def compare(function: Callable[..., Tensor], mesh: DeviceMesh, length: int, **mask: bool) -> None:
    """Hold attention over the mesh, forward and backward, against float64 on one process."""
    whole = make_qkv(length)
    found = with_grads(function, on_mesh(whole, mesh, Shard(2)))
    assert_all_close(found, attend_with_grads(*whole, **mask), torch.float32)


@pytest.mark.slow
@on_ranks(3)
def test_who_comes_otherwise() -> None:
    mesh, is_odd = world_mesh(), dist.get_rank() == ODD
    first = compiled(attend_causal)
    if is_odd:
        time.sleep(0.3)  # as one that compiles longer
    compare(first, mesh, 24, is_causal=True)
    if is_odd:
        torch._dynamo.reset()  # and one that compiles again, alone
    compare(first, mesh, 24, is_causal=True)
    # A second model; and lengths that change, in step.
    compare(compiled(attend_full), mesh, 24)
    for length in (33, 24, 33, 36):
        compare(first, mesh, length, is_causal=True)
        if is_odd:
            torch._dynamo.reset()
    # One rank in eager.
    compare(attend_causal if is_odd else first, mesh, 24, is_causal=True)


def in_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Rank 0 says something on its way: a graph break that the others do not have."""
    out = attend_causal(query, key, value)
    if dist.get_rank() == 0:
        torch._dynamo.graph_break()
    return attend_full(out, key, value)


@on_ranks(2)
def test_one_rank_runs_in_parts_what_others_run_whole() -> None:
    mesh = world_mesh()
    call, tensors = compiled(in_parts, fullgraph=False), make_dtensors(mesh)
    for _ in range(3):
        out = call(*tensors)
    assert torch.equal(out.to_local(), in_parts(*tensors).to_local())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 - dist.get_rank()


@on_ranks(4)
def test_submeshes() -> None:
    """Two sequences, of different lengths, on two axes of ranks; and ranks outside of a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    row = mesh.get_local_rank("dp")
    compare(attend_causal, mesh["cp"], 8 + 4 * row, is_causal=True)
    compare(compiled(attend_causal), mesh["cp"], 8 + 4 * row, is_causal=True)
    some = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        compare(attend_full, DeviceMesh.from_group(some, "cpu", mesh_dim_names=("cp",)), 6)


# --- Tables and seeds -------------------------------------------------------------------------

DOCUMENTS = torch.tensor([[0] * 8 + [1] * 13, [0] * 3 + [1] * 9 + [2] * 9])


def twice_in_documents(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    out = in_documents(query, key, value, ids)
    return in_documents(out, key, value, ids.flip(0))


def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)


@pytest.mark.slow
@on_ranks(2)
def test_tables_of_compiled_graphs() -> None:
    mesh, is_odd = world_mesh(), dist.get_rank() == ODD
    tensors = make_dtensors(mesh, 21)
    ids = [
        distribute_tensor(table, mesh, [Replicate()], src_data_rank=None)
        for table in (DOCUMENTS, DOCUMENTS + is_odd)
    ]

    def told(function: Any, *given: Tensor, **flags: int) -> str:
        with implicit_replication(), cp_inductor.config.patch(**flags):
            return refusal_of(lambda: function(*given))

    for requires_grad in (False, True):
        for tensor in tensors:
            tensor.requires_grad_(requires_grad)
        function = compiled(twice_in_documents)
        assert told(function, *tensors, ids[0]) == "nothing"
        message = told(function, *tensors, ids[1])
        assert_told_alike(message, "table 0: int64 of 2x21, digest", "on rank 1")
    # Every run may be compared, when the first have gone by.
    with mock.patch.object(agreement, "FIRST_RUNS", 0):
        assert told(function, *tensors, ids[1]) == "nothing"
        message = told(function, *tensors, ids[1], check_tables_every=2)
        assert_told_alike(message, "table 0: int64")
    torch.manual_seed(is_odd)
    message = told(compiled(dropped), *tensors)
    assert_told_alike(message, "dropout's seed: ", " on rank 1")


@on_ranks(2)
def test_tables_in_eager() -> None:
    mesh, is_odd = world_mesh(), dist.get_rank() == ODD
    local = [shard(t, dist.get_rank(), 2) for t in make_qkv(20)[:3]]

    def told(**how: Any) -> str:
        torch.manual_seed(is_odd)
        with cp_inductor.context_parallel(mesh):
            return refusal_of(lambda: F.scaled_dot_product_attention(*local, **how))

    keys = torch.arange(20) < 15 + is_odd
    assert_told_alike(told(attn_mask=keys[None]), "table 0: bool of 1x20, digest")
    rows = torch.ones(20, 20, dtype=torch.bool)
    rows[10 * (1 - dist.get_rank()) :][:10] = is_odd  # another rank's queries: not read here
    assert told(attn_mask=rows) == "nothing"
    assert_told_alike(told(dropout_p=0.5), "dropout's seed: ")
