"""Ranks that go other ways are told so: batches skipped, evaluations of one rank, who waits."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from io import StringIO
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor
from cp_inductor import RanksDisagree
from cp_inductor.trust import agreement, comparing, log
from cp_inductor.trust.agreement import forget_agreements
from cp_inductor.trust.record import MOST_TOLD, NUM_DIGITS, Entry, Trail
from tests.support.ranks import run_ranks, world_mesh


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


def raised(call: Any) -> str:
    """Return the text of the RanksDisagree that a call raises; "" if it raises none."""
    try:
        call()
    except RanksDisagree as error:
        return str(error)
    return ""


def skip(where: str, form: str) -> tuple[int, str]:
    """Return how many steps were right before the ranks noticed, and what they said."""
    mesh = world_mesh()
    model = Model()
    if where == "DTensors":
        model = cp_inductor.parallelize(model, mesh)
    call: Any = model if form == "eager" else torch.compile(model, backend=form, fullgraph=True)
    done = 0
    try:
        for number in range(6):
            if number == 3 and dist.get_rank() == 1:
                continue
            ids = batch(number)
            if where == "DTensors":
                call(cp_inductor.shard(ids, mesh)).backward()
            else:
                with cp_inductor.context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
                    call(ids).backward()
            done += 1
    except RanksDisagree as error:
        return done, str(error)
    return done, ""


@pytest.mark.parametrize("form", ["eager", "cp_aot_eager"])
@pytest.mark.parametrize("where", ["region", "DTensors"])
def test_a_skipped_batch_is_noticed_before_its_attention(where: str, form: str) -> None:
    for done, said in run_ranks(2, skip, where, form):
        assert done == 3
        assert "batch 4: 1x8 numbers with" in said and "on rank 0" in said and "on rank 1" in said
        assert "skip a batch, or none" in said


def skip_late() -> tuple[int, str]:
    """The same where no event is waited for any more, but the first of a new kind."""
    with mock.patch.object(agreement, "FIRST_EVENTS", 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        done = 0
        try:
            for number in range(2000):
                if number == 20 and dist.get_rank() == 1:
                    continue
                attend_in_region(mesh, number)
                done += 1
                time.sleep(0.002)
        except RanksDisagree as error:
            return done, str(error)
        return done, ""


def attend_in_region(mesh: Any, number: int) -> None:
    ids = batch(number)
    x = torch.zeros(1, 8, 8)
    with cp_inductor.context_parallel(mesh, buffers=[ids, x], buffer_seq_dims=[1, 1]):
        attend(x + ids[..., None])


def test_later_a_thread_notices() -> None:
    for done, said in run_ranks(2, skip_late):
        assert 20 <= done < 500 and "batch 21" in said, (done, said)


def evaluate_alone() -> tuple[str, str]:
    """Rank 0 evaluates once more than rank 1, which waits for it in a barrier."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    told = StringIO()
    with mock.patch.object(log, "REPORT_AFTER_S", 0.3), mock.patch.object(sys, "stderr", told):
        for number in range(3):
            attend_in_region(mesh, number)
        agreed = agreement.agreed_of(str(mesh.get_group().group_name))
        assert agreed is not None
        agreed.log.timeout_s = 1.5
        said = ""
        if dist.get_rank() == 0:
            with torch.no_grad():
                said = raised(lambda: attend_in_region(mesh, 7))
        dist.barrier()
    return said, told.getvalue()


def test_who_waits_says_where_all_are_and_gives_up() -> None:
    (said, told), (_, other) = run_ranks(2, evaluate_alone)
    assert "nothing from rank 1" in said
    assert "rank 1: outside of any attention, since" in said and "after 3 attentions" in said
    assert "rank 0 waits for others" in told
    assert "rank 0: in " in told and "rank 1: outside of any attention" in told
    assert not other


def test_trails_that_part_are_told_apart() -> None:
    one, other, ahead = Trail(), Trail(), Trail()
    for number in range(3 * MOST_TOLD):
        kind = f"{number}" if number != 3 * MOST_TOLD - 5 else "another"
        one.add(Entry(f"event {number}", {"what": "an event"}, kind=f"{number}"))
        other.add(Entry("", {"what": "an event"}, kind=kind))
    one.run_on()
    told = Trail.parse(one.told())
    assert told.first_difference(other) == other.first_difference(told) == 3 * MOST_TOLD - 4
    last = told.entry_at(told.count)
    assert last is not None and last.site == f"event {told.count - 1}"
    assert told.entry_at(1) is None  # long ago
    assert ahead.first_difference(told) is None and told.first_difference(one) is None
    assert len(one.told()["digests"]) == MOST_TOLD * NUM_DIGITS


def test_what_is_taken_back_was_never_there() -> None:
    one, other = Trail(), Trail()
    for trail, kinds in ((one, "abc"), (other, "ab")):
        for kind in kinds:
            trail.add(Entry(kind, {"what": kind}, kind=kind))
    one.take_back(1)
    assert one.told() == other.told() and one.digest == other.digest


def leave_no_thread() -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    attend_in_region(mesh, 0)
    dist.barrier()
    watches = list(comparing._comparing)
    assert any(watch.is_alive() for watch in watches)
    forget_agreements()
    deadline = time.monotonic() + 5
    while any(watch.is_alive() for watch in watches) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return sum(watch.is_alive() for watch in watches)


def test_a_thread_ends_with_its_group() -> None:
    assert run_ranks(2, leave_no_thread) == [0, 0]


LEAVES_WHILE_ASKING = """
import threading, time
import torch.distributed as dist
from cp_inductor.trust.bounded_store import BoundedStore, StoreSilent

store = BoundedStore(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False), 0.05)
try:
    # Comes back from C++ when the program is over.
    store.answered(lambda: [store.store.check(["key"]) or time.sleep(0.002) for _ in range(200)])
except StoreSilent:
    print("silent", flush=True)
"""


def test_who_leaves_while_a_thread_asks_the_store_is_not_aborted() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_WHILE_ASKING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "silent\n", "")
