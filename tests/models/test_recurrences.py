"""Recurrences on each rank's own tokens: kernels against float64, a user's own, states and borders.

Models of transformers are in test_models.py.
"""

from __future__ import annotations

import copy
import itertools
import sys
import types
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

import cp_inductor
from cp_inductor import (
    InvalidArgument,
    UnsupportedPlacement,
    cross_compile,
    pass_states,
    tokens_before,
)
from cp_inductor.integrations.recurrence_forms import (
    share_chunk_scan,
    share_keyed,
    share_short_convolution,
)
from cp_inductor.integrations.transformers_recurrences import find_recurrence
from cp_inductor.modules import along_sequence
from cp_inductor.modules.along_sequence import SharedSequence, last_tokens
from cp_inductor.modules.reading import computing_with
from cp_inductor.modules.recurrences import share_functions
from tests.support.combinations import AOT, EAGER, assert_beside, check_distributed
from tests.support.models import LENGTH, VOCABULARY, make
from tests.support.ranks import fake_mesh, on_ranks, run_ranks, world_mesh
from tests.support.recurrences import (
    TABLE,
    causal_conv1d_fn,
    delta_steps,
    errors_of_many,
    mamba2_steps,
    own_tokens,
)
from tests.support.reference import shard

# Of the largest element: what transformers' own forms lose in float32.
TOLERANCE = 1e-4


@pytest.mark.slow
def test_forms_beside_float64() -> None:
    pytest.importorskip("transformers")
    for name in TABLE:
        shared, alone, seed = run_ranks(5, errors_of_many, name, 5)[0]
        assert shared <= max(TOLERANCE, 2 * alone), (name, seed)


@pytest.mark.slow
def test_states_of_bfloat16_are_in_float32() -> None:
    pytest.importorskip("transformers")
    for name in ("chunk_gated_delta_rule", "chunk_kda", "mamba_chunk_scan", "causal_conv1d"):
        shared, alone, seed = run_ranks(3, errors_of_many, name, 5, torch.bfloat16)[0]
        assert shared <= 1.5 * alone, (name, seed)


def mean_of_past(tokens: Tensor, decay: Tensor, state: Tensor | None = None) -> Any:
    """A recurrence of a user's own: (B, S, D), (B, S, D) -> (B, S, D), (B, D)."""
    state = torch.zeros_like(tokens[:, 0]) if state is None else state
    outs = []
    for token, left in zip(tokens.unbind(1), decay.unbind(1), strict=True):
        state = left * state + token
        outs.append(state)
    return torch.stack(outs, 1), state


def share_mean(
    function: Any, tokens: Tensor, decay: Tensor, state: Tensor | None = None, scale: float = 1.0
) -> Any:
    out, final = function(tokens, decay)
    before, after = pass_states(final, decay=decay.prod(1), initial=state)
    return out + scale * decay.cumprod(1) * before[:, None], after


def scaled_mean_of_past(tokens: Tensor, decay: Tensor, state: Tensor | None = None) -> Any:
    """A function that calls one which is known, too."""
    out, state = mean_of_past(tokens, decay, state)
    return 0.7 * out, state


class Mixer(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.gate, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)
        self.first = nn.Parameter(torch.randn(6))
        self.is_checkpointed = is_checkpointed

    def scan(self, tokens: Tensor) -> Tensor:
        shifted = torch.cat([tokens_before(tokens, 2, 1), tokens], 1)[:, : tokens.shape[1]]
        decay = torch.sigmoid(self.gate(tokens + shifted))
        first = self.first.expand(tokens.shape[0], -1)
        out: Tensor = scaled_mean_of_past(self.inner(tokens), decay, first)[0]
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        if self.is_checkpointed:
            return checkpoint(self.scan, tokens, use_reentrant=False)
        return self.scan(tokens)


class Model(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 6)
        self.mixer = Mixer(is_checkpointed)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(self.mixer(self.before(tokens)))


def check_model(
    length: int,
    shape: tuple[int, ...],
    placements: list[Placement],
    form: str = EAGER,
    is_checkpointed: bool = False,
) -> int:
    """Compare with one process; return how many bytes a rank gathers at once at most."""
    cp_inductor.register_recurrence(mean_of_past, share_mean)
    share_scaled = partial(share_mean, scale=0.7)
    cp_inductor.register_recurrence(scaled_mean_of_past, share_scaled)
    model = Model(is_checkpointed).double()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp")[: len(shape)])
    x = torch.randn(2, length, 6, dtype=torch.float64)

    def split_a_weight(model: Any) -> None:  # tensor parallelism, whose ranks hold rows of it each
        places = [Shard(0) if place == Replicate() else Replicate() for place in placements]
        if Shard(0) in places:
            weight = distribute_tensor(model.mixer.gate.weight.detach(), mesh, places)
            model.mixer.gate.weight = nn.Parameter(weight)

    gathered: list[int] = []
    original = SharedSequence.gather

    def gather(sequence: SharedSequence, part: Tensor) -> Tensor:
        gathered.append(part.numel())
        return original(sequence, part)

    counting = patch.object(SharedSequence, "gather", gather)
    with counting if form == EAGER else nullcontext():
        how: Any = {"prepare": split_a_weight, "recurrent": (Mixer,)}
        out = check_distributed(model, x, mesh, placements, form, **how)
    # DTensor replicates what has fewer elements than there are ranks.
    assert length < mesh.size() or list(out.placements) == placements
    return max(gathered, default=0)


@pytest.mark.parametrize("form", [EAGER, AOT])
def test_a_recurrence_of_the_user(form: str) -> None:
    sizes = run_ranks(2, check_model, 7, (2,), [Shard(1)], form)
    if form == EAGER:
        assert sizes == [2 * 2 * 6] * 2  # a pair of (B, D), as many as two tokens before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "form"), [(1, EAGER), (5, EAGER), pytest.param(5, AOT, marks=pytest.mark.long)]
)
def test_ranks_with_few_tokens_and_none(length: int, form: str) -> None:
    """Of 5 tokens the last rank has none."""
    run_ranks(4, check_model, length, (4,), [Shard(1)], form)


@pytest.mark.slow
def test_beside_a_sharded_batch_and_within_a_checkpoint() -> None:
    run_ranks(4, check_model, 7, (2, 2), [Shard(0), Shard(1)])
    run_ranks(2, check_model, 7, (2,), [Shard(1)], AOT, True)


@pytest.mark.slow
def test_ranks_of_tensor_parallelism_share_the_tokens_they_all_hold() -> None:
    # 2 ranks hold 2 tokens each: of the 4 that share them the second and the last have none.
    run_ranks(4, check_model, 2, (2, 2), [Shard(1), Replicate()])


@pytest.mark.slow
@on_ranks(4)
def test_in_fsdp_and_in_a_checkpoint_of_a_layer() -> None:
    """FSDP2 of dp on what is distributed on cp, all of it in a checkpoint."""
    cp_inductor.register_recurrence(mean_of_past, share_mean)
    model: Any = checkpoint_wrapper(Model().double())
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp_inductor.parallelize(model, mesh["cp"], recurrent=(Mixer,))
    fully_shard(model.mixer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(2, 7, 6, dtype=torch.float64)
    own = distribute_tensor(x[mesh.get_local_rank("dp")][None], mesh["cp"], [Shard(1)])
    with implicit_replication():
        model(own).square().sum().backward()
    (reference(x).square().sum() / 2).backward()  # FSDP takes the mean of two
    assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters())
    assert_beside(model, reference, tolerance=1e-12)


def test_what_is_not_of_tokens_is_said_to_cost_the_whole(first_mesh: DeviceMesh) -> None:
    masked = cp_inductor.parallelize(Masked(), first_mesh, recurrent=(Masked,))
    tokens = distribute_tensor(torch.ones(2, 6, 6), first_mesh, [Shard(1)])
    pairs = distribute_tensor(torch.ones(2, 1, 6, 6), first_mesh, [Replicate()])
    with pytest.warns(UserWarning, match="Masked is given a tensor of 4 dims"):
        masked(tokens, pairs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masked(tokens, None)


# Two tokens before, and a pair, each 2 x (2, 6) in float32: of three others. Or the tokens of the
# neighbour, and three quarters of a pair and of two states.
@pytest.mark.parametrize(
    ("most", "gathers", "elements"), [(64, 2, 2 * 3 * (2 * 2 * 6)), (1, 3, (2 + 2 * 2 * 0.75) * 12)]
)
def test_explain_names_what_a_mixer_exchanges(most: int, gathers: int, elements: float) -> None:
    cp_inductor.register_recurrence(mean_of_past, share_mean)
    with fake_mesh(1, 4) as mesh, patch.object(along_sequence, "MOST_GATHERED", most):
        model = cp_inductor.parallelize(Model(), mesh, recurrent=(Mixer,))
        tokens = distribute_tensor(torch.ones(2, 8, 6), mesh, [Shard(1)])
        with implicit_replication():
            report = cp_inductor.explain(model, tokens)
    (scan,) = report.scans
    assert (scan.kind, scan.ranks, scan.gathers) == ("Mixer", 4, gathers)
    assert scan.received_bytes == elements * 4
    assert "mixer" in scan.path and f"{gathers} exchanges over 4 ranks" in str(report)


def exchange_always(function: Any, *args: Any) -> Any:
    """Call a function as where ranks are too many to gather the pairs of all."""
    with patch.object(along_sequence, "MOST_GATHERED", 1):
        return function(*args)


@pytest.mark.slow
def test_many_ranks_exchange_elements_of_states() -> None:
    pytest.importorskip("transformers")
    for name in ("chunk_gated_delta_rule", "mamba_chunk_scan"):
        shared, alone, seed = run_ranks(3, exchange_always, errors_of_many, name, 3)[0]
        assert shared <= max(TOLERANCE, 2 * alone), (name, seed)
    run_ranks(4, exchange_always, check_model, 5, (4,), [Shard(1)])


@pytest.mark.parametrize("is_matrix", [False, True])
def test_pairs_of_any_number_of_ranks_compose(is_matrix: bool) -> None:
    for ranks in (*range(1, 18), 64):
        size = 3 if is_matrix else 1
        kept, final = (
            torch.rand(ranks, 2, size, size).double(),
            torch.rand(ranks, 2, size, 1).double(),
        )
        state = torch.zeros(2, size, 1, dtype=torch.float64)
        states = [state := kept[at] @ state + final[at] for at in range(ranks)]
        composed = along_sequence._compose(kept, final, torch.matmul if is_matrix else torch.mul)
        torch.testing.assert_close(composed, torch.stack(states))


def count_exchanged(ranks: int, **kept: Tensor) -> int:
    counts: list[int] = []
    original = SharedSequence.exchange

    def exchange(sequence: SharedSequence, rows: Tensor, *sizes: Any) -> Tensor:
        counts.append(rows.numel())
        return original(sequence, rows, *sizes)

    state = torch.ones(2, 8, 32, 32)
    with (
        fake_mesh(5, ranks) as mesh,
        computing_with(sequence=SharedSequence(mesh, (0,), 4 * ranks)),
        patch.object(SharedSequence, "exchange", exchange),
    ):
        before, after = pass_states(state, **kept)
    assert before.shape == after.shape == state.shape
    return sum(counts)


def test_what_a_rank_receives_does_not_grow_with_their_number() -> None:
    decay, matrix, elements = torch.ones(2, 8, 1, 1), torch.ones(2, 8, 32, 32), 2 * 8 * 32 * 32
    # A pair of each element, and the state before and that after all.
    assert count_exchanged(128, decay=decay) == count_exchanged(512, decay=decay) == 4 * elements
    # All of a head's matrix, beside some columns of its state: a gather would have 1,024 of these.
    assert 3 * elements < count_exchanged(512, matrix=matrix) < 40 * elements


@pytest.mark.slow
def test_generated_code_gathers_pairs_and_nothing_else() -> None:
    """For sm_90. The scan from zeros is before the gather, and its backward is a scatter."""
    pytest.importorskip("triton")
    cp_inductor.register_recurrence(mean_of_past, share_mean)
    with fake_mesh(1, 4) as mesh:
        model = cp_inductor.parallelize(Model(), mesh, recurrent=(Mixer,))
        tokens = distribute_tensor(torch.ones(2, 8, 6), mesh, [Shard(1)])
        with implicit_replication():
            code = cross_compile(model, (tokens,), world_size=4, rank=1).code
    gather = "torch.ops._c10d_functional.all_gather_into_tensor.default("
    scatter = "torch.ops._c10d_functional.reduce_scatter_tensor.default("
    # Two tokens of (2, 6) before; decay and state, 2 x (2, 6).
    order = FileCheck().check(gather).check_same("(1, 2, 2, 6)").check("sigmoid")
    order.check(gather).check("(4, 24)").check("cumprod").run(code["forward"])
    FileCheck().check(scatter).check_same("(4, 24)").run(code["backward"])
    sums = "torch.ops._c10d_functional.all_reduce_.default("  # all gradients in one
    for text, exchange, more in ((code["forward"], gather, 0), (code["backward"], scatter, 1)):
        assert text.count(exchange) == 2
        assert text.count(sums) == more
        assert text.count("_c10d_functional.wait_tensor.default(") == 2 + more


class Masked(nn.Module):
    def forward(self, tokens: Tensor, pairs: Tensor | None) -> Tensor:
        return tokens + tokens_before(tokens, 1, 1)


def test_on_one_process_there_is_nothing_before() -> None:
    tokens, decay = torch.randn(2, 5, 3), torch.rand(2, 5, 3)
    assert tokens_before(tokens, 2, 1).equal(torch.zeros(2, 2, 3))
    assert last_tokens(tokens, 7, 1)[:, 2:].equal(tokens)
    first = torch.randn(2, 3)
    out, after = share_mean(mean_of_past, tokens, decay, first)
    expected, final = mean_of_past(tokens, decay, first)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(after, final)


def test_states_are_not_cast() -> None:
    matrix = torch.randn(2, 4, 4)
    state = torch.randn(2, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        before, after = pass_states(state, matrix=matrix, initial=state)
    assert before.dtype == after.dtype == torch.float32
    assert after.equal(matrix @ state + state)


def test_a_mixer_that_calls_other_functions_runs_on_the_whole() -> None:
    """Such as one of another version, which holds its functions as attributes."""
    mixer = type("MambaMixer", (Sum,), {"__module__": "transformers.models.mamba.other"})()
    assert find_recurrence(mixer) is None


def test_refusals() -> None:
    with pytest.raises(TypeError, match="either decay= or matrix="):
        pass_states(torch.ones(2))
    with pytest.raises(InvalidArgument, match="a function whose arguments have names"):
        cp_inductor.register_recurrence(lambda *tokens: tokens, share_mean)
    with fake_mesh(0, 2) as mesh:
        tokens = distribute_tensor(torch.ones(2, 6, 6), mesh, [Shard(1)])
        with pytest.raises(UnsupportedPlacement, match=r"parallelize\(\.\.\., recurrent=\)"):
            tokens_before(tokens, 1, 1)
        summed = cp_inductor.parallelize(Sum(), mesh, recurrent=(Sum,))
        with pytest.raises(UnsupportedPlacement, match=r"first result is \(B, S, \.\.\.\)"):
            summed(tokens)
        alone = cp_inductor.parallelize(nn.Identity(), mesh, recurrent=(nn.Identity,))
        with pytest.raises(UnsupportedPlacement, match="called no known function"):
            alone(tokens)
        layers = nn.Sequential(Asks(True), Asks(False))  # the first says nothing of the second
        cp_inductor.parallelize(layers, mesh, recurrent=(Asks,))
        for run in (layers, torch.compile(layers, backend="cp_aot_eager")):
            with pytest.raises(UnsupportedPlacement, match="called no known function"):
                run(tokens)
        strided = cp_inductor.parallelize(Strided(), mesh, recurrent=(Strided,))
        with pytest.raises(UnsupportedPlacement, match="a causal convolution, padded with 1 zeros"):
            strided(tokens)
        with computing_with(sequence=SharedSequence(mesh, (0,), 4)):
            ones = torch.ones(1, 2, 1, 1)
            for refused in (
                *({"gv": ones}, {"reverse": True}, {"beta": ones}),
                *({"state_v_first": True}, {"return_intermediate_states": True}),
            ):
                with pytest.raises(UnsupportedPlacement, match="ranks can compute their parts"):
                    share_keyed(None, q=ones, k=ones, v=ones, **refused)
            borders = torch.tensor([0, 4])
            with pytest.raises(UnsupportedPlacement, match="a state of packed documents"):
                share_keyed(None, q=ones, k=ones, v=ones, cu_seqlens=borders, initial_state=ones)
            with pytest.raises(UnsupportedPlacement, match="a state of packed documents"):
                share_chunk_scan(None, seq_idx=borders[None], return_final_states=True)


class Asks(nn.Module):
    def __init__(self, is_asking: bool) -> None:
        super().__init__()
        self.is_asking = is_asking

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + tokens_before(tokens, 1, 1) if self.is_asking else tokens.cumsum(1)


class Sum(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.sum(1) + last_tokens(tokens, 1, 1)[:, 0]


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(6, 6, 2, stride=2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.convolution(tokens.transpose(1, 2)).transpose(1, 2)


# Stand-ins with the signatures of fla and mamba_ssm, which need a GPU.


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Any:
    borders = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outs, finals = [], []
    for number, (first, last) in enumerate(itertools.pairwise(borders)):
        part = (t[:, first:last] for t in (q, k, v, g, beta))
        begin = None if initial_state is None else initial_state[number : number + 1]
        out, final = delta_steps(*part, begin if cu_seqlens is not None else initial_state)
        outs.append(out)
        finals.append(final)
    return torch.cat(outs, 1), torch.cat(finals) if output_final_state else None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Any = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Any = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    out, final = mamba2_steps(x, dt, A, B, C, D, dt_bias, initial_states, seq_idx)
    out = out if z is None else out * F.silu(z)
    return (out, final) if return_final_states else out


def share_delta(**given: Any) -> Any:
    return share_keyed(chunk_gated_delta_rule, **given)[0]


def convolve(x: Tensor, **given: Any) -> Any:
    return share_short_convolution(causal_conv1d_fn, x=x.mT, **given).mT


DOCUMENTS = [(5, 4, 7), (1, 1, 1, 13), (8, 8), (16,), (3, 1, 12), (7, 12, 13)]


@pytest.mark.slow
@on_ranks(5)
def test_documents_are_apart() -> None:
    """Each document is as if it were alone, forward and backward, wherever its borders fall."""
    mesh, generator = world_mesh(), torch.Generator().manual_seed(0)
    for lengths in DOCUMENTS:
        length = sum(lengths)
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
        borders = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        delta = dict(zip("qkv", normal(3, 1, length, 2, 3), strict=True))
        delta |= {"g": -normal(1, length, 2).exp(), "beta": normal(1, length, 2).sigmoid()}
        mamba = {name: normal(1, length, 2, 3) for name in "xz"} | {"dt": normal(1, length, 2)}
        mamba |= {name: normal(1, length, 1, 4) for name in "BC"}
        weights = {"A": -normal(2).exp(), "D": normal(2), "dt_bias": normal(2)}
        scan = {**weights, "dt_softplus": True, "chunk_size": 4}
        of_tokens = {"seq_idx": own_tokens(numbers, 1)}
        cases = [
            (share_delta, delta, {}, {"cu_seqlens": borders}),
            (partial(share_chunk_scan, mamba_chunk_scan_combined), mamba, scan, of_tokens),
            (convolve, {"x": normal(1, length, 3)}, {"weight": normal(3, 4)}, of_tokens),
        ]
        for share, tokens, more, packed in cases:
            leaves = {key: value.clone().requires_grad_() for key, value in tokens.items()}
            documents = itertools.pairwise(borders.tolist())
            outs = [
                share(**{key: value[:, first:last] for key, value in leaves.items()}, **more)
                for first, last in documents
            ]
            expected = torch.cat(outs, 1)
            upstream = normal(*expected.shape)
            wanted = torch.autograd.grad(expected, list(leaves.values()), upstream)
            parts = {key: own_tokens(value, 1) for key, value in leaves.items()}
            own, grad = (shard(t, mesh.get_rank(), mesh.size(), 1) for t in (expected, upstream))
            with computing_with(sequence=SharedSequence(mesh, (0,), length)):
                out = share(**parts, **more, **packed)[:, : own.shape[1]]
            torch.testing.assert_close(out, own)
            found = torch.autograd.grad(out, list(leaves.values()), grad, materialize_grads=True)
            for one, other in zip(found, wanted, strict=True):
                dist.all_reduce(one)
                torch.testing.assert_close(one, other)


def test_functions_are_known_wherever_a_module_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(tokens: Tensor, decay: Tensor) -> Any:
        return mean_of_past(tokens, decay)

    elsewhere = types.ModuleType("elsewhere")
    module = nn.Identity()
    elsewhere.own_scan = module.scan = scan  # type: ignore[assignment,attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    names: dict[str, Any] = {"__name__": "script", "nn": nn, "scan": scan}
    exec("class Mixer(nn.Module):\n    def forward(self, x): return scan(x, x)[0]", names)

    for form in (share_mean, partial(share_mean, scale=0.7)):  # the second is corrected
        cp_inductor.register_recurrence(names["scan"], form)
        share_functions([module, names["Mixer"]()], {}, is_everywhere=True)
        for found in (elsewhere.own_scan, module.scan, names["scan"]):  # type: ignore[attr-defined]
            assert found.__wrapped__ is scan
            assert found._cp_form is form


BATCHES = 10


@pytest.mark.long
@on_ranks(2)
def test_packed_batches_of_a_hybrid() -> None:
    """Batches of other documents each, through kernels that reset their states."""
    pytest.importorskip("transformers")
    from transformers.models.bamba import modeling_bamba as bamba

    mesh, reference, model = world_mesh(), make("Bamba"), make("Bamba")
    originals = bamba.mamba2_chunk_scan, bamba.causal_conv1d_fn
    torch.manual_seed(0)
    batches = []
    for _ in range(BATCHES):
        ends = (torch.randperm(LENGTH - 2)[: int(torch.randint(1, 6, ()))] + 1).sort()[0].tolist()
        ids = torch.randint(3, VOCABULARY, (1, LENGTH))
        batches.append((ids, [b - a for a, b in itertools.pairwise([0, *ends, LENGTH])]))
    losses = []
    for ids, lengths in batches:
        logits = [reference(one, use_cache=False).logits[0, :-1] for one in ids.split(lengths, 1)]
        labels = [one[0, 1:] for one in ids.split(lengths, 1)]
        losses.append(F.cross_entropy(torch.cat(logits), torch.cat(labels)))
        losses[-1].backward()

    bamba.mamba2_chunk_scan = mamba_chunk_scan_combined
    bamba.causal_conv1d_fn = causal_conv1d_fn
    try:
        cp_inductor.parallelize(model, mesh)
        run = torch.compile(model, backend="cp_aot_eager", fullgraph=True, dynamic=False)
        for (ids, lengths), expected in zip(batches, losses, strict=True):
            positions = torch.cat([torch.arange(length) for length in lengths])[None]
            numbers = torch.repeat_interleave(torch.tensor(lengths))[None].int()
            given = {"input_ids": ids, "position_ids": positions, "seq_idx": numbers}
            given["labels"] = ids.masked_fill(positions == 0, -100)
            shards = {k: distribute_tensor(v, mesh, [Shard(1)]) for k, v in given.items()}
            with implicit_replication():
                loss = run(**shards, use_cache=False).loss
                loss.backward()
            assert abs(loss.item() - expected.item()) <= 2e-5 * expected.item(), lengths
    finally:
        bamba.mamba2_chunk_scan, bamba.causal_conv1d_fn = originals
    assert_beside(model, reference, tolerance=2e-5, least=1e-3)
