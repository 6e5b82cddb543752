"""FSDP x context parallelism, on 4 ranks: weights sharded over (dp, cp) flattened, or over dp.

Through Inductor FSDP2 is on 2 ranks. More than 90 s of CPU where it is a long case's turn: thirteen
ways to use it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention.flex_attention import create_block_mask

import cp_inductor
from tests.support.combinations import (
    AOT,
    COMPILED,
    EAGER,
    FORMS,
    NOTHING,
    NUM_LAYERS,
    TOLERANCE,
    Block,
    Decoder,
    assert_grads,
    assert_rewritten,
    combination,
    compiled,
    grads_of,
    layers_of,
    make_batch,
    make_mesh,
    make_model,
    mean_loss,
    plain_name,
    train_step,
    unsharded,
    whole,
)
from tests.support.comms import Counts
from tests.support.ranks import run_ranks
from tests.support.tensor_parallel import parallelize

ALL_GATHER = torch.ops.c10d._allgather_base_
# Why a row is eager alone.
FLAT = "Dynamo wants use_orig_params=True."

# What FSDP1 takes where there is gloo.
ALL_GATHER_LIST = torch.ops.c10d.allgather_
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_


def shard_all(model: Decoder, mesh: DeviceMesh, **kwargs: Any) -> None:
    for block in model.layers:
        fully_shard(block, mesh=mesh, **kwargs)
    fully_shard(model, mesh=mesh, **kwargs)


# FSDP2


def sizes_of(form: str) -> tuple[int, int]:
    """Return dp and cp: to Inductor, a second half of the batch is the first one's like."""
    return (1, 2) if form == COMPILED else (2, 2)


def check_fsdp2(form: str, is_per_block: bool = False, **kwargs: Any) -> None:
    mesh = make_mesh(*sizes_of(form))
    num_layers = layers_of(form)
    loss, grads = unsharded(num_layers=num_layers)
    model = make_model(num_layers=num_layers)
    shard_all(model, mesh["dp", "cp"]._flatten("fsdp"), **kwargs)
    run = compile_it(model, form, is_per_block)
    tolerance = TOLERANCE
    if "mp_policy" in kwargs:
        # Activations in bfloat16, 2^-9 each, through four layers there and back.
        tolerance = 5e-2
    with Counts():
        actual = train_step(run, mesh)
    assert_rewritten(form)
    assert abs(actual - loss) < tolerance * loss
    assert_grads(grads_of(model), grads, tolerance)
    is_kept = not kwargs.get("reshard_after_forward", True)
    check_counts(run, mesh, num_layers, 1 if is_kept else 2)
    # The second batch found the gradients of the first.
    twice = {name: 2 * grad for name, grad in grads.items()}
    assert_grads(grads_of(model), twice, 2 * tolerance)
    check_next_step(model, run, mesh, 2 * tolerance)


def check_next_step(
    model: Decoder, run: Callable[..., Any], mesh: DeviceMesh, tolerance: float
) -> None:
    """The optimizer works on weights wherever they are, and the next step on what it made."""
    alone = make_model(num_layers=len(model.layers))
    grads = grads_of(model)
    for name, weight in alone.named_parameters():
        weight.grad = grads[name]
    for each in (model, alone):
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9).step()
    ids, positions, labels = make_batch(seed=3)
    expected = mean_loss(alone(ids, positions), labels).detach()
    actual = train_step(run, mesh, (ids, positions, labels))
    assert abs(actual - expected) < tolerance * expected


def check_counts(
    run: Callable[..., Any], mesh: DeviceMesh, num_layers: int, num_gathers: int
) -> None:
    """Count collectives of a second step: those of weights are FSDP's own, exchanges are ours."""
    counts = Counts()
    with counts:
        train_step(run, mesh)
    comms = counts.get_comm_counts()
    # Forward and backward of every attention, at least.
    assert counts.exchanges() >= 2 * num_layers
    # The root keeps what it gathered; blocks may gather again in the backward.
    assert comms[ALL_GATHER] == 1 + num_layers * num_gathers
    assert comms[REDUCE_SCATTER] == 1 + num_layers


def compile_it(model: Decoder, form: str, is_per_block: bool) -> Callable[..., Any]:
    if not is_per_block:
        return compiled(model, form)
    for block in model.layers:
        block.compile(backend=form, fullgraph=True)
    return model


@combination("FSDP2 over (dp, cp)", *FORMS)
def test_fsdp2(form: str) -> None:
    run_ranks(prod(sizes_of(form)), check_fsdp2, form)


@combination("FSDP2, compiled block by block", AOT, COMPILED, eager=NOTHING)
def test_fsdp2_per_block(form: str) -> None:
    run_ranks(prod(sizes_of(form)), check_fsdp2, form, True)


@combination("FSDP2, weights kept between forward and backward", *FORMS)
def test_fsdp2_without_reshard(form: str) -> None:
    check = partial(check_fsdp2, reshard_after_forward=False)
    run_ranks(prod(sizes_of(form)), check, form)


@combination("FSDP2, bfloat16 weights, gradients reduced in float32", *FORMS)
def test_fsdp2_mixed_precision(form: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_ranks(prod(sizes_of(form)), partial(check_fsdp2, mp_policy=policy), form)


@combination("FSDP2, weights offloaded", *FORMS)
def test_fsdp2_offload(form: str) -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    run_ranks(prod(sizes_of(form)), partial(check_fsdp2, offload_policy=policy), form)


def check_tied(form: str) -> None:
    mesh = make_mesh(2, 2)
    _, grads = unsharded(is_tied=True)
    model = make_model(is_tied=True)
    shard_all(model, mesh["dp", "cp"]._flatten("fsdp"))
    assert model.head.weight is model.tokens.weight
    run = compiled(model, form)
    train_step(run, mesh)
    assert_rewritten(form)
    assert_grads(grads_of(model), grads)
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.grad is model.tokens.weight.grad
    twice = make_model(is_tied=True)
    twice.load_state_dict({name: 2 * tensor for name, tensor in twice.state_dict().items()})
    ids, positions, labels = make_batch()
    expected = mean_loss(twice(ids, positions), labels).detach()
    torch.testing.assert_close(train_step(run, mesh), expected)


@combination("FSDP2, embedding and head tied", EAGER, AOT)
def test_fsdp2_tied(form: str) -> None:
    run_ranks(4, check_tied, form)


def check_three_axes(form: str, *sizes: int) -> None:
    mesh = make_mesh(*sizes, names=("dp", "cp", "tp"))
    loss, grads = unsharded()
    model = make_model()
    parallelize(model, mesh["tp"], "blocks")
    shard_all(model, mesh["dp", "cp"]._flatten("fsdp"))
    run = compiled(model, form)
    for times in (1, 2):
        torch.testing.assert_close(train_step(run, mesh), loss)
        assert_grads(grads_of(model), {name: times * grad for name, grad in grads.items()})
    assert_rewritten(form)


@combination("FSDP2 over (dp, cp), tensor parallelism over tp", EAGER, AOT)
def test_fsdp2_and_tensor_parallel(form: str) -> None:
    sizes = (2, 2, 2) if form == EAGER else (1, 2, 2)
    run_ranks(prod(sizes), check_three_axes, form, *sizes)


def check_accumulation(form: str) -> None:
    mesh = make_mesh(*sizes_of(form))
    batches = make_batch(seed=2), make_batch(seed=3)
    _, grads = unsharded(*batches, num_layers=layers_of(form))
    model = make_model(num_layers=layers_of(form))
    shard_all(model, mesh["dp", "cp"]._flatten("fsdp"))
    run = compiled(model, form)
    for batch in batches:
        model.set_requires_gradient_sync(batch is batches[-1])
        train_step(run, mesh, batch)
    assert_grads(grads_of(model), grads)


@combination("FSDP2, gradients accumulated over batches", *FORMS)
def test_fsdp2_accumulation(form: str) -> None:
    run_ranks(prod(sizes_of(form)), check_accumulation, form)


def check_replicated(form: str) -> None:
    mesh = make_mesh(2, 2, names=("cp", "dp"))
    _, grads = unsharded()
    model = make_model()
    shard_all(model, mesh)
    train_step(compiled(model, form), mesh)
    assert_rewritten(form)
    assert_grads(grads_of(model), grads)


@combination("FSDP2 over dp, weights replicated on cp", *FORMS)
def test_fsdp2_replicated(form: str) -> None:
    run_ranks(4, check_replicated, form)


# FSDP1


def check_fsdp1(form: str, **kwargs: Any) -> None:
    mesh = make_mesh(2, 2)
    loss, grads = unsharded()
    model = make_model()
    if kwargs.get("sync_module_states") and dist.get_rank():
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=mesh["dp", "cp"]._flatten("fsdp"),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **kwargs,
    )
    run = compiled(wrapped, form)
    with Counts():
        actual = train_step(run, mesh)
    assert_rewritten(form)
    torch.testing.assert_close(actual, loss)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        assert_grads(grads_of(wrapped), grads)
    wrapped.zero_grad()
    counts = Counts()
    with counts:
        train_step(run, mesh)
    is_kept = kwargs.get("sharding_strategy") is ShardingStrategy.SHARD_GRAD_OP
    comms = counts.get_comm_counts()
    assert comms[ALL_GATHER_LIST] == 1 + NUM_LAYERS * (1 if is_kept else 2)
    assert comms[REDUCE_SCATTER] == 1 + NUM_LAYERS
    assert counts.exchanges() >= 2 * NUM_LAYERS


@combination("FSDP1 over (dp, cp), use_orig_params", *FORMS)
def test_fsdp1(form: str) -> None:
    run_ranks(4, check_fsdp1, form)


@combination("FSDP1, SHARD_GRAD_OP", *FORMS)
def test_fsdp1_shard_grad_op(form: str) -> None:
    run_ranks(4, partial(check_fsdp1, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), form)


def check_flat_parameters() -> None:
    """Without use_orig_params nothing but flat parameters has gradients: a step shows them."""
    mesh = make_mesh(2, 2)
    loss, grads = unsharded()
    weights = {name: weight.detach().clone() for name, weight in make_model().named_parameters()}
    wrapped = FullyShardedDataParallel(
        make_model(),
        device_mesh=mesh["dp", "cp"]._flatten("fsdp"),
        use_orig_params=False,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    for _ in range(2):  # the gradients of both
        torch.testing.assert_close(train_step(wrapped, mesh), loss)
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        found = {plain_name(name): whole(w) for name, w in wrapped.named_parameters()}
    assert found.keys() == weights.keys()
    steps = {name: weights[name] - weight for name, weight in found.items()}
    assert_grads(steps, {name: 2 * grad for name, grad in grads.items()})


# Dynamo refuses the form that it is about.
@combination(
    "FSDP1, flat parameters (use_orig_params=False)",
    EAGER,
    cp_aot_eager=FLAT,
    cp_inductor=FLAT,
)
def test_fsdp1_flat_parameters(form: str) -> None:
    run_ranks(4, check_flat_parameters)


def check_synced(form: str) -> None:
    # FSDP1 refuses to broadcast between CPUs, which gloo can.
    name = "torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states"
    with mock.patch(name):
        check_fsdp1(form, sync_module_states=True)


@combination("FSDP1, sync_module_states", *FORMS)
def test_fsdp1_sync_module_states(form: str) -> None:
    run_ranks(4, check_synced, form)


def check_packed(form: str, length: int) -> None:
    """The recipes of docs/fsdp.md, two steps: one document, and then several, which are packed."""
    transformers = pytest.importorskip("transformers")
    transformers.set_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads)
    reference = transformers.LlamaForCausalLM(copy.deepcopy(config))
    kind, _, backend = form.partition(", ")
    if kind == "flex":
        config._attn_implementation = "flex_attention"
    else:
        reference = reference.double()
    model = transformers.LlamaForCausalLM(config).to(reference.dtype)
    model.load_state_dict(reference.state_dict())
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("fsdp")
    for block in model.model.layers:
        if backend:
            block.compile(backend=backend, fullgraph=True, dynamic=False)
        fully_shard(block, mesh=both)
    fully_shard(model, mesh=both)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    for step, lengths in enumerate(([length], [7, 1, 12, length - 20], [length - 5, 5])):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 64, (1, length), generator=generator)
        positions = torch.cat([torch.arange(count) for count in lengths])[None]
        labels = ids.masked_fill(positions == 0, -100)
        batch = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        expected = reference(**batch, labels=labels).loss
        expected.backward()
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        targets = int((shifted != -100).sum())
        documents = (positions == 0).cumsum(1)
        mask: Any = (documents[:, :, None] == documents[:, None]).tril()[:, None]
        with (
            cp_inductor.flex_gradients_on_cpu(),
            cp_inductor.context_parallel(
                mesh["cp"], buffers=[ids, positions, shifted], buffer_seq_dims=[1, 1, 1]
            ),
        ):
            if kind == "flex":
                batch_size, shard = ids.shape
                mask_mod = partial(in_document, documents)
                mask = create_block_mask(mask_mod, batch_size, None, shard, shard, device="cpu")
            elif len(lengths) == 1 and not backend:
                mask = None
            loss = model(
                **batch,
                attention_mask=mask,
                labels=shifted,
                shift_labels=shifted,
                num_items_in_batch=targets / both.size(),
            ).loss
            loss.backward()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        torch.testing.assert_close(logged / both.size(), expected.detach())
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def in_document(documents: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (documents[b, q] == documents[b, k])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "ranks", "length"),
    [
        ("mask", 3, 34),
        ("mask, cp_aot_eager", 2, 33),
        ("flex, cp_aot_eager", 2, 35),
        pytest.param("mask, cp_inductor", 2, 32, marks=pytest.mark.long),
        pytest.param("flex, cp_inductor", 2, 33, marks=pytest.mark.long),
    ],
)
def test_packed_documents_in_a_region(form: str, ranks: int, length: int) -> None:
    run_ranks(ranks, check_packed, form, length)
