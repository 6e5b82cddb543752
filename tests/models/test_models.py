"""Models of transformers over a sharded sequence, each beside itself on one process."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import cp_inductor
from tests.support import models
from tests.support.combinations import AOT, EAGER, assert_beside, compiled
from tests.support.models import (
    HYBRIDS,
    MIXED,
    MODELS,
    PADDED,
    PAGE,
    SCRIPT,
    check,
    is_whole_name,
    make_reference,
    packed_inputs,
    tells_apart,
    verdicts,
)
from tests.support.pages import read_part
from tests.support.ranks import on_ranks, run_ranks, world_mesh

pytest.importorskip("transformers")

# States go through a rank that is neither the first nor the last.
ON_THREE = {*HYBRIDS, "Mistral", "WhisperForConditionalGeneration", "DeiTModel"}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    run_ranks(3 if name in ON_THREE else 2, check, name)


# Packed documents of other models are in tests/run/test_batches.py.
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if not is_whole_name(name)])
def test_packed(name: str) -> None:
    if name in MIXED:
        assert not tells_apart(make_reference(name), packed_inputs())
    else:
        run_ranks(2, check, name, "packed")


@pytest.mark.long
@pytest.mark.parametrize("name", PADDED)
def test_padded(name: str) -> None:
    run_ranks(2, check, name, "padded")


def test_the_page_names_every_model_and_what_was_said() -> None:
    assert read_part(PAGE, SCRIPT) == verdicts(), "run python -m tests.support.models"


# --- What models of transformers can do beside a loss: logits of routers, depth that is drawn.

pytest.importorskip("transformers")

assert_beside = partial(assert_beside, tolerance=2e-5, least=1e-3)  # float32


def run_both(name: str, form: str, sizes: dict[str, Any], **how: Any) -> tuple[Any, ...]:
    """Compute a model over shards, and on one process; return both, and their results."""
    model, reference = (models.make(name, **sizes).train() for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that mixers are not sharded
        begin = [type(one) for one in model.modules() if type(one).__name__ in models.BEGINNINGS]
        cp_inductor.parallelize(model, world_mesh(), whole=begin)
    inputs, results = models.inputs_of(reference), []
    for call in (compiled(model, form, fullgraph=True, dynamic=False), reference):
        torch.manual_seed(1)
        result = call(**inputs, **how)
        with implicit_replication():  # a result with tokens beside one without, in eager code
            models.loss_of(lambda result=result, **_: result, inputs).backward()
        results.append(result)
    return model, reference, *results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"), [("JetMoe", EAGER), pytest.param("Mixtral", AOT, marks=pytest.mark.long)]
)
@on_ranks(2)
def test_experts_are_balanced_over_all_tokens(name: str, form: str) -> None:
    how = {"output_router_logits": True, "use_cache": False}
    model, reference, found, expected = run_both(name, form, {}, **how)
    assert expected.aux_loss > 0.01
    losses = [(getattr(found, kind), getattr(expected, kind)) for kind in ("aux_loss", "loss")]
    assert_beside(model, reference, *losses)


@pytest.mark.slow
@pytest.mark.parametrize("form", [EAGER, pytest.param(AOT, marks=pytest.mark.long)])
@on_ranks(2)
def test_stochastic_depth_over_sharded_images(form: str) -> None:
    """Whole residual blocks are dropped, per image: every rank draws the same."""
    model, reference, found, expected = run_both("BeitModel", form, {"drop_path_rate": 0.5})
    assert_beside(model, reference, (found.last_hidden_state, expected.last_hidden_state))
    assert found.last_hidden_state.placements == (Shard(1),)
    images = torch.ones(1, 3, 16, 16).expand(8, -1, -1, -1)
    first, *others = reference(images).last_hidden_state.detach()
    assert not all(torch.equal(first, image) for image in others)  # some lost what others kept


# --- What encoder-decoders of transformers make of labels whose sequence is sharded.

transformers = pytest.importorskip("transformers")

SIZES = {**models.SIZES, **models.MODELS["WhisperForConditionalGeneration"]}
SIZES |= {"decoder_start_token_id": 2, "pad_token_id": 1}
# By a method, by a function of the module, and by one that looks for the last token.
NAMES = {"Bart": 3, "Whisper": 2, "MBart": 2}


def make(name: str) -> nn.Module:
    model = getattr(transformers, f"{name}ForConditionalGeneration")
    made: nn.Module = model(model.config_class(**SIZES))
    return made


class Stop(Exception):
    """Ends a forward, with what it was given."""


def given_to(model: nn.Module, **inputs: Tensor) -> Tensor | None:
    """Return the decoder's inputs that a model calls its inner model with."""

    def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise Stop(kwargs.get("decoder_input_ids"))

    inner = model.model.register_forward_pre_hook(stop, with_kwargs=True)  # type: ignore
    try:
        with pytest.raises(Stop) as stopped:
            model(**inputs)
    finally:
        inner.remove()
    found: Tensor | None = stopped.value.args[0]
    return found


@pytest.mark.parametrize(("name", "ranks"), NAMES.items())
@on_ranks("ranks")
def test_labels_of_all_ranks_are_shifted(name: str, ranks: int) -> None:
    mesh = world_mesh()
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(3, 32, (2, 7), generator=generator)
    labels[0, -2:] = -100
    main = "input_features" if name == "Whisper" else "input_ids"
    inputs = {main: torch.ones(2, 7, dtype=torch.long), "labels": labels}
    expected = given_to(make(name), **inputs)
    model = cp_inductor.parallelize(make(name), mesh)
    shards = {key: distribute_tensor(value, mesh, [Shard(1)]) for key, value in inputs.items()}
    found = given_to(model, **shards)
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(1),)
    assert expected is not None
    assert torch.equal(found.full_tensor(), expected)
    # What is given is used.
    own = distribute_tensor(labels.clamp(min=0), mesh, [Shard(1)])
    assert given_to(model, **shards, decoder_input_ids=own) is own


def test_whole_labels_and_a_second_call(first_mesh: DeviceMesh) -> None:
    model = cp_inductor.parallelize(make("Bart"), first_mesh)
    cp_inductor.parallelize(model, first_mesh)
    assert len(model._forward_pre_hooks) == 1
    whole = distribute_tensor(torch.ones(2, 7, dtype=torch.long), first_mesh, [Replicate()])
    (hook,) = model._forward_pre_hooks.values()
    hook_of_model: Any = hook
    assert hook_of_model(model, (), {"labels": whole}) is None


def test_the_loss_of_models_whose_class_names_none(first_mesh: DeviceMesh) -> None:
    model = models.make("GPT2LMHeadModel")
    assert model.loss_type is None
    assert cp_inductor.parallelize(model, first_mesh).loss_type == "ForCausalLM"
    masked = models.make("BertForMaskedLM")
    named = masked.loss_type
    assert cp_inductor.parallelize(masked, first_mesh).loss_type == named
