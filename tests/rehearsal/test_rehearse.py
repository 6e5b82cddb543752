"""GPU programs are run: generated for sm_90, executed under Triton's interpreter on CPU ranks.

Every row of `tests.rehearsal.attentions.ROWS` computes outputs, loss and gradients, and is held
against attention on one process in float64: within 1e-5 in float32, and within half as much again
as one process in bfloat16. No row may have a finding. This file takes two minutes of a CPU, most
of it for compiling: programs are generated for each rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from cp_inductor.integrations.sinks import flex_sinks_on_cpu
from tests.rehearsal.attentions import ROWS, Row
from tests.rehearsal.mutated_programs import MISTAKES, WORLD, Mistake, Programs, programs_of, replay
from tests.rehearsal.rank import Job
from tests.rehearsal.rehearse import main, on_stage, rehearse
from tests.support.costs import listed_long
from tests.support.graphs import AttentionBlock
from tests.support.models import MODELS, has_flex, inputs_of, make, make_reference
from tests.support.ranks import RankError

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="read in torch 2.13"),
]


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=[pytest.mark.long] * row.long) for row in ROWS]
)
def test_numbers(stage: Executor, row: Row) -> None:
    report = rehearse(row.job(), stage=stage)
    assert not report.findings, str(report)
    for name, one in report.differences.items():
        bound = max(one.bound, row.bound * one.one_process)
        assert one.rehearsed <= bound, f"{name}\n{report}"
    compared = {"loss", "output 0", f"output {len(row.functions) - 1}"}
    assert compared <= set(report.differences), report.uncompared
    num_gradients = sum(name.startswith("gradient") for name in report.differences)
    assert num_gradients == 3 * len(row.functions) * row.grad
    assert all(rank.kernels for rank in report.ranks)
    # The first rank of a causal window needs nothing of the others in its forward.
    assert all(rank.received_bytes for rank in report.ranks[1:])
    assert report.ranks[0].received_bytes or not row.grad


def test_what_is_run_each_time() -> None:
    listed = {case.rpartition("test_numbers")[2] for case in listed_long()}
    rows = [row for row in ROWS if not row.long and f"[{row.name}]" not in listed]
    assert sum(len(row.functions) for row in rows) >= 18
    assert {row.world_size for row in rows} == {2, 3}
    assert sum(len(row.functions) for row in ROWS) >= 60
    assert {row.world_size for row in ROWS} == {2, 3, 4, 8}


def test_a_block_gets_what_one_process_gets(stage: Executor) -> None:
    torch.manual_seed(0)
    model, x = AttentionBlock(64, 4, has_norm=True), torch.randn(1, 34, 64)
    job = Job(model=model, args=(x.requires_grad_(),), placement=Shard(1))
    report = rehearse(job, stage=stage)
    expected = model(x)
    (0.5 * expected.square().sum()).backward()
    assert torch.allclose(report.outputs, expected, atol=1e-5)
    gradients = {name: one.grad for name, one in model.named_parameters()} | {"args[0]": x.grad}
    assert report.gradients.keys() == gradients.keys()
    for name, grad in report.gradients.items():
        assert torch.allclose(grad, gradients[name], atol=1e-4), name
    assert report.is_fine, str(report)
    for rank in report.ranks:
        assert "extern_kernels.addmm" in rank.replaced and rank.kernels
    sent = [rank.sent_bytes for rank in report.ranks]
    assert sum(sent) == sum(rank.received_bytes for rank in report.ranks) > 0
    text = str(report)
    assert "under Triton's interpreter, not on a device" in text


def dropped(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)


def test_dropout_runs_and_is_not_compared(stage: Executor) -> None:
    """Keys are hashed as numbers: as indices they would be int32 on a GPU, and Triton refuses."""
    tensors = (torch.ones(1, 2, 48, 16),) * 3
    job = Job(model=dropped, args=tensors, placement=Shard(2))
    report = rehearse(job, stage=stage)
    assert not report.findings, str(report)
    assert not report.is_fine and "random numbers" in report.uncompared
    # Half of the probabilities, twice as large.
    assert 0.9 < report.outputs.mean() < 1.1


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Within this context, gpt_oss computes its sinks as on a GPU, and its mask is traced."""
    # transformers makes a BlockMask with an option that torch warns of.
    ignored = torch._dynamo.config.patch(ignore_logging_functions={warnings.warn})
    with flex_sinks_on_cpu(), ignored:
        yield


def job_of(name: str, dtype: torch.dtype, world_size: int) -> Job:
    """Return the rehearsal of a model: its logits, its own loss, the gradients of its weights."""
    # Of a hybrid, the recurrence.
    types = MODELS[name].get("layer_types")
    model = make(name, num_hidden_layers=1, **({"layer_types": types[:1]} if types else {}))
    model = model.to(dtype)
    reference = None
    if has_flex(name):
        reference = make_reference(name, num_hidden_layers=1).to(dtype)
        # Its experts multiply in groups, for which torch has no float64.
        reference.set_experts_implementation("eager")
    return Job(
        model=model,
        kwargs={**inputs_of(model), "use_cache": False},
        world_size=world_size,
        placement=Shard(1),
        loss=itemgetter("loss"),
        within=as_on_a_gpu,
        reference=reference,
    )


# The block above has projections, norms and weights in every run.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype", "world_size"),
    [
        ("Llama", torch.bfloat16, 4),
        ("Mistral", torch.float32, 3),
        ("GptOss", torch.float32, 2),
        ("GptOss", torch.bfloat16, 2),
        # Recurrences: a chunk scan and a gated delta rule.
        ("Mamba2", torch.float32, 2),
        ("Qwen3_5", torch.float32, 2),
    ],
)
def test_a_model_of_transformers(
    stage: Executor, name: str, dtype: torch.dtype, world_size: int
) -> None:
    job = job_of(name, dtype, world_size)
    report = rehearse(job, stage=stage)
    if name == "Qwen3_5":
        # transformers computes its rule in float32 whatever it is given. Beside one in float64,
        # gradients of its decays are off by 4.2e-5 on one process as well.
        assert not report.findings, str(report)
        assert max(one.rehearsed for one in report.differences.values()) <= 1e-4
    else:
        assert report.is_fine, str(report)
    weights = {f"gradient of {name}" for name, _ in job.model.named_parameters()}
    assert weights | {"loss", "output 1"} <= set(report.differences)


def test_the_command_line(stage: Executor, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rehearsal.rehearse.open_stage", lambda: nullcontext(stage))
    assert main(["tests.examples_of_models:distributed", "--world-size", "2"]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: " in said for name in ("output 0", "loss"))
    assert main(["tests.examples_of_models", "--world-size", "2"]) == 1
    said = capsys.readouterr().err
    assert "CannotLoad" in said and "there are mixed, plain, attend" in said


# --- A rehearsal notices mistakes: each is put into generated text, which then runs on two ranks.

BOUND = 1e-2  # relative: bfloat16 through two tiles


@pytest.fixture(scope="module")
def programs() -> tuple[Programs, ...]:
    return tuple(programs_of(rank) for rank in range(WORLD))


def run(stage: Executor, programs: tuple[Programs, ...]) -> tuple[list[str], float]:
    findings, worst = on_stage(stage, WORLD, replay, programs)[0]
    return findings, worst


def test_programs_without_mistakes_are_fine(
    stage: Executor, programs: tuple[Programs, ...]
) -> None:
    findings, worst = run(stage, programs)
    assert not findings and worst < BOUND, (findings, worst)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistakes_are_noticed(
    stage: Executor, programs: tuple[Programs, ...], mistake: Mistake
) -> None:
    changed = mistake.apply(programs)
    assert changed is not None and changed != programs, "there is no such place in the programs"
    try:
        findings, worst = run(stage, changed)
    except RankError as error:
        findings, worst = [str(error)], 0.0
    assert findings or not worst < BOUND, f"not noticed: {worst}"
