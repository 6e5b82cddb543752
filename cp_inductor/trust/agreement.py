"""Ranks compare what they are about to run, before a number leaves.

    rank 0: causal, 128 queries on each rank       rank 1: causal, 129 queries on each rank
      => RanksDisagree on both: queries: 128 on each rank on rank 0, 129 on each rank on rank 1

If ranks disagree and their messages have the same size, nothing else notices. If the sizes differ,
a buffer is filled in part, or a rank waits for ever. So each rank describes every attention in a
claim and compares it with the other ranks' claims through the store of the group. In eager code,
each claim is compared before its attention runs. `graph_agreement` compares those of a graph.

A rank waits for the others when a claim differs from the last one that was agreed for its kind of
attention, as its lengths may. Ranks that run the same program see the same changes, so a rank that
only compiles again waits for nobody. If the lengths of one rank alone change, that rank waits for
the others before it sends, and all raise. The other attentions are compared beside the program; see
`log`.

The tables of masks and the seeds of dropout are known only at run time. Their digests are compared
in the first runs, and then as often as the user asks, after the attention or graph has run.

Nothing is compared in groups of one rank, in pretended groups, or while a graph is traced.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cp_inductor import config
from cp_inductor.errors import CPError, ExchangeFailed, ProcessGroupError, RanksDisagree
from cp_inductor.kept import on_reset
from cp_inductor.run.attention import Attention
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.torch_private.groups import group_of, group_with_store
from cp_inductor.torch_private.modes import is_transformed
from cp_inductor.trust.claims import describe_attention, digest, kind_of, tables_to_note
from cp_inductor.trust.log import Log
from cp_inductor.trust.record import ATTENTIONS, BATCHES, TABLES, Entry

# Tables are compared in this many runs of each kind of attention: about the layers of a model.
FIRST_RUNS = 128

# A rank waits for others at this many first events: about the attentions of a model's first step.
FIRST_EVENTS = 128

# About so many numbers of a batch are compared: all, unless it is a mask of many tokens.
MOST_OF_BATCH = 1 << 22

# This many elements of a tensor that is drawn are compared: seeds that differ show in the first.
MOST_OF_DRAW = 1 << 14

SAME_BATCHES = (
    "let all ranks that share a sequence skip a batch, or none: agree on it by an all_reduce of a"
    " flag; evaluate on all of them; then start again from a checkpoint, because numbers of two"
    " batches may have met; if each rank's whole tensors differ outside of its own part, set"
    " config.check_agreement = False"
)


class Agreed(Log):
    """What a rank tells the others of a group, and what it has agreed on with them.

    Attributes:
        num_runs: how often attentions with tables have run, by kind.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, timeout_s: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        super().__init__(store, dist.get_rank(group), ranks, timeout_s)
        self.num_runs: Counter[str] = Counter()

    def agree(self, entries: Sequence[Entry]) -> list[Entry]:
        """Compare attentions, as far as they are not what was agreed last.

        Returns:
            What the other ranks have said of the first, as far as they were waited for.
        """
        self.rejoin(entries[0].site)
        # The first attention of a compiled graph speaks for the graph, of which it has this field.
        kinds = [(entry.kind, "enabled" in entry.fields) for entry in entries]
        pairs = [(entry, self.last.get(kind)) for entry, kind in zip(entries, kinds, strict=True)]
        changed = [
            (entry, last) for entry, last in pairs if last is None or last.fields != entry.fields
        ]
        is_new = any(last is None or last.causes != entry.causes for entry, last in changed)
        is_early = self.record.trails[ATTENTIONS].count < FIRST_EVENTS
        waiting = self.others if changed or entries[0].begins else self.next * is_early
        others = self.come(entries, waiting, is_new=is_new)
        self.last.update(zip(kinds, entries, strict=True))
        return others

    def describe_tables(
        self, tables: Sequence[Tensor], kind: str, site: str, *, has_seed: bool
    ) -> list[Entry]:
        """Describe the tables of an attention of a kind, of which the last may be a seed."""
        names = [f"table {number}" for number in range(len(tables) - has_seed)]
        named = dict(zip(names + ["dropout's seed"] * has_seed, tables, strict=True))
        return self.describe("tables of an attention", named, kind, site)

    def describe(
        self, what: str, tensors: Mapping[str, Tensor], kind: str, site: str, remedy: str = ""
    ) -> list[Entry]:
        """Describe what must be alike on all ranks; nothing if it is not compared in this run."""
        self.num_runs[kind] += 1
        every = config.check_tables_every
        if self.num_runs[kind] > FIRST_RUNS and not (every and self.num_runs[kind] % every == 0):
            return []
        numbers = {name: describe_table(tensor) for name, tensor in tensors.items()}
        fields = {"what": what, "check_tables_every": str(every), **numbers}
        return [Entry(site, fields, remedy=remedy)]

    def compare_tables(self, entries: Sequence[Entry]) -> None:
        """Compare tables, if there are any."""
        if entries:
            self.come(entries, self.others, TABLES)


# What ranks have said outlives every compile. None stands for a group with nothing to compare.
_agreed_in: WeakKeyDictionary[dist.ProcessGroup, Agreed | None] = WeakKeyDictionary()


class Note(NamedTuple):
    """What a graph has read or drawn, as which of its draws, and with whom it is compared."""

    number: int
    group: Agreed
    entries: Sequence[Entry]


class _Running(threading.local):
    """What the compiled graph has noted that this thread is in.

    It is None in eager code, and in a backward, which computes again what was compared. The
    attentions of a graph were compared before it runs, so that ops in it need not be.
    """

    notes: list[Note] | None = None


running = _Running()


@contextmanager
def graph_called() -> Iterator[None]:
    """Run a compiled graph inside, whose attentions were compared; then compare what it noted.

    Nothing is left of the notes of a graph that raises.
    """
    before, notes = running.notes, list[Note]()
    running.notes = notes
    try:
        yield
    finally:
        running.notes = before
    entries: dict[Agreed, list[Entry]] = {}
    for note in sorted(notes, key=lambda note: note.number):  # draws may come in any order
        entries.setdefault(note.group, []).extend(note.entries)
    for group, noted in entries.items():
        group.compare_tables(noted)


def note_in_graph(
    tensor: Tensor, group_name: str, describe: Callable[[Agreed], list[Entry]], number: int = -1
) -> None:
    """Note what an op reads or draws in the compiled graph that this thread is in, if in any."""
    is_captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    group = None if running.notes is None or is_captured else agreed_of(group_name)
    if running.notes is not None and group is not None:
        running.notes.append(Note(number, group, describe(group)))


# The default group of the process that forked this one, if any. Its groups do not work here.
_forked_with: list[dist.ProcessGroup] = []


def _note_fork() -> None:
    group = dist.group.WORLD if dist.is_available() else None
    _forked_with[:] = [] if group is None else [group]


os.register_at_fork(after_in_child=_note_fork)


def _refuse_fork() -> None:
    if _forked_with and dist.group.WORLD is _forked_with[0]:
        raise ProcessGroupError(
            site="attention over a sharded sequence",
            expected="the process that has made its process group",
            got=f"process {os.getpid()}, which was forked from that one, and could only wait: the"
            " threads that send and receive are not in it",
            remedy="compute in the process that made the group; or start processes by"
            " multiprocessing's spawn or forkserver, and call init_process_group in each",
        )


def agreed_of(group_name: str) -> Agreed | None:
    """Return what the ranks of a group have agreed on; None if there is nothing to compare.

    Raises:
        ProcessGroupError: this process was forked from the one that has made its group.
    """
    if not config.check_agreement:
        return None
    _refuse_fork()
    group, ask = group_with_store(group_name)
    if group not in _agreed_in:
        is_alone = dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"
        _agreed_in[group] = None if is_alone else Agreed(group, *ask())
    return _agreed_in[group]


@on_reset
def forget_agreements() -> None:
    """Drop what ranks have agreed on: they compare everything anew."""
    _agreed_in.clear()


def tell_refusal(group_name: str, error: Exception) -> None:
    """Let the other ranks know what this one refuses, because they may be waiting for it.

    If it alone refuses, the others give up. It begins anew with them at its next attention. Errors
    about other ranks are not told.
    """
    told = vars(error).setdefault("_told", set())  # it may pass through here again
    is_of_others = isinstance(error, (RanksDisagree, ExchangeFailed, ProcessGroupError))
    if is_of_others or group_name in told:
        return
    told.add(group_name)
    group = agreed_of(group_name)
    if group is not None:
        # Compilers add where they were, behind an empty line.
        reason = " ".join(str(error).partition("\n\n")[0].split())
        is_named = isinstance(error, CPError)
        group.refuse(reason if is_named else f"{type(error).__name__}: {reason}")


def agree_once(group_names: Sequence[str], describe: Callable[[], Entry]) -> None:
    """Compare something that all ranks come to at the same place of their program.

    Args:
        group_names: of the groups that must agree, such as one for each axis of a mesh.
        describe: returns what this rank says. If it raises a refusal, the other ranks raise, too.

    Raises:
        RanksDisagree: another rank says something else, refuses to, or does not come in time.
        ProcessGroupError: the store does not answer.
    """
    left = [group for name in group_names if (group := agreed_of(name)) is not None]
    try:
        entry = describe()
        while left:
            group = left.pop(0)
            group.come([entry], group.others)
    except CPError as error:
        for other in left:
            other.refuse(str(error))  # its ranks may wait, without having seen a difference
        raise


def note_batch(group_name: str, tensor: Tensor) -> None:
    """Note a tensor that every rank of a group has whole, and cuts its shard out of.

    Only whole numbers on the CPU are noted, such as tokens and labels. Noise may differ by rank.
    """
    if (
        type(tensor) is not Tensor
        or tensor.device.type != "cpu"
        or tensor.is_floating_point()
        or tensor.is_complex()
        or torch.compiler.is_compiling()
        or is_transformed(tensor)
    ):
        return
    group = agreed_of(group_name)
    if group is None:
        return
    shape = "x".join(map(str, tensor.shape))
    flat = tensor.detach().reshape(-1)
    flat = flat[:: 1 + flat.numel() // MOST_OF_BATCH].contiguous()
    first = ", ".join(map(str, flat[:4].tolist()))
    numbers = f"{shape} numbers with {first}, ..., digest {digest_of(flat)}"
    group.rejoin("a batch")
    number = group.record.trails[BATCHES].count + 1
    fields = {"what": "a batch", f"batch {number}": numbers}
    group.come([Entry("a batch", fields, (), SAME_BATCHES, kind=numbers)], (), BATCHES)


@contextmanager
def waiting_in(group_name: str, where: str) -> Iterator[None]:
    """Let others know where this rank waits while it is in an exchange inside."""
    log = log_of(group_name)
    with nullcontext() if log is None else log.waiting(where):
        yield


def log_of(group_name: str) -> Log | None:
    """Return what this rank of a group tells the others, if it has told them anything."""
    with suppress(RuntimeError, KeyError):  # the group is gone
        return _agreed_in.get(group_of(group_name))
    return None


@contextmanager
def agreed(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    extras: Sequence[Tensor] = (),
    *,
    site: str,
    has_grad: bool | None = None,
) -> Iterator[None]:
    """Run an attention inside, once all ranks are about to run the same.

    Args:
        attention: which.
        query, key, extras: what it reads: (B, H, S, D), (B, G, T, D), of this rank, and tables.
        site: for errors.
        has_grad: whether gradients are on; None in an op, which does not know it.

    Raises:
        RanksDisagree: they are not.
    """
    is_run = type(query) in (Tensor, nn.Parameter) and query.device.type != "meta"
    # What the batch decides is compared where the batch is planned.
    is_compared = is_run and not attention.is_per_batch
    group = agreed_of(attention.group_name) if is_compared else None
    if group is None:
        yield
        return
    sizes = (query.shape[0], query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
    if has_grad is not None or running.notes is None:
        entry = describe_attention(attention, query.dtype, sizes, has_grad=has_grad)
        group.agree([replace(entry, site=site)])
    tables, noted = [extras[place] for place in tables_to_note(attention)], list[Entry]()
    if tables:
        kind, has_seed = kind_of(attention, query.dtype), attention.dropout_p > 0
        noted = group.describe_tables(tables, kind, site, has_seed=has_seed)
    yield
    group.compare_tables(noted)


def agree_on_tables(group_name: str, tables: Sequence[Tensor], rule: str) -> None:
    """Compare the tables of a batch before it is planned, if they are to be compared in this run.

    Raises:
        RanksDisagree: they are not the same on all ranks.
    """
    group = agreed_of(group_name) if tables else None
    if group is None:
        return
    kind, site = f"batches under {rule}", f"the plan of a batch under {rule}"
    group.compare_tables(group.describe_tables(tables, kind, site, has_seed=False))


def beginning_of(tensor: Tensor) -> Tensor:
    """Return the first elements along each dim, of which there are at most `MOST_OF_DRAW`."""
    room = MOST_OF_DRAW
    for dim in reversed(range(tensor.ndim)):
        tensor = tensor.narrow(dim, 0, min(room, tensor.shape[dim]))
        room = max(1, room // max(1, tensor.shape[dim]))
    return tensor


def describe_table(table: Tensor) -> str:
    """Say what a table holds: a number as it is, or a digest of all bits."""
    if table.ndim == 0:
        return str(table.detach().clone().item())
    shape = "x".join(map(str, table.shape))
    return f"{str(table.dtype).removeprefix('torch.')} of {shape}, digest {digest_of(table)},"


def digest_of(tensor: Tensor) -> str:
    """Return a digest of all bits of a tensor."""
    # To copy it waits for a collective that still has to bring it.
    copy = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
    return digest(copy.reshape(-1).view(torch.uint8).numpy().tobytes())
