"""Models of transformers over a sharded sequence, each beside itself on one process."""

from __future__ import annotations

import re

import pytest

from tests.models import MODELS, REFUSED, check, rows_of_document
from tests.ranks import RankError, run_ranks

pytest.importorskip("transformers")

# One of experts, whose keys are shared and values narrower.
ALWAYS = {"DeepseekV3"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ALWAYS else pytest.mark.long)
        for name in MODELS
    ],
)
def test_model(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(RankError, match=re.escape(REFUSED[name])):
            run_ranks(2, check, name)
    else:
        run_ranks(2, check, name)


def test_the_document_has_every_model_and_what_was_said() -> None:
    rows = rows_of_document()
    assert list(rows) == list(MODELS)
    for name, row in rows.items():
        assert REFUSED.get(name, "| yes |") in row
