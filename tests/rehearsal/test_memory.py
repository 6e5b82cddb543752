"""A rehearsal notices what no number shows: races of lanes, and results that are missing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.rehearsal.memory import Argument, DeviceMemory
from tests.rehearsal.reference import compare, run

LENGTH = 8


def launch(order: list[int], *, rows: int | None = None) -> list[str]:
    """Copy elements of a buffer within it, as one launch; return what was noted.

    Lane `i` reads element `order[i]` and writes element `i`. With `rows`, a block has so many rows.
    """
    noted: list[str] = []
    memory = DeviceMemory(lambda kind, buffer, what: noted.append(f"{kind}: {buffer}"))
    tensor: Tensor = memory.empty((LENGTH,), (1,), torch.float32, "buf0")
    tensor.copy_(torch.arange(LENGTH))
    memory.mark(tensor)
    arguments = [Argument(name, memory.buffer_of(tensor)) for name in ("in", "out")]
    shape = (LENGTH,) if rows is None else (rows, LENGTH // rows)
    base, everywhere = np.uint64(tensor.data_ptr()), np.ones(shape, bool)
    places = (base + np.array(lanes, np.uint64) * np.uint64(4) for lanes in (order, range(LENGTH)))
    read, written = (place.reshape(shape) for place in places)
    with memory.launched(arguments, frozenset(), is_template=False):
        values = memory.load(read, everywhere, np.zeros(shape), np.dtype(np.float32))
        memory.store(written, values, everywhere)
    assert tensor.tolist() == order
    return noted


@pytest.mark.parametrize(
    ("order", "rows", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], None, []),
        ([1, 0, 2, 3, 4, 5, 6, 7], None, ["race: out"]),
        ([1, 0, 2, 3, 5, 4, 6, 7], 4, []),  # a row is reduced before it is written
        ([2, 3, 0, 1, 4, 5, 6, 7], 4, ["race: out"]),
    ],
)
def test_a_race_between_lanes(order: list[int], rows: int | None, expected: list[str]) -> None:
    assert launch(order, rows=rows) == expected


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def test_what_is_missing_or_has_another_shape_is_infinitely_far_off() -> None:
    x = torch.ones(2, 4)
    results = run(Half(), (x,), {}, None, None)
    results["gradient of weight"] = results["gradient of weight"][:2]
    del results["gradient of bias"]
    differences, said = compare(Half(), (x,), {}, results, None)
    assert not said
    far = {name for name, one in differences.items() if not one.is_fine}
    assert far == {"gradient of weight", "gradient of bias"}
