"""Models of transformers over a sharded sequence, each beside itself on one process."""

from __future__ import annotations

import pytest

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
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

# One of experts, whose keys are shared and values narrower; sinks; a hybrid.
ALWAYS = {"DeepseekV3", "GptOss", "Bamba"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ALWAYS else pytest.mark.long)
        for name in MODELS
    ],
)
def test_model(name: str) -> None:
    run_ranks(2, check, name)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*sorted(HYBRIDS), "Mistral", "WhisperForConditionalGeneration", "DeiTModel"]
)
def test_on_three_ranks(name: str) -> None:
    run_ranks(3, check, name)


# Packed documents of other models are in tests/run/test_batches.py.
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in MODELS if not is_whole_name(name)])
def test_packed(name: str) -> None:
    if name in MIXED:
        assert not tells_apart(make_reference(name), packed_inputs())
    else:
        run_ranks(2, check, name, "packed")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "Mistral" else pytest.mark.long)
        for name in PADDED
    ],
)
def test_padded(name: str) -> None:
    run_ranks(2, check, name, "padded")


def test_the_page_names_every_model_and_what_was_said() -> None:
    assert read_part(PAGE, SCRIPT) == verdicts(), "run python -m tests.support.models"
