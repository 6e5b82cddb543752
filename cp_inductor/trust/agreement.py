"""Ranks compare what they are about to run, before a number leaves.

    rank 0: causal, 128 queries on each rank       rank 1: causal, 129 queries on each rank
      => RanksDisagree on both: queries: 128 on each rank on rank 0, 129 on each rank on rank 1

If ranks disagree and their messages have the same size, nothing else notices. If the sizes differ,
a buffer is filled in part, or a rank waits for ever. So each rank describes every attention in a
claim and compares it with the other ranks' claims through the store of the group. The claims of a
compiled graph are compared together, before the graph runs. In eager, each claim is compared before
its attention runs.

A claim is compared when it differs from the last one that was agreed for its kind of attention.
The kind (heads, dtype, mask, scale, ...) is compared once. Lengths, batch and plan are compared
whenever they change. Ranks that run the same program see the same changes, so a rank that only
compiles again waits for nobody. If the lengths of one rank alone change, that rank waits for the
others before it sends, and then raises. One error is not noticed: a rank that runs an attention of
another kind, where both kinds were agreed on before.

The tables of masks and the seeds of dropout are known only at run time. Their digests are compared
in the first runs, and then as often as the user asks: in eager after the attention, in a compiled
graph after the graph, whose op `note_tables` hands them over. So are random numbers that a graph
draws, and that DTensor takes for the same on every rank (`note_draw`).

Nothing is compared in groups of one rank, in pretended groups, or while a graph is traced.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
import torch.distributed as dist
from torch import SymInt, Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor import config
from cp_inductor.errors import CPError, ExchangeFailed, ProcessGroupError, RanksDisagree
from cp_inductor.kept import lru_cache, on_reset
from cp_inductor.mask.language import is_of_pairs
from cp_inductor.plan import Grid, Recipe, forward_plan
from cp_inductor.run.batch import BatchAttention
from cp_inductor.run.execute import Attention
from cp_inductor.source import source_hash
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.torch_private.groups import group_of, group_with_store
from cp_inductor.torch_private.sizes import size_expression
from cp_inductor.trust.bounded_store import BoundedStore
from cp_inductor.trust.course import Course, keep_course, waiting_in
from cp_inductor.trust.failures import introduce
from cp_inductor.trust.ledger import Entry, Ledger

# Tables are compared in this many runs of each kind of attention: about the layers of a model.
FIRST_RUNS = 128

# Of a tensor that is drawn, this many elements are compared: seeds that differ show in the first.
MOST_OF_DRAW = 1 << 14

UNKNOWN = "not known before the graph runs"

SEED_ALIKE = (
    "call torch.manual_seed with one seed on all ranks that share a sequence, and draw the same on"
    " all of them from then on; or make it a DTensor with distribute_tensor, which hands out what"
    " the first rank has"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """How a rank describes one attention, or a whole graph.

    Attributes:
        kind: the part that is compared once.
        fields: everything that must be equal on all ranks, the kind included.
        is_of_graph: it is of all attentions of a graph together.
    """

    kind: str
    fields: tuple[tuple[str, str], ...]
    is_of_graph: bool = False

    def entry(self, site: str, has_grad: bool | None) -> Entry:
        """Return the ledger's entry. `has_grad` is None where the caller cannot know it."""
        known = {} if has_grad is None else {"gradients": "on" if has_grad else "off"}
        return Entry(site, {**dict(self.fields), **known}, ("plan", "stages", "chunks", "strategy"))


def claim_attention(this: Attention, dtype: torch.dtype, sizes: Sequence[int | None]) -> Claim:
    """Return the claim of an attention.

    Args:
        this: the attention.
        dtype: of its tensors.
        sizes: batch entries, queries and keys that this rank really holds; None if only the graph
            knows, while it runs.
    """
    return _claim(this, dtype, *sizes)


@lru_cache(maxsize=1024)
def _claim(
    this: Attention,
    dtype: torch.dtype,
    batch: int | None,
    num_queries: int | None,
    num_keys: int | None,
) -> Claim:
    recipe = this.recipe
    alike = {
        "what": "an attention",
        "mask": recipe.rule,
        "query heads": str(recipe.num_heads),
        "key-value heads": str(recipe.num_kv_heads),
        "head dim": str(recipe.head_dim),
        "dtype": str(dtype).removeprefix("torch."),
        "scale": "1 / sqrt(head dim)" if this.scale is None else repr(this.scale),
        "kernel": this.kernel,
        "dropout_p": repr(this.dropout_p),
        "bias with a gradient": "yes" if this.has_bias else "no",
        "kernel options": this.kernel_options or "none",
    }
    changing = {
        "queries": _tokens(recipe, this.rank, num_queries, of_keys=False),
        "keys": _tokens(recipe, this.rank, num_keys, of_keys=True),
        "batch entries": UNKNOWN if batch is None else str(batch),
        "layout": recipe.layout,
        "strategy": recipe.strategy,
        "stages": str(recipe.stages),
        "stages kept": str(recipe.keep),
        "chunks": str(recipe.chunks),
        "plan": _digest(repr(forward_plan(recipe).stages)),
        **_versions(),
    }
    return Claim(kind_of(this, dtype), tuple({**alike, **changing}.items()))


@lru_cache(maxsize=1024)
def _claim_of_batch(
    this: BatchAttention, dtype: torch.dtype, heads: tuple[int, int, int], sizes: tuple[Any, ...]
) -> Claim:
    names = ("query heads", "key-value heads", "head dim")
    alike = {
        "what": "an attention planned once per batch",
        "mask": this.rule_text,
        **dict(zip(names, map(str, heads), strict=True)),
        "dtype": str(dtype).removeprefix("torch."),
        "scale": "1 / sqrt(head dim)" if this.scale is None else repr(this.scale),
        "kernel": this.kernel,
        "kernel options": this.kernel_options or "none",
    }
    batch, *lengths = sizes
    changing = {
        "batch entries": UNKNOWN if batch is None else str(batch),
        "queries": _tokens_of_batch(this, *lengths[::2]),
        "keys": _tokens_of_batch(this, *lengths[1::2]),
        "stages": str(this.stages),
        **_versions(),
    }
    return Claim(kind_of(this, dtype), tuple({**alike, **changing}.items()))


def _tokens_of_batch(this: BatchAttention, length: int | None, held: int | None) -> str:
    """Say how many tokens a sequence has, and this rank, if that is not its part."""
    if length is None or held is None:
        return UNKNOWN if length is None else f"{length} in all"
    group = group_of(this.group_name)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    planned = Grid(world_size, 1, "contiguous", length, length).local_length(rank, of_keys=False)
    if held == planned:
        return f"{length} in all"
    return f"{held} where the plan of {length} has {planned}, at position {rank},"


def kind_of(this: Attention | BatchAttention, dtype: torch.dtype) -> str:
    """Say of what kind an attention is: all that tells it from others of a model but its sizes."""
    if isinstance(this, BatchAttention):
        return repr((re.sub(r"\d+", "#", this.rule_text), this.scale, this.kernel, dtype))
    recipe = this.recipe
    is_cross = recipe.query_length != recipe.key_length
    # A mask may be written with lengths.
    rule = re.sub(r"\d+", "#", recipe.rule)
    heads = (recipe.num_heads, recipe.num_kv_heads, recipe.head_dim)
    rest = (dtype, this.scale, this.kernel, this.dropout_p, this.has_bias, this.kernel_options)
    return repr((rule, is_cross, heads, rest))


def _tokens(recipe: Recipe, rank: int, held: int | None, *, of_keys: bool) -> str:
    if held is None:
        return UNKNOWN
    length = recipe.key_length if of_keys else recipe.query_length
    if length % recipe.world_size == 0:
        # Whatever length the plan was made for: all ranks hold as many.
        return f"{held} on each rank"
    planned = recipe.grid.local_length(rank, of_keys=of_keys)
    if held == planned:
        return f"{length} in all"
    return f"{held} where the plan of {length} has {planned}, at position {rank},"


@lru_cache(maxsize=1)
def _versions() -> Mapping[str, str]:
    return {"torch": str(torch.__version__), "source of cp_inductor": source_hash()[:12]}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Agreed:
    """What a rank and the others of a group have agreed on.

    Attributes:
        claims, tables: what has been said of them.
        last: what was agreed of each kind of attention.
        num_runs: of attentions with tables, by kind.
    """

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, timeout_s: float) -> None:
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        bounded = BoundedStore(store, timeout_s)
        self.peers = introduce(group, bounded)
        self.course = Course(bounded, rank, ranks, timeout_s, self.peers.look)
        self.claims, self.tables = (
            Ledger(bounded, name, rank, ranks, timeout_s, self.course.where, self.course.over)
            for name in ("claims", "tables")
        )
        keep_course(group, self.course)
        self.last: dict[tuple[str, bool | None], Claim] = {}
        self.num_runs: Counter[str] = Counter()

    def agree(self, claims: Sequence[tuple[Claim, str]], has_grad: bool | None) -> None:
        """Compare claims, each with its site, that are not what was agreed last."""
        changed = []
        for claim, site in claims:
            # A rank that turns gradients off, alone, would not come to the backward.
            mode = (claim.kind, has_grad)
            last = self.last.get(mode)
            if last is not claim and last != claim:
                changed.append(claim.entry(site, has_grad))
                self.last[mode] = claim
        try:
            if changed:
                self.claims.say(changed)
            # Also what was said before, where waiting for the others was interrupted by hand.
            if self.claims.is_pending:
                with self.course.waiting(claims[0][1]):
                    self.claims.settle(is_whole=False)
                    self.peers.meet()
            kinds = [f"{claim.kind} {has_grad}" for claim, _ in claims if not claim.is_of_graph]
            self.course.come_to(kinds, claims[0][1])
        except Exception:
            self.last.clear()
            raise

    def note(self, tables: Sequence[Tensor], kind: str, site: str, *, has_seed: bool) -> None:
        """Say what the tables of an attention are, if they are to be compared in this run."""
        if not self._is_turn_of(kind):
            return
        # Some are the seed.
        names = [f"table {number}" for number in range(len(tables) - has_seed)]
        names += ["dropout's seed"] * has_seed
        digests = {name: _describe(t) for name, t in zip(names, tables, strict=True)}
        self._say("tables of an attention", digests, site)

    def note_replicated(self, tensor: Tensor, kind: str, site: str) -> None:
        """Say what a tensor is that is taken for replicated, if it is to be compared now."""
        if self._is_turn_of(kind):
            numbers = {"its numbers": _describe(_beginning(tensor))}
            self._say("a tensor that every rank is to have", numbers, site, SEED_ALIKE)

    def _is_turn_of(self, kind: str) -> bool:
        self.num_runs[kind] += 1
        every = config.check_tables_every
        return self.num_runs[kind] <= FIRST_RUNS or bool(every and not self.num_runs[kind] % every)

    def _say(self, what: str, values: Mapping[str, str], site: str, remedy: str = "") -> None:
        every = str(config.check_tables_every)
        fields = {"what": what, "check_tables_every": every, **values}
        self.tables.say([Entry(site, fields, remedy=remedy)])

    def compare_tables(self) -> None:
        """Compare what was noted."""
        self.tables.settle(is_whole=True)


# Of this process, by group: what ranks have said outlives every compile. None: nothing to compare.
_agreed_in: WeakKeyDictionary[dist.ProcessGroup, _Agreed | None] = WeakKeyDictionary()


# The default group of the process that forked this one, if it had one. Its groups do not work here.
_forked_with: list[dist.ProcessGroup] = []


def _note_fork() -> None:
    group = dist.group.WORLD if dist.is_available() else None
    _forked_with[:] = [] if group is None else [group]


os.register_at_fork(after_in_child=_note_fork)


def _agreed_of(group_name: str) -> _Agreed | None:
    if _forked_with and dist.group.WORLD is _forked_with[0]:
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
        if is_alone:
            _agreed_in[group] = None
        else:
            _agreed_in[group] = _Agreed(group, *ask())
    return _agreed_in[group]


@on_reset
def forget_agreements() -> None:
    """Drop what ranks have agreed on: they compare everything anew."""
    _agreed_in.clear()


def tell_refusal(group_name: str, error: CPError, *, is_called: bool = False) -> None:
    """Let the other ranks know what this one refuses, as they may be waiting for it.

    Args:
        group_name: c10d name of the process group of the attention.
        error: the refusal. What ranks have told each other is not told again.
        is_called: the attention was called, not only compiled. If only this rank refuses, others
            are in it: whatever this rank calls next, should it go on, is compared before it could
            exchange anything with them.
    """
    is_told = isinstance(error, (RanksDisagree, ExchangeFailed, ProcessGroupError))
    if is_told or "_is_told" in vars(error) or not config.check_agreement:
        return
    vars(error)["_is_told"] = True  # whoever passes it on need not tell it again
    group = _agreed_of(group_name)
    if group is not None:
        group.claims.refuse(str(error))
        group.course.refuse(str(error))
        if is_called:
            group.last.clear()


def agree_once(group_names: Sequence[str], describe: Callable[[], Entry]) -> None:
    """Compare something that all ranks come to at the same place of their program.

    Args:
        group_names: of the groups that must agree, such as one for each axis of a mesh.
        describe: returns what this rank says. What it refuses, the other ranks learn.

    Raises:
        RanksDisagree: another rank says something else, refuses to, or does not come in time.
        ProcessGroupError: the store does not answer.
    """
    named = [_agreed_of(name) for name in group_names] if config.check_agreement else []
    left = [group for group in named if group is not None]
    try:
        entry = describe()
        while left:
            group = left.pop(0)
            group.claims.say([entry])
            group.claims.settle(is_whole=True)
            group.peers.meet()
    except CPError as error:
        for other in left:
            other.claims.refuse(str(error))  # in it ranks may wait that have seen no difference
        raise


def note_batch(group_name: str, tensor: Tensor) -> None:
    """Note a tensor that every rank of a group has whole, and cuts its shard out of.

    Only whole numbers on the CPU are: those of tokens and labels. Noise may differ between ranks.
    """
    if (
        type(tensor) is not Tensor
        or tensor.device.type != "cpu"
        or tensor.is_floating_point()
        or tensor.is_complex()
        or torch.compiler.is_compiling()
        or not config.check_agreement
    ):
        return
    group = _agreed_of(group_name)
    if group is not None:
        group.course.note_batch(tensor)


def swap_notes(group_name: str, name: str, text: str, patience_s: float) -> list[str] | None:
    """Leave a text for the other ranks of a group, and return theirs.

    Returns:
        None if some have not left one within the patience; none in groups of one rank.
    """
    group = _agreed_of(group_name)
    return [] if group is None else group.peers.swap(name, text, patience_s)


# --- In eager --------------------------------------------------------------------------------


@contextmanager
def agreed(
    this: Attention,
    query: Tensor,
    key: Tensor,
    extras: Sequence[Tensor] = (),
    *,
    site: str,
    has_grad: bool | None = None,
) -> Iterator[None]:
    """Run an attention inside, once all ranks are about to run the same.

    Args:
        this: the attention.
        query, key: (B, H, S, D), (B, G, T, D), this rank's shards.
        extras: what it reads beside them.
        site: for errors.
        has_grad: whether gradients are on; None where that cannot be told.

    Raises:
        RanksDisagree: they are not.
    """
    is_run = type(query) in (Tensor, nn.Parameter) and query.device.type != "meta"
    group = _agreed_of(this.group_name) if is_run and config.check_agreement else None
    if group is None:
        yield
        return
    sizes = (query.shape[0], query.shape[SEQUENCE_DIM], key.shape[SEQUENCE_DIM])
    group.agree([(claim_attention(this, query.dtype, sizes), site)], has_grad)
    tables = [extras[place] for place in tables_to_note(this)]
    if tables:
        kind = kind_of(this, query.dtype)
        group.note(tables, kind, site, has_seed=this.dropout_p > 0)
    with group.course.waiting(site):
        yield
    group.compare_tables()


# --- In compiled graphs ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """An attention of a graph that is being compiled.

    Attributes:
        attention: what it is.
        dtype: of its tensors.
        sizes: batch entries, queries and keys on this rank; some may depend on the inputs. If the
            batch decides the plan, before the last two those of the whole sequence.
        site: for people.
        heads: H, G and D, if the batch decides the plan.
    """

    attention: Attention | BatchAttention
    dtype: torch.dtype
    sizes: tuple[int | SymInt, ...]
    site: str
    heads: tuple[int, ...] = ()

    def claim(self, sizes: Sequence[int | None]) -> Claim:
        """Return its claim in a call, in which sizes are what the inputs say."""
        if isinstance(self.attention, BatchAttention):
            heads: Any = tuple(map(int, self.heads))
            return _claim_of_batch(self.attention, self.dtype, heads, tuple(sizes))
        return claim_attention(self.attention, self.dtype, sizes)


def agreed_graph(
    planned: Sequence[Planned], inputs: Sequence[fx.Node], *, is_whole: bool
) -> Callable[[Sequence[Any]], Any]:
    """Return what makes the context that a compiled graph is called in.

    Args:
        planned: the attentions of the graph, in the order in which they run.
        inputs: the placeholders of the graph, with their example values.
        is_whole: the graph is all that is compiled of the model, on every rank: then also how many
            attentions there are is compared, and in which order.

    Returns:
        From the arguments of a call to a context manager, which raises RanksDisagree.
    """
    claims = _ClaimsOfGraph(planned, inputs, is_whole)

    @contextmanager
    def agree(args: Sequence[Any]) -> Iterator[None]:
        has_grad = torch.is_grad_enabled()
        for group_name in claims.group_names:
            group = _agreed_of(group_name)
            if group is not None:
                group.agree(claims.of_call(group_name, args), has_grad)
        before, _running.call = _running.call, _Call()
        try:
            with ExitStack() as around:
                for group_name in claims.group_names:
                    around.enter_context(waiting_in(group_name, claims.name))
                yield
            _running.call.say_draws()
            for group in _running.call.groups:
                group.compare_tables()
        finally:
            _running.call = before

    return agree


class _ClaimsOfGraph:
    """The claims of a graph, by the group that they are made to, in every call."""

    def __init__(
        self, planned: Sequence[Planned], inputs: Sequence[fx.Node], is_whole: bool
    ) -> None:
        self.planned, self.is_whole = planned, is_whole
        # Now: what is found out of a symbol while a backward is compiled is true of that call.
        self.sizes = [tuple(map(size_expression, one.sizes)) for one in planned]
        symbols = {symbol for sizes in self.sizes for size in sizes for symbol in size.free_symbols}
        found = {symbol: _source_of(symbol, inputs) for symbol in symbols}
        self.sources = {symbol: source for symbol, source in found.items() if source is not None}
        self.group_names = tuple(dict.fromkeys(one.attention.group_name for one in planned))
        self.known: dict[tuple[Any, ...], list[tuple[Claim, str]]] = {}
        self.name = f"a graph of {len(planned)} attention{'s' * (len(planned) != 1)}"

    def of_call(self, group_name: str, args: Sequence[Any]) -> list[tuple[Claim, str]]:
        """Return the claims to a group, each with its site."""
        values = tuple(source(args) for source in self.sources.values())
        key = (group_name, *values)
        if key not in self.known:
            by_symbol = dict(zip(self.sources, map(sympy.Integer, values), strict=True))
            self.known[key] = self._make(group_name, by_symbol)
        return self.known[key]

    def _make(
        self, group_name: str, values: Mapping[sympy.Symbol, sympy.Integer]
    ) -> list[tuple[Claim, str]]:
        claims = []
        for one, expressions in zip(self.planned, self.sizes, strict=True):
            if one.attention.group_name == group_name:
                sizes = [_value(expression, values) for expression in expressions]
                claims.append((one.claim(sizes), one.site))
        if self.is_whole:
            # Last: where an attention differs, too, that says more.
            claims.append(_claim_whole([claim for claim, _ in claims]))
        return claims


def _claim_whole(claims: Sequence[Claim]) -> tuple[Claim, str]:
    order = _digest(repr([claim.kind for claim in claims]))
    fields = {"what": "a graph", "attentions": str(len(claims)), "their order": order}
    claim = Claim(f"graph {order}", tuple(fields.items()), is_of_graph=True)
    return claim, f"a graph of {len(claims)} attentions"


def _value(size: sympy.Expr, values: Mapping[sympy.Symbol, sympy.Integer]) -> int | None:
    value = size.xreplace(values)
    return int(value) if value.is_Integer else None


def _source_of(
    symbol: sympy.Symbol, inputs: Sequence[fx.Node]
) -> Callable[[Sequence[Any]], int] | None:
    """Return what reads the value of a symbol from the arguments of a call, if they have it."""
    for read in (_itself, _sizes, _local_sizes):
        for place, node in enumerate(inputs):
            for index, size in enumerate(read(node.meta.get("example_value"))):
                if isinstance(size, SymInt) and size_expression(size) == symbol:
                    return partial(_read, read, place, index)
    return None


def _read(read: Callable[[Any], Sequence[Any]], place: int, index: int, args: Sequence[Any]) -> int:
    return int(read(args[place])[index])


def _itself(value: Any) -> Sequence[Any]:
    return (value,)


def _sizes(value: Any) -> Sequence[Any]:
    return value.shape if isinstance(value, Tensor) else ()


def _local_sizes(value: Any) -> Sequence[Any]:
    return value.to_local().shape if isinstance(value, DTensor) else ()


# --- Tables ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    """A call of a compiled graph, the groups in which tables were noted in it, and its draws."""

    groups: list[_Agreed] = field(default_factory=list)
    draws: list[_Draw] = field(default_factory=list)

    def say_draws(self) -> None:
        """Say what was drawn, in the order of the program: a rank's own graph may have another."""
        for draw in sorted(self.draws, key=lambda draw: draw.number):
            group = _agreed_of(draw.group_name)
            if group is not None:
                kind = f"draw {draw.number} at {draw.site}"
                group.note_replicated(draw.drawn, kind, draw.site)
                if group not in self.groups:
                    self.groups.append(group)


@dataclass(frozen=True, slots=True)
class _Draw:
    """What a compiled graph has drawn, see `note_draw`."""

    drawn: Tensor
    number: int
    site: str
    group_name: str


class _Running(threading.local):
    """The call that this thread is in; None in eager, and in a backward."""

    call: _Call | None = None


_running = _Running()


@torch.library.custom_op("cp_inductor::note_tables", mutates_args=("token",))
def note_tables(
    token: Tensor, tables: list[Tensor], kind: str, site: str, has_seed: bool, group_name: str
) -> None:
    """Note what an attention of a compiled graph reads, for comparison behind the graph.

    Args:
        token: that all such ops of a graph write to, as it were: they keep their order by it.
        tables: what must be alike on all ranks.
        kind: of the attention, see `kind_of`.
        site: for errors.
        has_seed: the last table is the seed of a dropout.
        group_name: of the ranks.
    """
    call = _running.call
    if call is None or (token.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    group = _agreed_of(group_name)
    if group is None:
        return
    group.note(tables, kind, site, has_seed=has_seed)
    if group not in call.groups:
        call.groups.append(group)


@note_tables.register_fake
def _(*args: Any) -> None:
    return None


@torch.library.custom_op("cp_inductor::note_draw", mutates_args=())
def note_draw(drawn: Tensor, number: int, site: str, group_name: str) -> Tensor:
    """Return a copy of what a compiled graph has drawn, noted for comparison behind the graph.

    Args:
        drawn: what must be alike on all ranks: this rank's.
        number: of the draw in the program.
        site: for errors.
        group_name: of the ranks.
    """
    noted = drawn.clone()
    call = _running.call
    # In a backward it is computed again, and was compared.
    if call is not None and not (drawn.is_cuda and torch.cuda.is_current_stream_capturing()):
        call.draws.append(_Draw(_beginning(noted).clone(), number, site, group_name))
    return noted


@note_draw.register_fake
def _(drawn: Tensor, number: int, site: str, group_name: str) -> Tensor:
    return drawn.clone()


def _pass_on(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


note_draw.register_autograd(_pass_on)

NOTE_DRAW = torch.ops.cp_inductor.note_draw.default


def agree_on_tables(group_name: str, tables: Sequence[Tensor], rule: str) -> None:
    """Compare the tables of a batch before it is planned, if they are to be compared in this run.

    Raises:
        RanksDisagree: they are not the same on all ranks.
    """
    group = _agreed_of(group_name) if config.check_agreement else None
    if group is None or not tables:
        return
    group.note(tables, f"batches under {rule}", f"the plan of a batch under {rule}", has_seed=False)
    group.compare_tables()


NOTE_TABLES = torch.ops.cp_inductor.note_tables.default


def tables_to_note(this: Attention | BatchAttention) -> list[int]:
    """Return which extras of an attention must be alike on all ranks.

    Of a table of queries and keys a rank has the rows of its own queries.
    """
    if isinstance(this, BatchAttention):
        return []  # compared where the batch is planned
    places = sorted(place for place, at in this.rule.tables.items() if not is_of_pairs(at))
    return places + [this.num_extras - 1] * (this.dropout_p > 0)


def _beginning(tensor: Tensor) -> Tensor:
    """Return the first elements along each dim, of which there are at most `MOST_OF_DRAW`."""
    room = MOST_OF_DRAW
    for dim in reversed(range(tensor.ndim)):
        tensor = tensor.narrow(dim, 0, min(room, tensor.shape[dim]))
        room = max(1, room // max(1, tensor.shape[dim]))
    return tensor


def _describe(table: Tensor) -> str:
    """Say what a table is: a number as it is, of others a digest of all bits."""
    # A copy also of what a collective is still to bring.
    table = table.detach().clone(memory_format=torch.contiguous_format).cpu()
    if table.ndim == 0:
        return str(table.item())
    data = table.reshape(-1).view(torch.uint8).numpy().tobytes()
    shape = "x".join(map(str, table.shape))
    digest = hashlib.sha256(data).hexdigest()[:12]
    return f"{str(table.dtype).removeprefix('torch.')} of {shape}, digest {digest},"
