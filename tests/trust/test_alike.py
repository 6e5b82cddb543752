"""Plain inputs that begin alike on all ranks, where each is to have its own tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cp_inductor import SequenceWarning
from tests.support.ranks import on_ranks, world_mesh

# Does not divide by two or three ranks.
LENGTH = 31


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(64, 8)

    def forward(self, ids: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        x = (self.tokens(ids) + self.places(positions) + padding[..., None]).unflatten(2, (2, 4))
        q = x.transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).sum((1, 3))


def compiled(length: int) -> Callable[..., Tensor]:
    torch.manual_seed(0)
    options = {"mesh": world_mesh(), "seq_len": length}
    return torch.compile(Model(), backend="cp_aot_eager", fullgraph=True, options=options)


def batch(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(50, (2, length))
    return ids, torch.arange(length).expand(2, -1), torch.zeros(2, length)


def warnings_of(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if one.category is SequenceWarning]


def expect(found: list[str], *names: str) -> None:
    """Check that the first rank, for all, has named exactly these inputs."""
    told = [text for text in found if "the same numbers" in text]
    if dist.get_rank() or not names:
        assert not told
        return
    (text,) = told
    for name in ("ids", "positions", "padding"):
        assert (f" {name}" in text.split(" begin")[0]) == (name in names), text
    assert f"on all {dist.get_world_size()} ranks" in text
    assert "as torch.chunk cuts it" in text


@pytest.mark.slow
@on_ranks(2)
def test_a_whole_batch_on_every_rank() -> None:
    """Every rank passes all of a batch, as if nothing were sharded."""
    ids, positions, padding = batch(12)
    model = compiled(12 * dist.get_world_size())
    expect(warnings_of(lambda: model(ids, positions, padding)), "ids", "positions")


@pytest.mark.slow
@on_ranks(3)
def test_positions_of_their_own() -> None:
    """Every rank counts its own, also where the last has fewer tokens than the others.

    What is right is not warned of; padding that is the same everywhere tells nothing.
    """
    world_size = dist.get_world_size()
    ids, positions, padding = (one.chunk(world_size, 1)[dist.get_rank()] for one in batch(LENGTH))
    own = torch.arange(ids.shape[1]).expand(2, -1)
    model = compiled(LENGTH)
    expect(warnings_of(lambda: model(ids, positions, padding)))
    # The second call is looked at as well, the third is not; the mode without gradients by itself.
    expect(warnings_of(lambda: model(ids, own, padding)), "positions")
    expect(warnings_of(lambda: model(ids, own, padding)))
    with torch.no_grad():
        expect(warnings_of(lambda: model(ids, own, padding)), "positions")
