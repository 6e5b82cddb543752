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
