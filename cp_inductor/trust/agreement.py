"""Ranks compare what they are about to run, before a number leaves.

    rank 0: causal, 128 queries on each rank       rank 1: causal, 129 queries on each rank
      => RanksDisagree on both: queries: 128 on each rank on rank 0, 129 on each rank on rank 1

If messages have the same size, nothing else notices. If the sizes differ, a buffer is filled in
part, or a rank waits for ever. So ranks compare claims, one for each attention, through the store
of their group: before eager code runs it, and before a compiled graph runs.

A rank waits for the others when a claim differs from the last one that was agreed for its kind of
attention. Ranks that run the same program see the same changes, so a rank that only compiles again
waits for nobody. The other attentions are compared beside the program; see `log`.

The tables of masks and the seeds of dropout are known only at run time. Their digests are compared
in the first runs, and then as often as the user asks, after the attention or graph has run. DTensor
takes random numbers that a graph draws for the same on every rank: they are compared as well.

    with AgreedGraph(...)(args):     all claims of the graph are compared, with this call's sizes
        run(args)                    ops in it hand tables and draws over: note_tables, note_draw
                                     on the way out: digests of these are compared

Nothing is compared in groups of one rank, in pretended groups, or while a graph is traced.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import InitVar, dataclass, replace
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
import torch.distributed as dist
from torch import SymInt, Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor import config
from cp_inductor.errors import (
    CPError,
    ExchangeFailed,
    ProcessGroupError,
    RanksDisagree,
    SequenceWarning,
)
from cp_inductor.graph.collectives import Collective
from cp_inductor.kept import on_reset
from cp_inductor.run.attention import Attention
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.torch_private.groups import group_with_store
from cp_inductor.torch_private.modes import is_transformed
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.trust.claims import (
    Planned,
    beginning_of,
    describe_attention,
    describe_beginnings,
    describe_collectives,
    describe_table,
    digest_of,
    is_captured,
    kind_of,
    name_tables,
    tables_to_note,
)
from cp_inductor.trust.log import Log
from cp_inductor.trust.record import ATTENTIONS, BATCHES, TABLES, Entry, digest

# Tables are compared in this many runs of each kind of attention, and a rank waits for others at
# this many first events: about the attentions of a model's first step.
FIRST_RUNS = FIRST_EVENTS = 128

# In so many calls of a graph, with gradients and without, the beginnings of inputs are compared: a
# program may cut one batch and not the next.
FIRST_CALLS = 2

# About so many numbers of a batch are compared: all, unless it is a mask of many tokens.
MOST_OF_BATCH = 1 << 22

SAME_BATCHES = (
    "let all ranks that share a sequence skip a batch, or none: agree on it by an all_reduce of a"
    " flag; evaluate on all of them; then start again from a checkpoint, because numbers of two"
    " batches may have met; if each rank's whole tensors differ outside of its own part, set"
    " config.check_agreement = False"
)

SEED_ALIKE = (
    "call torch.manual_seed with one seed on all ranks that share a sequence, and draw the same on"
    " all of them from then on; or make it a DTensor with distribute_tensor, which hands out what"
    " the first rank has"
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
    is_early = log.record.count(ATTENTIONS) < FIRST_EVENTS
    waiting = log.others if is_changed or entries[0].begins else log.next * is_early
    log.come(entries, waiting, is_new=is_new)
    log.last.update(zip(kinds, entries, strict=True))


# What ranks have said outlives every compile. None stands for a group with nothing to compare.
_agreed_in: WeakKeyDictionary[dist.ProcessGroup, Log | None] = WeakKeyDictionary()

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
    log.rejoin()
    flat = tensor.detach().reshape(-1)
    shape, step = "x".join(map(str, tensor.shape)), 1 + flat.numel() // MOST_OF_BATCH
    first = ", ".join(map(str, flat[:4].tolist()))
    numbers = f"{shape} numbers with {first}, ..., digest {digest_of(flat[::step])}"
    name = f"batch {log.record.count(BATCHES) + 1}"
    fields = {"what": "a batch", name: numbers}
    log.come([Entry("a batch", fields, (), SAME_BATCHES, kind=numbers)], (), BATCHES)


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


# --- Compiled graphs -----------------------------------------------------------------------


@dataclass
class AgreedGraph:
    """Makes the context that a compiled graph is called in, from the arguments of the call."""

    planned: Sequence[Planned]  # the attentions of the graph, in the order in which they run
    inputs: InitVar[Sequence[fx.Node]]  # the placeholders of the graph, with their example values
    flags: Mapping[str, str]  # what the order of exchanges depends on, or who computes attentions
    # What its graphs from AOTAutograd start, by their kinds, as far as that is known.
    collectives: Mapping[str, Sequence[Collective]]
    # What is known of its program, see `describe_program`, if the graph is all that is compiled of
    # the model, on every rank. Then how many attentions there are, and in which order, is compared
    # as well.
    whole: Mapping[str, str] | None
    # The plain inputs that are shards: by place, their name and sequence dim.
    shards: Mapping[int, tuple[str, int]]
    # Those that every rank has whole, if plain: by place, the name of the group.
    batches: Mapping[int, str]

    def __post_init__(self, inputs: Sequence[fx.Node]) -> None:
        # Now: what is found out of a symbol while a backward is compiled is true of that call.
        self.sizes = [tuple(map(size_expression, p.sizes)) for p in self.planned]
        symbols = {symbol for sizes in self.sizes for size in sizes for symbol in size.free_symbols}
        # Where the arguments of a call tell the value of a symbol.
        self.sources = {
            expression: (place, index)
            for place, node in enumerate(inputs)
            for index, size in enumerate(_sizes_in(node.meta.get("example_value")))
            if isinstance(size, SymInt) and (expression := size_expression(size)) in symbols
        }
        self.group_names = tuple(dict.fromkeys(p.attention.group_name for p in self.planned))
        self.known: dict[tuple[Any, ...], list[Entry]] = {}

    @contextmanager
    def __call__(self, args: Sequence[Any]) -> Iterator[None]:
        """Run the graph inside, once all ranks are about to run the same; raises RanksDisagree."""
        for place, name in self.batches.items():
            note_batch(name, args[place])
        notes = dict[Log, list[tuple[int, Entry]]]()
        before = _notes.set(notes)
        try:
            for name in self.group_names:
                if (log := agreed_of(name)) is not None:
                    self._agree(log, name, args)
            yield
        except Exception as error:
            for name in self.group_names:
                tell_refusal(name, error)
            raise
        finally:
            _notes.reset(before)
        for log, noted in notes.items():
            entries = [entry for _, entry in sorted(noted, key=itemgetter(0))]
            log.come(entries, log.others, TABLES)

    def _agree(self, log: Log, group_name: str, args: Sequence[Any]) -> None:
        has_grad = torch.is_grad_enabled()
        values = tuple(int(_sizes_in(args[at])[index]) for at, index in self.sources.values())
        # A backward is lowered when it is first called. Until then it is known as it was traced.
        key = (group_name, has_grad, values, tuple(self.collectives))
        if key not in self.known:
            self.known[key] = self._describe(*key)
        first, *others = self.known[key]
        run = f"beginnings of {first.kind} and {len(others)} others"
        log.num_runs[run] += 1
        if self.shards and log.num_runs[run] <= FIRST_CALLS:
            first = replace(first, begins=describe_beginnings(self.shards, args))
        agree(log, [first, *others])
        told = log.events((ATTENTIONS, log.record.count(ATTENTIONS) - len(others)))
        if first.begins and log.rank == log.ranks[0] and len(told) == len(log.ranks):
            warn_of_alike([entry.begins for entry in told.values()])

    def _describe(
        self, group_name: str, has_grad: bool, values: Sequence[int], kinds: Sequence[str]
    ) -> list[Entry]:
        claims, numbers = [], dict(zip(self.sources, map(sympy.Integer, values), strict=True))
        for attention, expressions in zip(self.planned, self.sizes, strict=True):
            if attention.attention.group_name == group_name:
                known = (expression.xreplace(numbers) for expression in expressions)
                sizes = tuple(int(size) if size.is_Integer else None for size in known)
                planned = replace(attention, sizes=sizes, heads=tuple(map(int, attention.heads)))
                claims.append(describe_attention(planned, has_grad=has_grad))
        # The first speaks for the graph. Where its attention differs, too, that says more.
        first, program = claims[0], dict[str, str]()
        if self.whole is not None:
            order = digest([claim.kind for claim in claims])
            program = {"attentions": str(len(claims)), "their order": order, **self.whole}
            for kind in kinds:
                direction = "forward" if kind == "inference" else kind
                program |= describe_collectives(direction, self.collectives[kind], group_name)
        claims[0] = replace(
            first,
            fields={**first.fields, **self.flags, **program},
            consequences=(*first.consequences, *program),
        )
        return claims


def _sizes_in(value: Any) -> Sequence[Any]:
    """Return the numbers that an argument tells: itself, or its sizes and those of its part."""
    if isinstance(value, DTensor):
        return (*value.shape, *value.to_local().shape)
    return value.shape if isinstance(value, Tensor) else (value,)


def warn_of_alike(begins: Sequence[Mapping[str, str]]) -> None:
    """Warn of inputs that begin alike on all ranks, by what they begin with on each."""
    names = [name for name in begins[0] if len({begin.get(name) for begin in begins}) == 1]
    if names:
        warnings.warn(
            f'options={{"mesh": ...}}: of the inputs, {", ".join(names)} begin with the same'
            f" numbers on all {len(begins)} ranks. Each rank is to pass its own part of the"
            " sequence, as torch.chunk cuts it, and positions count from the start of the whole"
            " sequence. Where ranks really have the same tokens, filter this SequenceWarning",
            SequenceWarning,
            stacklevel=2,
        )


# --- Tables and draws ----------------------------------------------------------------------

# What the compiled graph has noted that is being called, by group, with the numbers of draws, which
# may come in any order. It is None in eager code, and in a backward, which computes again what was
# compared.
_notes: ContextVar[dict[Log, list[tuple[int, Entry]]] | None] = ContextVar("_notes", default=None)


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
    is_noted = note_as is None or notes is not None
    log = agreed_of(group_name) if tables and is_noted else None
    if log is None or any(map(is_captured, tables.values())):
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


@torch.library.custom_op("cp_inductor::note_tables", mutates_args=("token",))
def note_tables(
    token: Tensor, tables: list[Tensor], kind: str, site: str, has_seed: bool, group_name: str
) -> None:
    """Note what an attention of a compiled graph reads, for comparison behind the graph.

    All such ops of a graph write to `token`, as it were: they keep their order by it. Of the tables
    the last may be the seed of a dropout.
    """
    named = name_tables(tables, has_seed=has_seed)
    compare_tables(group_name, named, kind, site, note_as=-1)


note_tables.register_fake(lambda *args: None)


@torch.library.custom_op("cp_inductor::note_draw", mutates_args=())
def note_draw(drawn: Tensor, number: int, site: str, group_name: str) -> Tensor:
    """Return a copy of a graph's draw of some number, noted for comparison behind the graph."""
    noted = drawn.clone()
    numbers, kind = {"its numbers": beginning_of(noted)}, f"draw {number} at {site}"
    words = {"what": "a tensor that every rank is to have", "remedy": SEED_ALIKE}
    compare_tables(group_name, numbers, kind, site, note_as=number, **words)
    return noted


note_draw.register_fake(lambda drawn, number, site, group_name: drawn.clone())
note_draw.register_autograd(lambda ctx, grad: (grad, None, None, None))

NOTE_DRAW = torch.ops.cp_inductor.note_draw.default
NOTE_TABLES = torch.ops.cp_inductor.note_tables.default
