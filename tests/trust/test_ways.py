"""Ranks that go other ways are told so: batches skipped, evaluations of one rank, who waits.

And ranks that pass the same tokens where each is to have its own.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import cp_inductor
from cp_inductor import RanksDisagree
from cp_inductor.trust import agreement, log
from cp_inductor.trust.agreement import forget_agreements
from tests.support.combinations import warnings_of
from tests.support.ranks import on_ranks, world_mesh


def attend(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return attend(self.table(ids)).square().mean()


def batch(number: int) -> Tensor:
    return torch.randint(50, (1, 8), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    ("where", "form"), [("region", "eager"), ("region", "cp_aot_eager"), ("DTensors", "eager")]
)
@on_ranks(2)
def test_a_skipped_batch_is_noticed_before_its_attention(where: str, form: str) -> None:
    mesh = world_mesh()
    model = Model()
    if where == "DTensors":
        model = cp_inductor.parallelize(model, mesh)
    call: Any = model if form == "eager" else torch.compile(model, backend=form, fullgraph=True)

    def step(number: int) -> None:
        ids = batch(number)
        if where == "DTensors":
            call(cp_inductor.shard(ids, mesh)).backward()
        else:
            with cp_inductor.context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
                call(ids).backward()

    for number in range(3):
        step(number)
    with pytest.raises(RanksDisagree, match="batch 4: 1x8 numbers with") as raised:
        step(3 + dist.get_rank())  # one of them skips a batch
    said = str(raised.value)
    assert "on rank 0" in said and "on rank 1" in said and "skip a batch, or none" in said


def attend_in_region(mesh: Any, number: int) -> None:
    ids = batch(number)
    x = torch.zeros(1, 8, 8)
    with cp_inductor.context_parallel(mesh, buffers=[ids, x], buffer_seq_dims=[1, 1]):
        attend(x + ids[..., None])


@on_ranks(2)
def test_later_a_thread_notices() -> None:
    """The same where no event is waited for any more, but the first of a new kind."""
    mesh, done = world_mesh(), []

    def train() -> None:
        for number in range(2000):
            if number != 20 or dist.get_rank() == 0:
                attend_in_region(mesh, number)
                done.append(number)
                time.sleep(0.002)

    skipped = pytest.raises(RanksDisagree, match="batch 21")
    with mock.patch.object(agreement, "FIRST_EVENTS", 2), skipped:
        train()
    assert 20 <= len(done) < 500, done


@on_ranks(2)
def test_who_waits_says_where_all_are_and_gives_up() -> None:
    """Rank 0 evaluates once more than rank 1, which waits for it in a barrier."""
    mesh, told = world_mesh(), StringIO()
    with mock.patch.object(log, "REPORT_AFTER_S", 0.3), mock.patch.object(sys, "stderr", told):
        for number in range(3):
            attend_in_region(mesh, number)
        agreed = agreement.agreed_of(str(mesh.get_group().group_name))
        assert agreed is not None
        agreed.timeout_s = 1.5
        if dist.get_rank() == 0:
            with torch.no_grad(), pytest.raises(RanksDisagree, match="nothing from rank 1") as said:
                attend_in_region(mesh, 7)
            assert "rank 1: outside of any attention, since" in str(said.value)
            assert "after 3 attentions" in str(said.value)
        dist.barrier()
    first = ("rank 0 waits for others", "rank 0: in ", "rank 1: outside of any attention")
    assert all(part in told.getvalue() for part in first) or dist.get_rank() == 1
    assert bool(told.getvalue()) == (dist.get_rank() == 0)


@on_ranks(2)
def test_a_thread_ends_with_its_group() -> None:
    attend_in_region(world_mesh(), 0)
    dist.barrier()
    threads = [known.thread for known in log._logs]
    assert any(thread.is_alive() for thread in threads)
    forget_agreements()
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert not any(thread.is_alive() for thread in threads)


LEAVES_WHILE_ASKING = """
import time
import torch.distributed as dist
from cp_inductor.trust.log import Log

store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
log = Log(store, 20, 0, (0, 1))
try:
    # Comes back from C++ when the program is over.
    log.ask(lambda: [store.check(["key"]) or time.sleep(0.002) for _ in range(200)], 0.05)
except dist.DistError:
    print("silent", flush=True)
"""


def test_who_leaves_while_a_thread_asks_the_store_is_not_aborted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_WHILE_ASKING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "silent\n", "")


# --- Plain inputs that begin alike on all ranks, where each is to have its own tokens -----------

# Does not divide by two or three ranks.
LENGTH = 31


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(64, 8)

    def forward(self, ids: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(positions) + padding[..., None]
        return attend(x).sum((1, 3))


def compiled(length: int) -> Callable[..., Tensor]:
    torch.manual_seed(0)
    options = {"mesh": world_mesh(), "seq_len": length}
    return torch.compile(Decoder(), backend="cp_aot_eager", fullgraph=True, options=options)


def whole_batch(length: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(50, (2, length))
    return ids, torch.arange(length).expand(2, -1), torch.zeros(2, length)


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
    ids, positions, padding = whole_batch(12)
    model = compiled(12 * dist.get_world_size())
    expect(warnings_of(lambda: model(ids, positions, padding)), "ids", "positions")


@pytest.mark.slow
@on_ranks(3)
def test_positions_of_their_own() -> None:
    """Every rank counts its own, also where the last has fewer tokens than the others.

    What is right is not warned of; padding that is the same everywhere tells nothing.
    """
    world_size = dist.get_world_size()
    ids, positions, padding = (
        one.chunk(world_size, 1)[dist.get_rank()] for one in whole_batch(LENGTH)
    )
    own = torch.arange(ids.shape[1]).expand(2, -1)
    model = compiled(LENGTH)
    expect(warnings_of(lambda: model(ids, positions, padding)))
    # The second call is looked at as well, the third is not; the mode without gradients by itself.
    expect(warnings_of(lambda: model(ids, own, padding)), "positions")
    expect(warnings_of(lambda: model(ids, own, padding)))
    with torch.no_grad():
        expect(warnings_of(lambda: model(ids, own, padding)), "positions")
