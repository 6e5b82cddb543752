"""What the rehearsal leans on inside torch and triton: each fails here, loudly, when it moves."""

from __future__ import annotations

import pytest

from cp_inductor.torch_private.leaned_on import text_gone, what_moved
from tests.rehearsal.leaned_on import LEANED_ON, TEXTS

pytest.importorskip("triton")


@pytest.mark.parametrize("place", LEANED_ON)
def test_private_names_are_where_they_were_read(place: str) -> None:
    assert what_moved(place, LEANED_ON[place]) is None


def test_texts_are_where_they_were_read() -> None:
    for module, texts in TEXTS.items():
        for text in texts:
            assert text_gone(module, text) is None
