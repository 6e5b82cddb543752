"""Ranks compare the attentions of a compiled graph before they run it, and its tables afterwards.

    with agree(args):       all claims of the graph are compared, with the sizes of this call
        run(args)           ops in the graph hand tables and draws over: note_tables, note_draw
                            on the way out: digests of these are compared

DTensor takes random numbers that a graph draws for the same on every rank, so these are compared
like the tables of masks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, replace
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch.distributed.tensor import DTensor

from cp_inductor.errors import SequenceWarning
from cp_inductor.graph.collectives import Collective
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.trust.agreement import (
    agree,
    agreed_of,
    compare_tables,
    graph_called,
    note_batch,
    tell_refusal,
)
from cp_inductor.trust.claims import (
    Planned,
    beginning_of,
    describe_attention,
    describe_beginnings,
    describe_collectives,
    digest,
    is_captured,
    kind_of,
    name_tables,
)
from cp_inductor.trust.log import Log
from cp_inductor.trust.record import ATTENTIONS, Entry

DRAWN = "a tensor that every rank is to have"
SEED_ALIKE = (
    "call torch.manual_seed with one seed on all ranks that share a sequence, and draw the same on"
    " all of them from then on; or make it a DTensor with distribute_tensor, which hands out what"
    " the first rank has"
)


# In so many runs of a graph, with gradients and without, the beginnings of inputs are compared: a
# program may cut one batch and not the next.
FIRST_RUNS = 2


@dataclass
class AgreedGraph:
    """Makes the context that a compiled graph is called in, from the arguments of the call.

    Attributes:
        planned: the attentions of the graph, in the order in which they run.
        inputs: the placeholders of the graph, with their example values.
        flags: what the order of exchanges depends on, or who computes attentions.
        collectives: what its lowered graphs start, by their kinds, as far as that is known.
        whole: what is known of its program, see `describe_program`, if the graph is all that is
            compiled of the model, on every rank. Then how many attentions there are, and in which
            order, is compared as well.
        shards: the plain inputs that are shards: by place, their name and sequence dim.
        batches: those that every rank has whole, if plain: by place, the name of the group.
    """

    planned: Sequence[Planned]
    inputs: InitVar[Sequence[fx.Node]]
    flags: Mapping[str, str]
    collectives: Mapping[str, Sequence[Collective]]
    whole: Mapping[str, str] | None
    shards: Mapping[int, tuple[str, int]]
    batches: Mapping[int, str]

    def __post_init__(self, inputs: Sequence[fx.Node]) -> None:
        # Now: what is found out of a symbol while a backward is compiled is true of that call.
        self.sizes = [tuple(map(size_expression, one.sizes)) for one in self.planned]
        symbols = {symbol for sizes in self.sizes for size in sizes for symbol in size.free_symbols}
        # Where the arguments of a call tell the value of a symbol.
        self.sources = {
            expression: (place, index)
            for place, node in enumerate(inputs)
            for index, size in enumerate(_sizes_in(node.meta.get("example_value")))
            if isinstance(size, SymInt) and (expression := size_expression(size)) in symbols
        }
        self.group_names = tuple(dict.fromkeys(one.attention.group_name for one in self.planned))
        self.known: dict[tuple[Any, ...], list[Entry]] = {}
        kinds = [kind_of(one.attention, one.dtype) for one in self.planned]
        self.kind = f"beginnings of {digest(kinds)}"

    @contextmanager
    def __call__(self, args: Sequence[Any]) -> Iterator[None]:
        """Run the graph inside, once all ranks are about to run the same; raises RanksDisagree."""
        for place, name in self.batches.items():
            note_batch(name, args[place])
        with graph_called():
            for name in self.group_names:
                if (log := agreed_of(name)) is not None:
                    self._agree(log, name, args)
            try:
                yield
            except Exception as error:
                for name in self.group_names:
                    tell_refusal(name, error)
                raise

    def _agree(self, log: Log, group_name: str, args: Sequence[Any]) -> None:
        has_grad = torch.is_grad_enabled()
        values = tuple(int(_sizes_in(args[at])[index]) for at, index in self.sources.values())
        # A backward may be lowered when it is first called.
        key = (group_name, has_grad, *values, *self.collectives)
        if key not in self.known:
            by_symbol = dict(zip(self.sources, map(sympy.Integer, values), strict=True))
            self.known[key] = self._make(group_name, has_grad, by_symbol)
        first, *others = self.known[key]
        run = f"{self.kind} {has_grad}"
        log.num_runs[run] += 1
        if self.shards and log.num_runs[run] <= FIRST_RUNS:
            first = replace(first, begins=describe_beginnings(self.shards, args))
        number = log.record.trails[ATTENTIONS].count + 1
        agree(log, [first, *others])
        told = log.events(ATTENTIONS, number)
        if first.begins and log.rank == log.ranks[0] and len(told) == len(log.ranks):
            warn_of_alike([entry.begins for entry in told.values()])

    def _make(
        self, group_name: str, has_grad: bool, values: Mapping[sympy.Symbol, sympy.Integer]
    ) -> list[Entry]:
        claims = []
        for one, expressions in zip(self.planned, self.sizes, strict=True):
            if one.attention.group_name == group_name:
                known = (expression.xreplace(values) for expression in expressions)
                sizes = tuple(int(size) if size.is_Integer else None for size in known)
                planned = replace(one, sizes=sizes, heads=tuple(map(int, one.heads)))
                claims.append(describe_attention(planned, has_grad=has_grad))
        # The first speaks for the graph. Where its attention differs, too, that says more.
        first, program = claims[0], dict[str, str]()
        if self.whole is not None:
            order = digest([claim.kind for claim in claims])
            program = {"attentions": str(len(claims)), "their order": order, **self.whole}
            for kind, started in self.collectives.items():
                direction = "backward" if kind == "backward" else "forward"
                program |= describe_collectives(direction, started, group_name)
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
    names = [name for name in begins[0] if len({one.get(name) for one in begins}) == 1]
    if not names:
        return
    begin = "input {} begins" if len(names) == 1 else "inputs {} begin"
    warnings.warn(
        f'options={{"mesh": ...}}: {begin.format(", ".join(names))} with the same numbers on all'
        f" {len(begins)} ranks. Each rank is to pass its own part of the sequence, as"
        " torch.chunk cuts it, and positions count from the start of the whole sequence. Where"
        " ranks really have the same tokens, filter this SequenceWarning",
        SequenceWarning,
        stacklevel=2,
    )


@torch.library.custom_op("cp_inductor::note_tables", mutates_args=("token",))
def note_tables(
    token: Tensor, tables: list[Tensor], kind: str, site: str, has_seed: bool, group_name: str
) -> None:
    """Note what an attention of a compiled graph reads, for comparison behind the graph.

    All such ops of a graph write to `token`, as it were: they keep their order by it. Of the tables
    the last may be the seed of a dropout.
    """
    if not is_captured(token):
        named = name_tables(tables, has_seed=has_seed)
        compare_tables(group_name, named, kind, site, note_as=-1)


note_tables.register_fake(lambda *args: None)


@torch.library.custom_op("cp_inductor::note_draw", mutates_args=())
def note_draw(drawn: Tensor, number: int, site: str, group_name: str) -> Tensor:
    """Return a copy of a graph's draw of some number, noted for comparison behind the graph."""
    noted = drawn.clone()
    if not is_captured(drawn):
        numbers, kind = {"its numbers": beginning_of(noted)}, f"draw {number} at {site}"
        how = {"what": DRAWN, "remedy": SEED_ALIKE}
        compare_tables(group_name, numbers, kind, site, note_as=number, **how)
    return noted


note_draw.register_fake(lambda drawn, number, site, group_name: drawn.clone())
note_draw.register_autograd(lambda ctx, grad: (grad, None, None, None))

NOTE_DRAW = torch.ops.cp_inductor.note_draw.default
NOTE_TABLES = torch.ops.cp_inductor.note_tables.default
