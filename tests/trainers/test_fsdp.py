"""FSDP x context parallelism, on 4 ranks: weights sharded over (dp, cp) flattened, or over dp.

Compiled FSDP2 is on 2 ranks. More than 90 s of CPU where it is a long case's turn: thirteen ways to
use it.
"""

from __future__ import annotations

from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
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
from tests.support import combinations as cases
from tests.support.comms import Counts
from tests.support.models import make
from tests.support.ranks import on_ranks, run_ranks
from tests.support.tensor_parallel import parallelize

ALL_GATHER = torch.ops.c10d._allgather_base_
# Why a row is eager alone.
FLAT = "Dynamo wants use_orig_params=True."

# What FSDP1 takes where there is gloo.
ALL_GATHER_LIST = torch.ops.c10d.allgather_
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_
# By it FSDP1 refuses to broadcast between CPUs, which gloo can.
SYNC_CHECK = "torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states"


# FSDP2. Settings: `names` of axes, `is_tied`, `is_per_block` for blocks that are compiled alone,
# `accumulates`, `policy` for fully_shard, and the tolerance.
FSDP2 = {
    "FSDP2 over (dp, cp)": cases.Row(),
    "FSDP2, compiled block by block": cases.Row(
        (cases.AOT, cases.COMPILED), {cases.EAGER: cases.NOTHING}, {"is_per_block": True}
    ),
    "FSDP2, weights kept between forward and backward, gradients accumulated over batches": (
        cases.Row(settings={"policy": {"reshard_after_forward": False}, "accumulates": True})
    ),
    # Activations in bfloat16, 2^-9 each, through four layers there and back.
    "FSDP2, bfloat16 weights, gradients reduced in float32": cases.Row(
        settings={
            "policy": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
            "tolerance": 5e-2,
        }
    ),
    "FSDP2, weights offloaded": cases.Row(
        settings={"policy": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}}
    ),
    "FSDP2, embedding and head tied": cases.Row(
        (cases.EAGER, cases.AOT), settings={"is_tied": True}
    ),
    "FSDP2 over (dp, cp), tensor parallelism over tp": cases.Row(
        (cases.EAGER, cases.AOT), settings={"names": ("dp", "cp", "tp")}
    ),
    "FSDP2 over dp, weights replicated on cp": cases.Row(settings={"names": ("cp", "dp")}),
}


def sizes_of(row: str, form: str) -> tuple[int, ...]:
    """Return the sizes of axes: to a compiler, the second half of a batch is as the first one."""
    names = FSDP2[row].settings.get("names", ())
    if "tp" in names:
        return (2, 2, 2) if form == cases.EAGER else (1, 2, 2)
    return (2, 2) if form == cases.EAGER or names else (1, 2)


def check_fsdp2(row: str, form: str) -> None:
    case, num_layers = FSDP2[row].settings, cases.layers_of(form)
    policy, names = case.get("policy", {}), case.get("names", ("dp", "cp"))
    tolerance, accumulates = case.get("tolerance", cases.TOLERANCE), case.get("accumulates", False)
    mesh = cases.make_mesh(*sizes_of(row, form), names=names)
    sizes = {"num_layers": num_layers, "is_tied": case.get("is_tied", False)}
    loss, grads = cases.unsharded(**sizes)
    model = cases.make_model(**sizes)
    if "tp" in names:
        parallelize(model, mesh["tp"], "blocks")
    over = mesh if names == ("cp", "dp") else mesh["dp", "cp"]._flatten("fsdp")
    for block in (*model.layers, model):
        fully_shard(block, mesh=over, **policy)
    run: Any = model
    if case.get("is_per_block"):
        for block in model.layers:
            block.compile(backend=form, fullgraph=True)
    else:
        run = cases.compiled(model, form)
    # The second batch finds the gradients of the first.
    for times in (1, 2):
        model.set_requires_gradient_sync(times == 2 or not accumulates)
        with Counts() as counts:
            actual = cases.train_step(run, mesh)
        assert abs(actual - loss) < tolerance * loss
        if times == 2 or not accumulates:
            scaled = {name: times * grad for name, grad in grads.items()}
            cases.assert_grads(cases.grads_of(model), scaled, times * tolerance)
    cases.assert_rewritten(form)
    if sizes["is_tied"]:
        assert model.head.weight is model.tokens.weight
        assert model.head.weight.grad is model.tokens.weight.grad
    # Collectives of weights are FSDP's own, exchanges are ours: forward and backward of every
    # attention, at least.
    comms = counts.get_comm_counts()
    assert counts.exchanges() >= 2 * num_layers
    # The root keeps what it gathered; blocks may gather again in the backward.
    num_gathers = 2 if policy.get("reshard_after_forward", True) else 1
    assert comms[ALL_GATHER] == 1 + num_layers * num_gathers
    assert comms[REDUCE_SCATTER] == 1 + num_layers
    check_next_step(model, run, mesh, sizes, 2 * tolerance)


def check_next_step(
    model: cases.Decoder, run: Any, mesh: DeviceMesh, sizes: Any, tolerance: float
) -> None:
    """The optimizer works on weights wherever they are, and the next step on what it made."""
    alone, grads = cases.make_model(**sizes), cases.grads_of(model)
    for name, weight in alone.named_parameters():
        weight.grad = grads[name]
    for each in (model, alone):
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9).step()
    ids, positions, labels = cases.make_batch(seed=3)
    expected = cases.mean_loss(alone(ids, positions), labels).detach()
    actual = cases.train_step(run, mesh, (ids, positions, labels))
    assert abs(actual - expected) < tolerance * expected


@cases.combinations(FSDP2)
def test_fsdp2(row: str, form: str) -> None:
    run_ranks(prod(sizes_of(row, form)), check_fsdp2, row, form)


FSDP1 = {
    "FSDP1 over (dp, cp), use_orig_params": cases.Row(),
    "FSDP1, SHARD_GRAD_OP, sync_module_states": cases.Row(
        settings={"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "sync_module_states": True}
    ),
    # Dynamo refuses the form that it is about.
    "FSDP1, flat parameters (use_orig_params=False)": cases.Row(
        (cases.EAGER,), {cases.AOT: FLAT, cases.COMPILED: FLAT}, {"use_orig_params": False}
    ),
}


@cases.combinations(FSDP1)
@on_ranks(4)
@mock.patch(SYNC_CHECK, new=mock.Mock())
def test_fsdp1(row: str, form: str) -> None:
    """Where nothing but flat parameters has gradients, a step shows them."""
    mesh, settings = cases.make_mesh(2, 2), FSDP1[row].settings
    loss, grads = cases.unsharded()
    model, weights = cases.make_model(), dict(cases.make_model().named_parameters())
    if settings.get("sync_module_states") and dist.get_rank():
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=mesh["dp", "cp"]._flatten("fsdp"),
        auto_wrap_policy=ModuleWrapPolicy({cases.Block}),
        device_id=torch.device("cpu"),
        **{"use_orig_params": True, **settings},
    )
    run = cases.compiled(wrapped, form)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    for _ in range(2):  # the gradients of both
        with Counts() as counts:
            torch.testing.assert_close(cases.train_step(run, mesh), loss)
    cases.assert_rewritten(form)
    optimizer.step()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        found = {cases.plain_name(name): cases.whole(w) for name, w in wrapped.named_parameters()}
    assert found.keys() == weights.keys()
    steps = {name: weights[name].detach() - weight for name, weight in found.items()}
    cases.assert_grads(steps, {name: 2 * grad for name, grad in grads.items()})
    is_kept = settings.get("sharding_strategy") is ShardingStrategy.SHARD_GRAD_OP
    comms = counts.get_comm_counts()
    assert comms[ALL_GATHER_LIST] == 1 + cases.NUM_LAYERS * (1 if is_kept else 2)
    assert comms[REDUCE_SCATTER] == 1 + cases.NUM_LAYERS
    assert counts.exchanges() >= 2 * cases.NUM_LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "ranks", "length"),
    [
        ("mask", 3, 34),
        ("flex, cp_aot_eager", 2, 35),
        pytest.param("mask, cp_inductor", 2, 33, marks=pytest.mark.long),
    ],
)
@on_ranks("ranks")
def test_packed_documents_in_a_region(form: str, ranks: int, length: int) -> None:
    """The recipes of docs/fsdp.md, two steps: one document, and then several, which are packed."""
    pytest.importorskip("transformers")
    kind, _, backend = form.partition(", ")
    if kind == "flex":
        model, reference = make("Llama", attn_implementation="flex_attention"), make("Llama")
    else:
        model, reference = (make("Llama").double() for _ in range(2))
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


# --- Training that is saved on 4 ranks and goes on on 2, and on 1, as if nothing had happened.

NUM_STEPS, NUM_SAVED = 6, 3

# dp and cp of each part of the training.
SIZES = {4: (2, 2), 2: (1, 2), 1: (1, 1)}


def check_training(form: str, num_ranks: int, steps: range, folder: str) -> list[float]:
    """Run steps; load before them if they are not the first, and save behind them."""
    model, mesh = cases.make_model(), cases.make_mesh(*SIZES[num_ranks])
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp", "cp"]._flatten("fsdp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if steps.start:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"weights": weights, "moments": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    run = cases.compiled(model, form)
    losses = []
    for step in steps:
        losses.append(cases.train_step(run, mesh, cases.make_batch(seed=step)).item())
        optimizer.step()
        optimizer.zero_grad()
    if not steps.start:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"weights": weights, "moments": moments}, checkpoint_id=folder)
    return losses


def losses_on_one_process() -> list[float]:
    model = cases.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(NUM_STEPS):
        ids, positions, labels = cases.make_batch(seed=step)
        loss = cases.mean_loss(model(ids, positions), labels)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@cases.combination("distributed checkpoint: saved on 4 ranks, resumed on 2 and on 1", *cases.FORMS)
def test_resumed(form: str, tmp_path: Path) -> None:
    expected = losses_on_one_process()
    (saved, *others) = run_ranks(4, check_training, form, 4, range(NUM_SAVED), str(tmp_path))
    assert all(losses == saved for losses in others)
    torch.testing.assert_close(saved, expected[:NUM_SAVED], rtol=1e-4, atol=0)
    for num_ranks in (2, 1):
        steps = range(NUM_SAVED, NUM_STEPS)
        resumed = run_ranks(num_ranks, check_training, form, num_ranks, steps, str(tmp_path))[0]
        torch.testing.assert_close(resumed, expected[NUM_SAVED:], rtol=1e-4, atol=0)
