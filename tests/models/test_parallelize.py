"""Whole batches in, weights that stay plain, the loss of one process out.

Each model beside itself on one process, in float64. The models of transformers are in
test_models.py, trainers in tests/trainers.
"""

from __future__ import annotations

import copy
import logging
import pickle
import random
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import (
    InvalidArgument,
    RanksDisagree,
    UnsupportedPlacement,
    UnsupportedWrite,
    UntiedWeights,
)
from tests.support import models
from tests.support.combinations import (
    AOT,
    COMPILED,
    EAGER,
    NUM_LAYERS,
    VOCABULARY,
    assert_beside,
    checkpoint_layers,
    compiled,
    make_batch,
    mean_loss,
    whole,
)
from tests.support.combinations import make_model as make_decoder
from tests.support.graphs import lowered_graphs
from tests.support.ranks import fake_rank, on_ranks, world_mesh
from tests.support.reference import assert_within
from tests.support.tensor_parallel import parallelize as split_over_tp
from tests.support.tensor_parallel import split_llama

TOLERANCE = 1e-12  # relative to the largest of a tensor
FLOAT32_TOLERANCE = 1e-6  # the same, where a part is computed in float32


class Training(nn.Module):
    """A decoder whose embedding is its head, its loss, and counts that its forward writes."""

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.decoder = make_decoder(num_layers=num_layers, is_tied=True)
        self.register_buffer("seen", torch.zeros(VOCABULARY))
        self.register_buffer("calls", torch.zeros(()))

    def count(self, ids: Tensor) -> None:
        with torch.no_grad():
            self.seen.add_(F.one_hot(ids, VOCABULARY).sum((0, 1)))
            self.calls = self.calls + 1

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Any:
        self.count(ids)
        return mean_loss(self.decoder(ids, positions), labels)


class Decaying(Training):
    """With the squares of all weights in its loss, beside which it returns its logits."""

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Any:
        self.count(ids)
        logits = self.decoder(ids, positions)
        decay = sum(weight.square().sum() for weight in self.parameters())
        return mean_loss(logits, labels) + 1e-3 * decay, logits


def make_model(num_layers: int = NUM_LAYERS) -> Training:
    return Training(num_layers).double()


assert_same_gradients = partial(assert_beside, tolerance=TOLERANCE, least=1.0)


def assert_same_step(model: nn.Module, reference: nn.Module, run: Any, *batch: Any) -> None:
    """Differentiate a loss over shards, by what runs the model, and that of one process."""
    loss, expected = run(*batch), reference(*batch)
    loss.backward()
    expected.backward()
    assert_same_gradients(model, reference, (loss, expected))


# --- A step -------------------------------------------------------------------------------------


def differentiate(step: int, loss: Tensor, logits: Tensor, form: str) -> None:
    """Use the results of a step: as usual, in place, by plain gradients, beside each other."""
    half = torch.tensor(0.5, dtype=loss.dtype)
    if step == 0:
        loss.backward()
    elif step == 1:
        loss /= 4
        loss.backward(half)
    elif step == 2:
        # Its backward reads them through Inductor, so that writes to them are refused.
        logits = logits * 0.5 if form == COMPILED else logits.mul_(0.5)
        (loss + logits.square().mean()).backward()
    else:
        torch.autograd.backward([loss, logits], [half, torch.ones_like(whole(logits))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "ranks", "batch", "length"),
    [
        (EAGER, 3, 2, 33),
        (EAGER, 3, 1, 2),  # one rank has no token
        pytest.param(AOT, 2, 2, 33, marks=pytest.mark.long),
        pytest.param(COMPILED, 2, 2, 33, marks=pytest.mark.long),
    ],
)
@on_ranks("ranks")
def test_steps_are_those_of_one_process(form: str, ranks: int, batch: int, length: int) -> None:
    """Results, which are used as those of one process, gradients, weights, and counts."""
    num_layers = NUM_LAYERS if form == EAGER else 1
    model, reference = (Decaying(num_layers).double() for _ in range(2))
    optimizers = [
        torch.optim.AdamW(each.parameters(), fused=True, lr=0.01) for each in (model, reference)
    ]
    assert cp_inductor.parallelize(model, world_mesh()) is model
    run = compiled(model, form, **({} if form == EAGER else {"fullgraph": True}))
    for step in range(4):
        results = [call(*make_batch(batch, length, step)) for call in (run, reference)]
        assert type(results[0][0]) is Tensor
        for actual, expected in zip(*results, strict=True):
            assert_within(whole(actual.detach()), expected.detach(), TOLERANCE)
        for loss, logits in results:
            differentiate(step, loss, logits, form)
        assert_same_gradients(model, reference)
        for optimizer in optimizers:
            torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert {type(tensor) for tensor in model.state_dict().values()} == {Tensor}
    for name, tensor in reference.state_dict().items():
        assert_within(model.state_dict()[name], tensor, TOLERANCE, name)
    assert type(model.decoder.head.weight) is nn.Parameter
    assert model.decoder.head.weight is model.decoder.tokens.weight
    if form != EAGER:
        assert counters["stats"]["unique_graphs"] == 1


class Forgetting(nn.Linear):
    """Forgets the results of before while it is traced, as a garbage collector may."""

    results: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        forget_results()
        return super().forward(x) * torch.ones(4)


@torch.compiler.assume_constant_result
def forget_results() -> None:
    Forgetting.results.clear()


def test_results_of_before_may_go_during_a_trace(first_mesh: DeviceMesh) -> None:
    model, x = Forgetting(4, 4), torch.randn(2, 6, 4)
    expected = model(x)
    cp_inductor.parallelize(model, first_mesh, seq_dims={"x": 1})
    before = cp_inductor.parallelize(nn.Linear(4, 4), first_mesh, seq_dims={"input": 1})
    Forgetting.results.append(before(x))
    out = torch.compile(model, backend=AOT, fullgraph=True)(x)
    assert not Forgetting.results
    torch.testing.assert_close(out.to_local(), expected[:, :3])


@on_ranks(2)
def test_results_beside_plain_labels() -> None:
    """The loss is the program's own, in training and evaluation."""
    model, x = nn.Linear(4, 4).double(), torch.randn(2, 7, 4).double()
    reference, labels = copy.deepcopy(model), torch.arange(14).view(2, 7) % 4
    cp_inductor.parallelize(model, world_mesh(), seq_dims={"input": 1})
    for run in (compiled(model, AOT), model):
        for context in (torch.no_grad, nullcontext):
            with context():
                pair = [mean_loss(one(x), labels) for one in (run, reference)]
            if pair[0].requires_grad:
                pair[0].backward()
                pair[1].backward()
            assert_same_gradients(model, reference, pair)


def assert_same_at_lengths(
    model: nn.Module, lengths: Sequence[int], *, dynamic: bool | None = None, **options: Any
) -> None:
    """Compare a model, parallelized and compiled, with itself on one process, step by step."""
    reference = copy.deepcopy(model)
    cp_inductor.parallelize(model, world_mesh(), **options)
    run = compiled(model, AOT, fullgraph=True, dynamic=dynamic)
    for length in lengths:
        ids = torch.arange(2 * length).view(2, length) % 7
        pair = [one(ids) for one in (run, reference)]
        for loss in pair:
            loss.backward()
        assert_same_gradients(model, reference, pair)


class Redrawing(nn.Module):
    """Counts its calls, and draws in a checkpoint, which practically never drops anything."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rows = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls.add_(1)
        return checkpoint(self.drop, self.tokens(ids), use_reentrant=False).square().mean()

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(self.rows(x), 1e-15)


@on_ranks(2)
def test_a_checkpoint_that_draws_again_among_sharded_weights() -> None:
    """States of generators are saved beside the mesh, whose place among what is saved is known.

    What the graph writes to is followed; a float of a module, as of nn.Embedding, is read in it.
    """
    model = Redrawing().double()
    assert_same_at_lengths(model, (7, 8), weights=world_mesh(), dynamic=True)
    assert model.calls == 2


class Summing(nn.Module):
    """Sums over the tokens before each, behind a dropout that practically drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.rows, self.norm = nn.Embedding(7, 4), nn.Linear(4, 4), nn.RMSNorm(4)
        self.head = nn.Linear(4, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = self.norm(x + F.dropout(self.rows(x), 1e-15))
        logits = self.head(x + x.cumsum(1) / 9)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@on_ranks(3, deadline_s=120)
def test_a_rank_that_had_no_tokens_starts_what_others_do() -> None:
    """At the second length torch copied two gathers to the backwards of the other ranks alone."""
    assert_same_at_lengths(Summing().double(), (4, 6), weights=world_mesh())


def normalize(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model.rows.weight.div_(1 + model.rows.weight.norm())


class Writing(nn.Module):
    """Writes to what it reads afterwards, as it is told."""

    def __init__(self, write: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.write, self.tokens, self.rows = write, nn.Embedding(7, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        self.write(self, x)
        return (self.rows(x) * self.scale).square().mean()


@on_ranks(2)
def test_what_a_graph_writes_to_is_read_with_its_gradient() -> None:
    for write in (
        lambda model, x: model.scale.copy_(x.mean((0, 1))),
        lambda model, x: model.scale.add_(x.mean((0, 1))),
        normalize,
    ):
        assert_same_at_lengths(Writing(write).double(), (7,))


class Scaling(nn.Module):
    """Multiplies by a buffer, which it then writes to if it is asked to."""

    def __init__(self, is_decaying: bool) -> None:
        super().__init__()
        self.is_decaying = is_decaying
        self.tokens, self.trained, self.frozen = (
            nn.Embedding(7, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4).requires_grad_(False),
        )
        self.register_buffer("scale", torch.rand(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.trained(self.tokens(ids)).tanh()) * self.scale
        if self.is_decaying:
            self.scale.mul_(0.9)
        return x.square().mean()


def is_refused(model: nn.Module, written: str) -> bool:
    """Differentiate a loss whose model is written to before; whether autograd refuses to."""
    try:
        loss = model(torch.arange(14).view(2, 7) % 7)
        for name in filter(None, [written]):
            model.state_dict()[name].mul_(2)
        loss.backward()
    except RuntimeError as error:
        return re.search("has been modified (by an )?inplace", str(error)) is not None
    return False


@pytest.mark.parametrize(
    "options", [{}, {"gradients": "partial"}, {"tokenwise": [nn.Linear, nn.Embedding]}]
)
@on_ranks(2)
def test_what_is_written_before_a_backward(options: dict[str, Any]) -> None:
    """It is refused if the backward needs it, as on one process; else gradients are the same."""
    refused = []
    for written in ("", "scale", *(name for name, _ in Scaling(False).named_parameters())):
        for is_decaying in (False, True):
            model = Scaling(is_decaying).double()
            reference = copy.deepcopy(model)
            cp_inductor.parallelize(model, world_mesh(), **options)
            refused.append(is_refused(reference, written))
            if not written:  # later, the graph compares versions
                assert is_refused(compiled(copy.deepcopy(model), AOT), written) == refused[-1]
            assert is_refused(model, written) == refused[-1], (written, is_decaying)
            if not refused[-1] and "gradients" not in options:
                assert_same_gradients(model, reference)
            assert_within(model.scale, reference.scale, TOLERANCE)
    assert refused[::2] == [False, True, False, True, False, True, False]
    assert all(refused[1::2])


# --- What is wrapped around a model, or put into it -----------------------------------------------


def by_ddp(mesh: DeviceMesh) -> nn.Module:
    model = cp_inductor.parallelize(make_model(1), mesh["cp"])
    return DistributedDataParallel(model, process_group=mesh["dp"].get_group())


def by_ddp_over_both_axes(mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(
        cp_inductor.parallelize(make_model(1), mesh["cp"], gradients="partial")
    )


def by_fully_shard(mesh: DeviceMesh, **options: Any) -> Any:
    model = cp_inductor.parallelize(make_model(1), mesh["cp"])
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh["dp"], **options)
    return fully_shard(model, mesh=mesh["dp"], **options)


def sharded_before(mesh: DeviceMesh) -> nn.Module:
    return cp_inductor.parallelize(fully_shard(make_model(1), mesh=mesh["dp"]), mesh["cp"])


def by_fsdp1(mesh: DeviceMesh) -> nn.Module:
    model = cp_inductor.parallelize(make_model(1), mesh["cp"])
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        model, device_mesh=mesh["dp"], device_id=device, use_orig_params=True
    )


def over_both_axes(mesh: DeviceMesh) -> nn.Module:
    model = cp_inductor.parallelize(make_model(1), mesh["cp"], gradients="partial")
    return fully_shard(model, mesh=mesh["dp", "cp"]._flatten("fsdp"))


def with_weights(mesh: DeviceMesh) -> nn.Module:
    weights = mesh["dp", "cp"]._flatten("weights")
    return cp_inductor.parallelize(make_model(1), mesh["cp"], weights=weights)


def in_mixed_precision(mesh: DeviceMesh) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    return by_fully_shard(mesh, mp_policy=policy)


IN_GRAPHS = (by_ddp, by_fsdp1, over_both_axes, with_weights)
AROUND_GRAPHS = (by_ddp_over_both_axes, by_fully_shard, in_mixed_precision, sharded_before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "form"),
    [
        *((wrap, EAGER) for wrap in (*IN_GRAPHS, *AROUND_GRAPHS)),
        *(pytest.param(wrap, AOT, marks=pytest.mark.long) for wrap in IN_GRAPHS),
    ],
)
@on_ranks(4)
def test_wrapped_for_data_parallelism(wrap: Any, form: str) -> None:
    """Gradients are accumulated over two batches of each replica."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, reference = wrap(mesh), make_model(1)
    tolerance = 1e-5 if wrap is in_mixed_precision else TOLERANCE  # float32, not float64
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = [make_batch(2, 13, seed) for seed in range(4)]
    losses = [reference(*batch) for batch in batches]
    (sum(losses) / 2).backward()
    run, own = compiled(model, form), range(mesh.get_local_rank("dp"), 4, 2)
    for number in own:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == own[-1])
        loss = run(*batches[number])
        loss.backward()
        assert loss.dtype == (torch.float32 if wrap is in_mixed_precision else torch.float64)
        assert (loss - losses[number]).abs() <= tolerance * losses[number]
    is_flat = isinstance(model, FullyShardedDataParallel)
    summon = FullyShardedDataParallel.summon_full_params
    with summon(model, with_grads=True) if is_flat else nullcontext():
        assert_beside(model, reference, tolerance=tolerance, least=1.0)
    optimizer.step()


def test_eager_code_after_a_compile_has_the_mesh_that_is_there(first_mesh: DeviceMesh) -> None:
    """DTensor remembers what it has traced, with fake meshes that equal the true one."""
    model = cp_inductor.parallelize(nn.Linear(8, 8), first_mesh, seq_dims={"input": 1})
    shapes = (2, 3, 8), (8, 8), (8,)
    torch.compile(model, backend="cp_aot_eager", fullgraph=True)(torch.randn(2, 6, 8))
    placed = zip(shapes, ([Shard(1)], [Replicate()], [Replicate()]), strict=True)
    out = F.linear(*(DTensor.from_local(torch.randn(size), first_mesh, at) for size, at in placed))
    assert out.device_mesh is first_mesh


class Llama(nn.Module):
    """That of transformers, whose norms and own loss are computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.model = models.make("Llama", num_hidden_layers=1)

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        return mean_loss(self.model(ids, position_ids=positions, use_cache=False).logits, labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "style", "ranks", "steps"),
    [
        (EAGER, "tied", 4, ("REENTRANT", "parallelize", "copy")),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (COMPILED, "llama", 4, ("parallelize",)),
                (AOT, "tied", 4, ("REENTRANT", "parallelize", "copy")),
                (AOT, "tied", 8, ("parallelize", "NO_REENTRANT", "fully_shard")),
            )
        ),
    ],
)
@on_ranks("ranks")
def test_split_layers_are_wrapped(
    form: str, style: str, ranks: int, steps: tuple[str, ...]
) -> None:
    """Layers that another axis splits, alone, in checkpoints, copies and FSDP2."""
    dp = ranks // 4
    mesh = init_device_mesh("cpu", (dp, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    model: Any
    if style == "llama":
        model, reference = (Llama().double() for _ in range(2))
        split_llama(model.model, mesh["tp"])
        tolerance = FLOAT32_TOLERANCE
    else:
        model, reference = make_model(1), make_model(1)
        split_over_tp(model.decoder, mesh["tp"], style)
        tolerance = TOLERANCE
    for step in steps:
        if step == "parallelize":
            cp_inductor.parallelize(model, mesh["cp"])
        elif step == "fully_shard":
            for part in (*model.decoder.layers, model):
                fully_shard(part, mesh=mesh["dp"])
        elif step == "copy":
            model = copy.deepcopy(model)
        else:
            checkpoint_layers(model.decoder, checkpoint_impl=CheckpointImpl[step])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
    run, rank = compiled(model, form, fullgraph=form == COMPILED), mesh["dp"].get_local_rank()
    for number in range(2):
        batches = [make_batch(2, 13, dp * number + replica) for replica in range(dp)]
        losses = [reference(*batch) for batch in batches]
        (sum(losses) / dp).backward()
        loss = run(*batches[rank])
        loss.backward()
        assert_beside(model, reference, (loss, losses[rank]), tolerance=tolerance, least=1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Recomputed(Training):
    """Reads all weights, and counts its calls, in what a checkpoint recomputes."""

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            decay = sum(weight.square().sum() for weight in self.parameters())
            return self.decoder.layers[0](x) + 1e-3 * decay

        x = checkpoint(compute, self.decoder.tokens(ids), use_reentrant=True)
        return mean_loss(self.decoder.head(x), labels)


@on_ranks(2)
def test_what_a_checkpoint_recomputes_reads_and_writes_as_the_forward() -> None:
    reference = Recomputed().double()
    model = cp_inductor.parallelize(copy.deepcopy(reference), world_mesh())
    assert_same_step(model, reference, model, *make_batch(2, 9))
    assert type(model.calls) is Tensor and model.calls == reference.calls == 2


@pytest.mark.parametrize("style", ["sequence", "loss"])
def test_styles_that_hand_on_dtensors_are_refused(style: str) -> None:
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        model = make_model(1)
        split_over_tp(model.decoder, mesh["tp"], style)
        with pytest.raises(
            UnsupportedPlacement, match=r"a style for a LayerNorm|hands on DTensors"
        ):
            cp_inductor.parallelize(model, mesh["cp"])(*make_batch(2, 16))


def test_what_is_gathered_are_weights(first_mesh: DeviceMesh) -> None:
    """Stored over the ranks of the sequence alone, weights are read whole, and activations stay."""
    model = cp_inductor.parallelize(make_model(1), first_mesh, weights=first_mesh)
    graphs = lowered_graphs(model, *make_batch(2, 16))
    gather = torch.ops._c10d_functional.all_gather_into_tensor.default
    nodes = (node for kind in ("forward", "backward") for node in graphs[kind].graph.nodes)
    # And truth values, where torch 2.15 checks the classes of `one_hot` in the graph.
    gathered = (node.meta["val"] for node in nodes if node.target is gather)
    shapes = {tuple(value.shape) for value in gathered if value.is_floating_point()}
    assert shapes and shapes <= {tuple(weight.shape) for weight in model.parameters()}


def test_small_gradients_are_summed_together(first_mesh: DeviceMesh) -> None:
    """Those of a tied weight, which are added behind their sums, alone."""
    model = cp_inductor.parallelize(make_model(1), first_mesh)
    backward = lowered_graphs(model, *make_batch(2, 16))["backward"].graph
    all_reduce = torch.ops._c10d_functional.all_reduce.default
    sums = backward.find_nodes(op="call_function", target=all_reduce)
    largest = max(node.meta["val"].numel() for node in sums)
    num_weights = sum(weight.numel() for weight in model.decoder.layers.parameters())
    assert len(sums) <= 4 and largest > 0.8 * num_weights


@on_ranks(3)
def test_gradients_are_summed_alike_where_shapes_are_formulas() -> None:
    """The last rank has what the others leave of 5 tokens, once lengths are symbols."""

    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.logsumexp(-1).mean()

    model = nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, 4), Loss()).double()
    reference = copy.deepcopy(model)
    run = torch.compile(cp_inductor.parallelize(model, world_mesh()), backend=AOT)
    for length in (7, 5):
        assert_same_step(model, reference, run, torch.arange(length)[None])


class Decayed(nn.Linear):
    """Reads counts and scales, some of a table, through copies, and writes to them."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("calls", torch.arange(1.0, 9.0))
        self.register_buffer("scales", torch.arange(16.0).view(8, 2).add(1))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.calls += 1
        out = out * self.calls.rsqrt() * self.scales[:, 1].clone()
        # What is read of all of it is of another shape.
        out = out.sin() * self.scales.view(2, 8).sqrt()[1]
        self.scales.mul_(0.5)
        return out.sin()


@pytest.mark.slow
@pytest.mark.parametrize("form", [AOT, COMPILED])
@on_ranks(2)
def test_a_backward_reads_what_its_forward_found(form: str) -> None:
    """Also once lengths are symbols, and for buffers that are DTensors."""
    torch.manual_seed(0)
    reference = Decayed().double()
    for is_stored in (False, True):
        model, expected = (copy.deepcopy(reference) for _ in range(2))
        cp_inductor.parallelize(model, world_mesh(), seq_dims={"x": 1})
        if is_stored:
            for name, buffer in model.named_buffers():
                model.register_buffer(name, distribute_tensor(buffer, world_mesh(), [Replicate()]))
        run = torch.compile(model, backend=form, fullgraph=True)
        for length in (6, 10):
            x = torch.randn(2, length, 8, dtype=torch.float64)
            for call in (run, expected):
                call(x).square().sum().backward()
            assert_same_gradients(model, expected)
        for buffer, other in zip(model.buffers(), expected.buffers(), strict=True):
            assert_within(whole(buffer), other, TOLERANCE)


class Shifted(nn.Module):
    """Adds each token to the next, twice, in checkpoints that exchange tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], x, use_reentrant=False)
        return self.head(x).sin()


@pytest.mark.slow
@pytest.mark.parametrize("form", [AOT, COMPILED])
@on_ranks(3, deadline_s=90)
def test_a_rank_without_tokens_recomputes_what_others_do(form: str) -> None:
    """The last has none: what costs it nothing to save, others recompute, and gather for it."""
    model = Shifted().double()
    expected = copy.deepcopy(model)
    cp_inductor.parallelize(model, world_mesh(), seq_dims={"x": 1})
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    for call in (torch.compile(model, backend=form, fullgraph=True), expected):
        call(x).sum().backward()
    assert_same_gradients(model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["layers", "a graph break"])
@on_ranks(2)
def test_compiled_in_parts(way: str) -> None:
    model, reference, batch = make_model(), make_model(), make_batch(2, 33)
    cp_inductor.parallelize(model, world_mesh())
    run: Any = model
    if way == "layers":
        for layer in model.decoder.layers:
            layer.compile(backend=AOT)
    else:
        model.decoder.layers[1].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        run = torch.compile(model, backend=AOT)
    assert_same_step(model, reference, run, *batch)
    assert counters["cp_inductor"]["sites_rewritten"] > 0
    if way == "layers":
        return
    # A graph of another model, of which Dynamo knows nothing of the first one's breaks.
    other = torch.compile(
        cp_inductor.parallelize(make_model(), world_mesh()), backend=AOT, fullgraph=True
    )
    assert_within(other(*batch).detach(), reference(*batch).detach(), TOLERANCE)


@pytest.mark.slow
@on_ranks(2)
def test_pickles_and_models_on_meta() -> None:
    """A pickle is one of one process, wherever it is loaded."""
    mesh, batch, reference = world_mesh(), make_batch(1, 9), make_model(1)
    model = cp_inductor.parallelize(make_model(1), mesh)
    reference(*batch).backward()
    with torch.device("meta"):
        empty = Training(1).double()
    cp_inductor.parallelize(empty, mesh).to_empty(device="cpu")
    empty.decoder.head.weight = empty.decoder.tokens.weight
    empty.load_state_dict(reference.state_dict())
    for other in (cp_inductor.parallelize(pickle.loads(pickle.dumps(model)), mesh), empty):
        other(*batch).backward()
        assert_same_gradients(other, reference)
    # It keeps its weights in a list as well, as it has read them.
    gru, x = nn.GRU(8, 8, batch_first=True), torch.randn(2, 9, 8)
    expected = gru(x)[0]
    cp_inductor.parallelize(gru, mesh, seq_dims={"input": 1}, outputs="whole", whole=[nn.GRU])
    gru(x)[0].mean().backward()
    for other in (copy.deepcopy(gru), pickle.loads(pickle.dumps(gru))):
        torch.testing.assert_close(other(x)[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
@on_ranks(3)
def test_hooks_and_frozen_layers(form: str) -> None:
    """Hooks of modules and of weights, and layers that are frozen for a step."""
    models = model, reference = make_model(), make_model()
    for each in models:
        each.decoder.layers[0].register_forward_hook(lambda module, given, out: out * 1.5)
        each.decoder.norm.register_full_backward_hook(lambda module, given, grads: (given[0] * 2,))
        each.decoder.layers[0].up.weight.register_hook(lambda gradient: gradient * 3)
    cp_inductor.parallelize(model, world_mesh())
    run, batch = compiled(model, form), make_batch(2, 13)
    for is_trained in (True, False, True):
        for each in models:
            each.zero_grad()
            each.decoder.layers[0].requires_grad_(is_trained)
        assert_same_step(model, reference, run, *batch)


@pytest.mark.slow
@on_ranks(2)
def test_evaluation_and_generation() -> None:
    pytest.importorskip("transformers")
    model, reference = (models.make("Llama", num_hidden_layers=1) for _ in range(2))
    ids = torch.arange(7)[None] + 3
    how = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = reference.generate(ids, **how)
    cp_inductor.parallelize(model, world_mesh())
    assert torch.equal(model.generate(ids, **how), expected)
    run = torch.compile(model, backend=AOT)
    cases = (torch.no_grad, model), (torch.inference_mode, model), (torch.inference_mode, run)
    for context, call in cases:
        with context():
            found, expected = (one(input_ids=ids, labels=ids) for one in (call, reference))
        assert abs(found.loss.item() - expected.loss.item()) <= 1e-6
        keys, others = (one.past_key_values.layers[0].keys for one in (found, expected))
        assert keys.placements == (Shard(2),)  # a cache is one of the defaults
        torch.testing.assert_close(whole(keys), others)


# --- What is cut ----------------------------------------------------------------------------------


class Drawn(nn.Module):
    """A random model of inputs of odd shapes, some of which are as long as sequences by chance."""

    def __init__(self, draw: random.Random, dims: int) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(VOCABULARY, dims), nn.Linear(dims, dims)
        self.order = draw.sample(range(4), 4)

    def forward(self, ids: Tensor, features: list[Tensor], record: dict[str, Tensor]) -> Tensor:
        x = self.tokens(ids)
        for number in self.order:
            if number == 0:
                x = x + self.mix(F.scaled_dot_product_attention(x, x, x, is_causal=True))
            elif number == 1:
                x = x + features[0].mean() + features[1].sum(0).mean(-1)[..., None, None]
            elif number == 2:
                x = torch.where(record["keep"][..., None] > 0, x, x.tanh())
            else:
                x = x + record["bias"].to(x.dtype).cumsum(0).mean()
        weights = record["keep"].to(x.dtype)
        return (x.square().mean(-1) * weights).sum() / weights.sum()


def draw_inputs(draw: random.Random) -> tuple[Any, ...]:
    batch, length = draw.randint(1, 3), draw.randint(2, 9)
    sizes = [batch, length, 1, 2, 5]
    generator = torch.Generator().manual_seed(draw.randint(0, 1 << 20))
    some = partial(torch.randn, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCABULARY, (batch, length), generator=generator)
    features = [some(*draw.choices(sizes, k=draw.randint(1, 4)))]
    features.append(some(draw.choice(sizes), 1, draw.choice(sizes)))
    bias = torch.randint(9, tuple(draw.choices(sizes, k=draw.randint(1, 3))), generator=generator)
    record = {"keep": (some(batch, length) > -1).long(), "bias": bias}
    record["keep"][:, 0] = 1
    return ids, features, record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "seeds", "form"),
    [
        (2, range(5), EAGER),
        pytest.param(3, range(100, 300), EAGER, marks=pytest.mark.long),
        pytest.param(2, range(300, 315), AOT, marks=pytest.mark.long),
    ],
)
@on_ranks("ranks")
def test_what_is_cut_never_changes_numbers(ranks: int, seeds: range, form: str) -> None:
    for seed in seeds:
        if form != EAGER:
            torch._dynamo.reset()
        inputs = draw_inputs(random.Random(seed))
        torch.manual_seed(0)
        model = Drawn(random.Random(seed), 8).double()
        reference = copy.deepcopy(model)
        cp_inductor.parallelize(model, world_mesh())
        assert_same_step(model, reference, compiled(model, form), *inputs)


def test_what_is_cut_and_what_comes_out(first_mesh: DeviceMesh) -> None:
    class Seeing(nn.Module):
        def forward(self, ids: Tensor, image: Tensor, sizes: Tensor) -> Any:
            seen.append((ids, image, sizes))
            return {"tokens": ids.float(), "sum": ids.sum()}

    seen: list[Any] = []
    model = cp_inductor.parallelize(Seeing(), first_mesh, seq_dims={"image": 2})
    given = torch.arange(10).view(2, 5), torch.randn(2, 3, 4), torch.tensor([3, 2])
    out = model(*given)
    assert [str(tensor.placements) for tensor in seen[0][:2]] == [
        "(Shard(dim=1),)",
        "(Shard(dim=2),)",
    ]
    assert type(seen[0][2]) is Tensor  # Python may read it
    assert type(out["sum"]) is Tensor and out["sum"] == 21
    assert isinstance(out["tokens"], DTensor)
    model(distribute_tensor(given[0], first_mesh, [Replicate()]), *given[1:])
    assert seen[1][0].placements == (Replicate(),)  # is taken as it is
    with pytest.raises(InvalidArgument, match=r"seq_dims\['image'\].*expected a dim"):
        model(given[0], torch.randn(3, 4), given[2])
    everything = cp_inductor.parallelize(Seeing(), first_mesh, outputs="whole")
    assert type(everything(*given)["tokens"]) is Tensor


def test_what_is_said_of_a_parallelized_model() -> None:
    """By the style of torch's `parallelize_module`; in its world, and in others."""
    with fake_rank(0, 2):
        style = cp_inductor.ParallelizeSequence(outputs="whole")
        model = parallelize_module(make_model(1), world_mesh(), style)
        report = cp_inductor.explain(model, *make_batch(2, 16))
        assert report.is_fine and report.attentions
        layer = parallelize_module(nn.Embedding(VOCABULARY, 8), world_mesh(), style).bfloat16()
    needed = cp_inductor.estimate(layer, make_batch(2, 16)[:1], mesh_shape=(4,), target="h100")
    assert str(needed).startswith("4 x")


# --- What is refused ------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Of whole sequences: its labels have no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = make_decoder(num_layers=1)

    def forward(self, ids: Tensor, positions: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.decoder(ids, positions).mean(1), classes)


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, AOT])
@on_ranks(2)
@torch.no_grad()  # there is no backward to compile, and ranks compare before the forward
def test_ranks_that_pass_other_batches_are_told(form: str) -> None:
    run = compiled(cp_inductor.parallelize(Classifier(), world_mesh()), form)
    ids, positions, _ = make_batch(2, 9)
    classes, rank = torch.tensor([1, 2]), dist.get_rank()
    for others in ((ids, positions, classes + 5 * rank), (ids.roll(rank), positions, classes)):
        run(ids, positions, classes)

        def go_on(others: tuple[Tensor, ...] = others) -> None:
            run(*others)
            run(ids, positions, classes)

        with pytest.raises(RanksDisagree, match=r"batch .*2.* numbers with"):
            go_on()


class Replaces(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 2
        return super().forward(x)


def refusals(mesh: DeviceMesh) -> Iterator[tuple[type[Exception], str, Any]]:
    plane = init_device_mesh("cpu", (2, 1))
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "cp"))
    model = cp_inductor.parallelize(make_model(), mesh)
    split = nn.Linear(4, 4)
    split.weight = nn.Parameter(distribute_tensor(split.weight.detach(), mesh, [Replicate()]))
    call = cp_inductor.parallelize
    yield InvalidArgument, "axes without names", lambda: call(make_model(), plane)
    yield InvalidArgument, "an nn.Module", lambda: call(make_model().forward, mesh)
    yield InvalidArgument, "first call", lambda: call(model, mesh, outputs="whole")
    yield InvalidArgument, "'sharded' or 'whole'", lambda: call(make_model(), mesh, outputs="all")
    yield InvalidArgument, "a dict of dims", lambda: call(make_model(), mesh, seq_dims={"ids": "1"})
    yield InvalidArgument, "has none", lambda: call(make_model(), mesh, whole=[nn.GRU])
    yield InvalidArgument, "a list of classes", lambda: call(make_model(), mesh, whole=nn.Linear)
    lazy = nn.Sequential(nn.LazyLinear(3))
    words = r"0.weight: .*with a shape.*call the model"
    yield UnsupportedPlacement, words, lambda: call(lazy, mesh)
    for other in ("text", plane):
        yield InvalidArgument, "of one axis", partial(call, make_model(), mesh, weights=other)
    for part in (split.bias.detach(), split.bias.detach()[2:]):
        views = nn.ParameterList([split.bias, part])
        yield UntiedWeights, "0 and 1: .*share memory", lambda v=views: call(v, mesh, weights=mesh)
    views = nn.Linear(4, 4)
    views.register_buffer("rows", views.weight.detach()[2:])
    yield UntiedWeights, "weight and rows", lambda: call(views, mesh, weights=mesh)
    yield UnsupportedPlacement, "weight", lambda: call(split, named["cp"])
    replaces = call(Replaces(4, 4), mesh)
    for copied in (replaces, copy.deepcopy(replaces)):
        given = partial(copied, torch.ones(2, 6, 4))
        yield UnsupportedWrite, r"weight\.data = .*copy_", given
    outer = nn.Sequential(call(nn.Linear(4, 4), mesh, gradients="partial"))
    yield InvalidArgument, "no other model.*are partial", lambda: call(outer, mesh)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    loss = partial(torch.func.functional_call, model, args=make_batch(2, 9))
    words = r"torch\.func.*loss\.backward"
    yield UnsupportedPlacement, words, lambda: torch.func.grad(loss)(weights)
    other = torch.compile(model, backend="eager")
    yield Exception, "cp_aot_eager", lambda: other(*make_batch(2, 9))


def test_what_cannot_be_meant_is_refused(first_mesh: DeviceMesh) -> None:
    for error, words, call in refusals(first_mesh):
        with pytest.raises(error, match=words):
            call()
    assert cp_inductor.parallelize(model := make_model(), first_mesh) is model
    assert cp_inductor.parallelize(model, first_mesh) is model


def test_weights_that_nobody_would_average() -> None:
    """They come after others were stored in shards over more ranks than share a sequence."""
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        weights = mesh["dp", "cp"]._flatten("weights")
        model = cp_inductor.parallelize(make_model(), mesh["cp"], weights=weights)
        model.decoder.head = nn.Linear(8, 8)
        with pytest.raises(UnsupportedPlacement, match=r"decoder.head.weight: .*before parallel"):
            model(*make_batch(2, 9))


@on_ranks(2)
def test_partial_gradients_that_nobody_sums_are_told() -> None:
    cp_inductor.reset()  # ranks look once
    model = cp_inductor.parallelize(make_model(), world_mesh(), gradients="partial")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*make_batch(2, 9)).backward()
    is_first = dist.get_rank() == 0  # says it for all
    told = pytest.warns(cp_inductor.SequenceWarning, match="train apart")
    with told if is_first else nullcontext():
        optimizer.step()


class Writes(nn.Module):
    """Whose forward doubles its input, and takes it out of a batch of any class."""

    def forward(self, batch: Any) -> Tensor:
        return batch["x"].mul_(2).sum() if batch["is_written"] else batch["x"].sum()


def test_a_batch_stays_as_it_is(first_mesh: DeviceMesh) -> None:
    model = cp_inductor.parallelize(Writes(), first_mesh, seq_dims={"x": 1})
    kinds = (dict, OrderedDict, type("Batch", (dict,), {}), partial(defaultdict, int))
    for kind in kinds:
        batch = kind({"x": (x := torch.ones(2, 6)), "is_written": False})
        for run in (model, torch.compile(model, backend=AOT)):
            run(batch)
            assert batch["x"] is x
    batch["is_written"] = True
    for run in (model, torch.compile(model, backend=AOT)):
        with pytest.raises(UnsupportedWrite, match=r"leaves its batch .*to x,"):
            run(batch)


def test_one_line_says_what_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    cp_inductor.reset()  # it was said of another such layer before
    with fake_rank(0, 2), caplog.at_level(logging.INFO, "cp_inductor"):
        model = cp_inductor.parallelize(nn.Embedding(9, 4), world_mesh())
        model(torch.zeros(2, 6, dtype=torch.long))
    assert "Embedding: each rank takes its part of input along dim 1; whole: -" in caplog.text
