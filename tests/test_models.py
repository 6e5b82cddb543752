"""Models of transformers over a sharded sequence, each beside itself on one process."""

from __future__ import annotations

import pytest

from tests.models import DOCUMENT, MODELS, check
from tests.ranks import run_ranks

pytest.importorskip("transformers")

# One that is dense, one of experts, and one whose keys are shared and values narrower.
ALWAYS = {"Qwen3", "Qwen3Moe", "DeepseekV3"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ALWAYS else pytest.mark.long)
        for name in MODELS
    ],
)
def test_model(name: str) -> None:
    run_ranks(2, check, name)


def test_the_document_has_every_model_and_all_are_right() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][2:]
    assert rows == [f"| {name} | yes |" for name in MODELS]
