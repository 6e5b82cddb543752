"""Ranks compare what they are about to run, before a number leaves.

    rank 0: causal, 128 queries on each rank       rank 1: causal, 129 queries on each rank
      => RanksDisagree on both: queries: 128 on each rank on rank 0, 129 on each rank on rank 1

If messages have the same size, nothing else notices. If the sizes differ, a buffer is filled in
part, or a rank waits for ever. So ranks compare claims, one for each attention, through the store
of their group: in eager code before it runs, and by `graph_agreement` before a graph runs.

A rank waits for the others when a claim differs from the last one that was agreed for its kind of
attention. Ranks that run the same program see the same changes, so a rank that only compiles again
waits for nobody. The other attentions are compared beside the program; see `log`.

The tables of masks and the seeds of dropout are known only at run time. Their digests are compared
in the first runs, and then as often as the user asks, after the attention or graph has run.

Nothing is compared in groups of one rank, in pretended groups, or while a graph is traced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from operator import itemgetter
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
from cp_inductor.trust.claims import (
    Planned,
    describe_attention,
    describe_table,
    digest_of,
    kind_of,
    name_tables,
    tables_to_note,
)
from cp_inductor.trust.log import Log
from cp_inductor.trust.record import ATTENTIONS, BATCHES, TABLES, Entry

# Tables are compared in this many runs of each kind of attention: about the layers of a model.
FIRST_RUNS = 128

# A rank waits for others at this many first events: about the attentions of a model's first step.
FIRST_EVENTS = 128

# About so many numbers of a batch are compared: all, unless it is a mask of many tokens.
MOST_OF_BATCH = 1 << 22

SAME_BATCHES = (
    "let all ranks that share a sequence skip a batch, or none: agree on it by an all_reduce of a"
    " flag; evaluate on all of them; then start again from a checkpoint, because numbers of two"
    " batches may have met; if each rank's whole tensors differ outside of its own part, set"
    " config.check_agreement = False"
)

# What was agreed before the first time.
NOTHING = Entry("", {})


def agree(log: Log, entries: Sequence[Entry]) -> None:
    """Compare attentions, as far as they are not what was agreed last."""
    log.rejoin()
    # The first attention of a compiled graph speaks for the graph, of which it has this field.
    kinds = [(entry.kind, "enabled" in entry.fields) for entry in entries]
    pairs = [(new, log.last.get(kind, NOTHING)) for new, kind in zip(entries, kinds, strict=True)]
    is_changed = any(new.fields != last.fields for new, last in pairs)
    is_new = is_changed and any(new.causes != last.causes for new, last in pairs)
    is_early = log.record.trails[ATTENTIONS].count < FIRST_EVENTS
    waiting = log.others if is_changed or entries[0].begins else log.next * is_early
    log.come(entries, waiting, is_new=is_new)
    log.last.update(zip(kinds, entries, strict=True))


def compare_tables(
    group_name: str,
    tables: Mapping[str, Tensor],
    kind: str,
    site: str,
    *,
    what: str = "tables of an attention",
    remedy: str = "",
    note_as: int | None = None,
) -> None:
    """Compare what must be alike on all ranks, in the first runs of its kind and as often as asked.

    If it has a place to be noted as, it is compared behind the compiled graph that this thread is
    in; if that is none, not at all.

    Raises:
        RanksDisagree: it is not the same on all ranks.
    """
    notes = _notes.get()
    is_compared = tables and (note_as is None or notes is not None)
    log = agreed_of(group_name) if is_compared else None
    if log is None:
        return
    log.num_runs[kind] += 1
    every = config.check_tables_every
    if log.num_runs[kind] > FIRST_RUNS and not (every and log.num_runs[kind] % every == 0):
        return
    numbers = {name: describe_table(tensor) for name, tensor in tables.items()}
    entry = Entry(site, {"what": what, "check_tables_every": str(every), **numbers}, remedy=remedy)
    if notes is None or note_as is None:
        log.come([entry], log.others, TABLES)
    else:
        notes.setdefault(log, []).append((note_as, entry))


# What ranks have said outlives every compile. None stands for a group with nothing to compare.
_agreed_in: WeakKeyDictionary[dist.ProcessGroup, Log | None] = WeakKeyDictionary()


# What the compiled graph has noted that is being called, by group, with the numbers of draws, which
# may come in any order. It is None in eager code, and in a backward, which computes again what was
# compared.
_notes: ContextVar[dict[Log, list[tuple[int, Entry]]] | None] = ContextVar("_notes", default=None)


@contextmanager
def graph_called() -> Iterator[None]:
    """Run a compiled graph inside, whose attentions were compared; then compare what it noted.

    Nothing is left of the notes of a graph that raises.
    """
    notes = dict[Log, list[tuple[int, Entry]]]()
    before = _notes.set(notes)
    try:
        yield
    finally:
        _notes.reset(before)
    for log, noted in notes.items():
        entries = [entry for _, entry in sorted(noted, key=itemgetter(0))]
        log.come(entries, log.others, TABLES)


# Default groups of the processes that this one was forked from. Their groups do not work here.
_forked_with: list[dist.ProcessGroup | None] = []
os.register_at_fork(after_in_child=lambda: _forked_with.append(dist.group.WORLD))


def agreed_of(group_name: str) -> Log | None:
    """Return what the ranks of a group have agreed on; None if there is nothing to compare.

    Raises:
        ProcessGroupError: this process was forked from the one that has made its group.
    """
    if not config.check_agreement:
        return None
    if dist.group.WORLD is not None and dist.group.WORLD in _forked_with:
        raise ProcessGroupError(
            site="attention over a sharded sequence",
            expected="the process that has made its process group",
            got=f"process {os.getpid()}, which was forked from that one, and could only wait: the"
            " threads that send and receive are not in it",
            remedy="compute in the process that made the group; or start processes by"
            " multiprocessing's spawn or forkserver, and call init_process_group in each",
        )
    group, ask = group_with_store(group_name)
    if group not in _agreed_in:
        is_alone = dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"
        ranks = dist.get_process_group_ranks(group)
        _agreed_in[group] = None if is_alone else Log(*ask(), dist.get_rank(), ranks)
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
    log = agreed_of(group_name)
    if log is not None:
        # Compilers add where they were, behind an empty line.
        reason = " ".join(str(error).partition("\n\n")[0].split())
        is_named = isinstance(error, CPError)
        log.refuse(reason if is_named else f"{type(error).__name__}: {reason}")


def agree_once(group_names: Sequence[str], describe: Callable[[], Entry]) -> None:
    """Compare something that all ranks of groups come to at the same place of their program.

    If `describe`, which returns what this rank says, raises a refusal, the other ranks raise, too.

    Raises:
        RanksDisagree: another rank says something else, refuses to, or does not come in time.
        ProcessGroupError: the store does not answer.
    """
    left = [log for name in group_names if (log := agreed_of(name)) is not None]
    try:
        entry = describe()
        while left:
            log = left.pop(0)
            log.come([entry], log.others)
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
    log = agreed_of(group_name)
    if log is None:
        return
    shape = "x".join(map(str, tensor.shape))
    flat = tensor.detach().reshape(-1)
    flat = flat[:: 1 + flat.numel() // MOST_OF_BATCH].contiguous()
    first = ", ".join(map(str, flat[:4].tolist()))
    numbers = f"{shape} numbers with {first}, ..., digest {digest_of(flat)}"
    log.rejoin()
    number = log.record.trails[BATCHES].count + 1
    fields = {"what": "a batch", f"batch {number}": numbers}
    log.come([Entry("a batch", fields, (), SAME_BATCHES, kind=numbers)], (), BATCHES)


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

    It reads `query` (B, H, S, D) and `key` (B, G, T, D) of this rank, and tables among `extras`. In
    an op, which does not know whether gradients are on, `has_grad` is None.

    Raises:
        RanksDisagree: they are not.
    """
    is_run = type(query) in (Tensor, nn.Parameter) and query.device.type != "meta"
    # What the batch decides is compared where the batch is planned.
    log = agreed_of(attention.group_name) if is_run and not attention.is_per_batch else None
    if log is None:
        yield
        return
    if has_grad is not None or _notes.get() is None:
        sizes = (query.shape[0], query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
        planned = Planned(attention, query.dtype, sizes, site)
        agree(log, [describe_attention(planned, has_grad=has_grad)])
    yield
    tables = [extras[at] for at in tables_to_note(attention)]
    if tables:
        named = name_tables(tables, has_seed=attention.dropout_p > 0)
        compare_tables(attention.group_name, named, kind_of(attention, query.dtype), site)
