"""Unmodified Hugging Face models, sharded along the sequence, against the same models whole."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    PrepareModuleOutput,
    parallelize_module,
)

from cp_inductor import flex_gradients_on_cpu
from tests.support.models import SIZES, STILL, make, make_reference
from tests.support.ranks import run_ranks, world_mesh

transformers = pytest.importorskip("transformers")
from cp_inductor.integrations.sinks import flex_sinks_on_cpu  # noqa: E402

# Losses are computed in float32 by most models, whatever the rest is in.
LOSS_TOLERANCE = 1e-6
# Relative to the largest of a tensor; a gradient that is zero but for rounding has no magnitude.
TOLERANCE = 1e-9
INDUCTOR_TOLERANCE = 1e-5


def tiny(name: str, **more: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of the table of models."""
    return partial(make, name, **more)


def make_gpt2() -> nn.Module:
    model = make("GPT2LMHeadModel", bos_token_id=0, eos_token_id=0)
    model.loss_type = "ForCausalLM"  # not set, it is, with a warning in the middle of the graph
    return model


def make_vit() -> nn.Module:
    sizes = {**SIZES, **STILL, "image_size": 32, "patch_size": 4}
    torch.manual_seed(0)
    del sizes["vocab_size"], sizes["max_position_embeddings"]
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def make_gpt_oss(**more: Any) -> nn.Module:
    """Make a model of experts whose attention has sinks that are not zero."""
    model = make("GptOss", **more)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model


def checkpointed(plain: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Compute every layer again in the backward; what its mask is computed from is outside."""

    def of() -> nn.Module:
        model = plain()
        model.activation_checkpointing_enable()
        return model.train()

    return of


@dataclass(frozen=True)
class Case:
    """A model, what it is given, and what its masks are to be recognized as.

    Attributes:
        inputs: beside input_ids: "packed" positions, "padding", "decoder", "pixels".
        masks: as they are described in the log, in any order.
        reference: makes the model on one process, if that is to attend in another way.
        tolerance: of interpreted graphs.
        context: in which the model is compiled and run.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ()
    masks: frozenset[str] = frozenset({"causal"})
    seq_len: int = 32
    batch: int = 1
    keywords: dict[str, Any] = field(default_factory=lambda: {"use_cache": False})
    reference: Callable[[], nn.Module] | None = None
    tolerance: float = TOLERANCE
    context: Callable[[], AbstractContextManager[None]] = nullcontext


LLAMA = tiny("Llama")
MISTRAL = tiny("Mistral")
FLEX = "flex_attention"
CASES = (
    Case("llama", LLAMA),
    Case("llama, packed", LLAMA, ("packed",), frozenset({"causal, document equality"}), 31, 2),
    Case(
        "llama, packed, checkpointed",
        checkpointed(LLAMA),
        ("packed",),
        frozenset({"causal, document equality"}),
        31,
        2,
    ),
    Case("mistral", MISTRAL, (), frozenset({"causal, window 12"})),
    Case(
        "mistral, padded",
        MISTRAL,
        ("padding",),
        frozenset({"causal, key padding, window 12"}),
        33,
        2,
    ),
    Case("qwen2", tiny("Qwen2"), batch=2),
    Case("gpt2", make_gpt2, ("padding",), frozenset({"causal, key padding"}), 31, 2),
    Case("gpt-neox", tiny("GPTNeoX"), seq_len=35),
    Case(
        "bert",
        tiny("BertForMaskedLM"),
        ("padding",),
        frozenset({"key padding"}),
        31,
        2,
        {},
    ),
    Case(
        "bart",
        tiny("BartForConditionalGeneration"),
        ("padding", "decoder"),
        frozenset({"key padding", "causal"}),
        33,
        2,
    ),
    Case(
        "t5",
        tiny("T5ForConditionalGeneration"),
        ("decoder",),
        frozenset({"full, bias", "causal, bias", "full"}),
        33,
        2,
    ),
    Case(
        "llama, flex, packed",
        tiny("Llama", attn_implementation=FLEX),
        ("packed",),
        frozenset({"causal, document equality"}),
        31,
        2,
        reference=LLAMA,
    ),
    Case(
        "mistral, flex",
        tiny("Mistral", attn_implementation=FLEX),
        (),
        frozenset({"causal, window 12"}),
        33,
        2,
        reference=MISTRAL,
    ),
    Case(
        "gemma2, flex",
        tiny("Gemma2"),
        masks=frozenset(
            {"causal, score 50*Tanh(0.02*s)", "causal, window 12, score 50*Tanh(0.02*s)"}
        ),
        seq_len=33,
        reference=partial(make_reference, "Gemma2"),
        tolerance=1e-6,  # its own attention takes the softmax in float32
    ),
    Case(
        "gpt_oss, flex",
        partial(make_gpt_oss, experts_implementation="batched_mm"),
        masks=frozenset({"causal", "causal, window 12"}),
        seq_len=30,
        batch=2,
        reference=partial(
            make_gpt_oss, attn_implementation="eager", experts_implementation="eager"
        ),
        context=flex_sinks_on_cpu,
    ),
    Case("vit", make_vit, ("pixels",), frozenset({"full"}), 65, 2, {}),
)


def inputs_of(case: Case) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, 64, (case.batch, length), generator=generator)

    if "pixels" in case.inputs:
        pixels = torch.randn(case.batch, 3, 32, 32, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.arange(case.batch)}
    inputs = {"input_ids": tokens(case.seq_len)}
    inputs["labels"] = inputs["input_ids"].clone()
    if "packed" in case.inputs:
        first = case.seq_len - 11
        positions = torch.cat([torch.arange(first), torch.arange(11)])
        inputs["position_ids"] = positions[None].repeat(case.batch, 1)
    if "padding" in case.inputs:
        mask = torch.ones_like(inputs["input_ids"])
        mask[0, -5:] = 0
        inputs["attention_mask"] = mask
        inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    if "decoder" in case.inputs:
        inputs["decoder_input_ids"] = tokens(case.seq_len - 7)
        inputs["labels"] = tokens(case.seq_len - 7)
    return inputs


def sharded(case: Case, model: nn.Module, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Distribute the inputs; of images, whose sequence is made inside, distribute that."""
    if "pixels" not in case.inputs:
        return {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in inputs_of(case).items()}
    distribute_module(model, mesh)
    first, last = model.vit.layers[0], model.vit.layers[-1]
    whole, pieces = (Replicate(), None), (Shard(1), None)
    parallelize_module(
        first,
        mesh,
        PrepareModuleInput(
            input_layouts=whole, desired_input_layouts=pieces, use_local_output=False
        ),
    )
    parallelize_module(
        last,
        mesh,
        PrepareModuleOutput(
            output_layouts=(Shard(1),),
            desired_output_layouts=(Replicate(),),
            use_local_output=False,
        ),
    )
    return {n: distribute_tensor(t, mesh, [Replicate()]) for n, t in inputs_of(case).items()}


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def masks_found() -> Iterator[set[str]]:
    """Collect what the log says about masks."""
    found: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " on axis 'cp'" in record.getMessage():
                found.add(record.getMessage().split("): ")[1].split(" on axis")[0])

    log, handler = logging.getLogger("cp_inductor"), Handler()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def run_case(case: Case, backend: str, mesh: DeviceMesh) -> None:
    # Inductor reorders what models compute in float32, such as rotary angles.
    tolerance = case.tolerance if backend == "cp_aot_eager" else INDUCTOR_TOLERANCE
    torch._dynamo.reset()
    counters.clear()
    models = []
    for build in (case.make, case.reference or case.make):
        models.append(build().double())
    model, reference = models
    expected = reference(**inputs_of(case), **case.keywords)
    expected.loss.backward()
    inputs = sharded(case, model, mesh)
    with (
        implicit_replication(),
        flex_gradients_on_cpu(),
        case.context(),
        # transformers makes a BlockMask with an option that torch warns of.
        torch._dynamo.config.patch(ignore_logging_functions={warnings.warn}),
        masks_found() as masks,
    ):
        compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
        result = compiled(**inputs, **case.keywords)
        result.loss.backward()
    assert masks == case.masks, masks
    assert counters["cp_inductor"]["sites_rewritten"] >= 2
    difference = (whole_of(result.loss) - expected.loss).abs().item()
    assert difference <= LOSS_TOLERANCE * expected.loss.item(), f"loss: {difference}"
    check_close("logits", whole_of(result.logits), expected.logits, tolerance)
    for (name, p), (_, q) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            check_close(name, whole_of(p.grad), q.grad, tolerance)


def check_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    difference = (actual - expected).abs().max().item()
    bound = tolerance * max(1e-3, expected.abs().max().item())
    assert difference <= bound, f"{name}: {difference} > {bound}"


def run_named(name: str, backend: str) -> None:
    mesh = world_mesh()
    (case,) = (case for case in CASES if case.name == name)
    run_case(case, backend, mesh)


# Ids under a mask, and images; the others are of the long tail. Packed documents are in
# tests/run/test_batches.py, shared keys in tests/models/test_models.py, and sinks in
# tests/passes/test_flex_attention.py.
ALWAYS = {"mistral, padded", "vit"}
EVERY_MODEL = [
    pytest.param(case.name, world_size, marks=pytest.mark.slow if is_always else pytest.mark.long)
    for case in CASES
    for world_size in (2, 3)
    for is_always in (world_size == 2 and case.name in ALWAYS,)
]


@pytest.mark.parametrize(("name", "world_size"), EVERY_MODEL)
def test_models(name: str, world_size: int) -> None:
    run_ranks(world_size, run_named, name, "cp_aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama, packed", "mistral", "t5"])
def test_models_through_inductor(name: str) -> None:
    run_ranks(2, run_named, name, "cp_inductor", deadline_s=1200)
