"""Refuse operations other than attention that mix tokens of plain shards.

    ids (B, S)                             Shards(1)
    y = x.cumsum(1)                        Mixed
    out = attention(split(linear(y)))      => SequenceMixed: ... cumsum, which mixes tokens

The graph is run once on fake tensors, and every aten op is given types (`sequence.rules`). What is
not proven to compute each token by itself is refused if an attention or a result of the graph
depends on it; so all ranks refuse alike, also graphs without attention. A result that is a sum over
tokens, and no number, gets a `SequenceWarning`.

In a region its typer knows what the inputs are: what the region cut, and what eager code and other
graphs made of that. It is told what results are (`GraphTypes`): what uses mixed ones is refused.

Of other inputs nothing says that they are shards. So they are told by convention: parameters and
buffers of modules are the same on every rank; of any other tensor dim 1 holds this rank's tokens,
if it is as long as the queries or keys (dim 0 of what has one dim, dim 2 of what is a query, key or
value itself). Beside such an input another dim that is as long will do, as of a table of angles
(S, D). Without an attention, the inputs with most dims say how long that is.
``options={"seq_dims": {"ids": 1}}`` says it of the rest.

Losses that are means over labels are made to compare how many labels count on each rank
(`sequence.wholes`); nothing else is changed. The library spmd_types (0.2.3) knows neither a dim
into which batch and tokens were flattened, nor means, and takes 2 ms for an op.

Assumes: a graph from Dynamo whose attentions were found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.axis import SequenceAxis, is_sequence_sharded, whole_of_shard
from cp_inductor.dtensor.limits import dim_of
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import InvalidArgument, SequenceMixed
from cp_inductor.graph.nodes import name_of, nodes_of
from cp_inductor.graph.subgraphs import method_of
from cp_inductor.passes.attentions import Site
from cp_inductor.passes.graph_types import Checking, GraphTypes, compare_lengths, follow_graph
from cp_inductor.region.marks import MARK, PER_RANK, groups_of_regions, is_marked
from cp_inductor.region.modes import typers_of_program
from cp_inductor.sequence.eager import EagerTyper
from cp_inductor.sequence.follow import shards_at, warn_of_sums
from cp_inductor.sequence.rules.call import numbers
from cp_inductor.sequence.types import Mixed, Own, Same, Type
from cp_inductor.sequence.wholes import COUNTED_LOSSES, count_labels
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.torch_private.dynamo import frame_locals, graph_examples, graph_inputs
from cp_inductor.torch_private.groups import group_of


def check_sequence(
    gm: fx.GraphModule,
    sites: Sequence[Site],
    seq_dims: Mapping[str, int | None],
    axis: SequenceAxis | None,
) -> Checking | None:
    """Check a Dynamo graph over plain shards, with all its attentions over a sharded sequence.

    `seq_dims` are those of inputs, by their names in the model; None: the same on every rank. The
    calls of a graph in a region are checked by what this returns, and so are those of a graph
    without attention that takes a mean over tokens.
    """
    sites = [site for site in sites if site.axis.world_size > 1 and _is_of_shards(site.query)]
    typers = typers_of_program()
    groups = [site.axis.group_name for site in sites] + [typer.group_name for typer in typers]
    groups += [name for name in groups_of_regions(gm) if group_of(name).size() > 1]
    groups += [axis.group_name] if axis is not None and axis.world_size > 1 else []
    inputs = _inputs(gm, sites, seq_dims)
    if axis is not None:
        _refuse_other_names({entry.name for entry in inputs}, seq_dims)
    if not groups or not any(isinstance(entry.value, Tensor) for entry in inputs):
        return None
    _count_all_labels(gm, groups[0])
    is_in_region = bool(typers)
    if sites or not is_in_region:
        for node, entry in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
            if entry.shard_dim is not None:
                node.meta[_SHARD] = (entry.name, entry.shard_dim)
    if is_in_region:
        type_of = partial(_type_in_region, inputs, sites)
        types = GraphTypes(gm, [site.node for site in sites], type_of)
        types.check(graph_examples(gm.graph))
        return types.typed
    try:
        return _check_by_convention(gm, sites, inputs, groups[0])
    except SequenceMixed as error:
        raise _with_guesses(error, inputs) from None


def _is_of_shards(query: fx.Node) -> bool:
    """Whether a query is a plain shard, or wraps one for the attention only."""
    is_wrapped = query.target is DTensor.from_local
    return is_wrapped or not is_sequence_sharded(query.meta["example_value"])


def _check_by_convention(
    gm: fx.GraphModule, sites: Sequence[Site], inputs: Sequence[_Input], group_name: str
) -> Checking | None:
    """Check a graph of whose inputs no region knows anything.

    Without an attention nothing says whether all ranks have as many tokens. If that makes a
    difference, they compare.
    """
    uneven, nodes = _uneven_lengths(sites), {site.node for site in sites}

    def check(is_even: Callable[[int], bool]) -> None:
        types = [_type_of(entry, entry.value, is_even) for entry in inputs]
        values = [entry.value for entry in inputs]
        typer, _, returned = follow_graph(gm, nodes, values, types, is_even)
        typer.refuse_mixed(returned)
        warn_of_sums(typer, returned)

    try:
        check(lambda length: bool(sites) and length not in uneven)
    except SequenceMixed as error:
        if sites:
            raise
        check(lambda length: True)
        dims = {p: entry.dim for p, entry in enumerate(inputs) if isinstance(entry.dim, int)}
        return partial(compare_lengths, dims, group_name, error)
    return None


def _with_guesses(error: SequenceMixed, inputs: Sequence[_Input]) -> SequenceMixed:
    """Return a refusal that may be due to inputs of which two dims are as long as the tokens."""
    guessed = [
        f"{entry.name} {tuple(entry.sizes)}"
        for entry in inputs
        if entry.shard_dim is not None and not entry.is_named
        if entry.sizes.count(entry.sizes[entry.shard_dim]) > 1
    ]
    if not guessed:
        return error
    return SequenceMixed(
        site=error.site,
        expected=error.expected,
        got=error.got,
        remedy="say in options={'seq_dims': ...} which dim has the tokens of"
        f" {' and of '.join(guessed)}, of which two are as long; or {error.remedy}",
    )


def _count_all_labels(gm: fx.GraphModule, group_name: str) -> None:
    """Let means over labels compare how many count on each rank."""
    for node in list(nodes_of(gm)):
        is_own = is_marked(node, PER_RANK)
        if node.op != "call_function" or node.target not in COUNTED_LOSSES or is_own:
            continue
        bound = signature(node.target).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        call, labels = bound.arguments, bound.arguments["target"]
        value = labels.meta["example_value"]
        is_plain = not (value.is_floating_point() or isinstance(value, DTensor))
        if call["reduction"] != "mean" or not is_plain:
            continue
        with node.graph.inserting_before(node):
            args = (labels, call["input"], call["ignore_index"], group_name, name_of(node))
            counted = node.graph.call_function(count_labels, args)
        counted.meta = {**labels.meta, "stack_trace": node.meta.get("stack_trace")}
        call["target"] = counted
        node.args, node.kwargs = bound.args, bound.kwargs
    gm.recompile()


def _uneven_lengths(sites: Sequence[Site]) -> frozenset[int]:
    """Return how many tokens this rank has of sequences that do not divide by the ranks."""
    uneven = set()
    for site in sites:
        world = site.axis.world_size
        if site.attention.is_per_batch:
            known = [*whole_of_shard(site.plan_options.lengths, world, site.axis.rank).items()]
        else:
            recipe = site.attention.recipe
            known = [(_length(site.query), recipe.query_length)]
            known += [(_length(site.key), recipe.key_length)]
        uneven |= {own for own, whole in known if whole % world}
    return frozenset(uneven)


def _length(node: fx.Node) -> int:
    """Return how many tokens of a query, key or value this rank has."""
    return numbers(held_by_rank(node.meta["example_value"]).shape)[SEQUENCE_DIM]


@dataclass(slots=True)
class _Input:
    """An input of a graph, named as an argument of the model if it is one."""

    name: str
    value: Any  # as Dynamo has it
    sizes: list[int]  # of a tensor; none of anything else
    is_named: bool  # the user has named the dim
    is_of_module: bool  # it is a parameter or a buffer
    # The convention's place of its tokens; None: it has none; text: what it is, if not known.
    dim: int | str | None = None

    @property
    def shard_dim(self) -> int | None:
        """The dim of the tokens of a plain tensor; None if it has none."""
        is_plain = not isinstance(self.value, DTensor)
        return self.dim if isinstance(self.dim, int) and is_plain else None


def _inputs(
    gm: fx.GraphModule, sites: Sequence[Site], seq_dims: Mapping[str, int | None]
) -> list[_Input]:
    """Return the inputs of a graph, each with its sequence dim by the convention."""
    attended = {_origin(node) for site in sites for node in (site.query, site.key, site.value)}
    sources = {node: name for node, name, _ in graph_inputs(gm.graph)}
    inputs: dict[fx.Node, _Input] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value, source = node.meta.get("example_value"), sources.get(node, "")
        name = re.sub(r"^L\['(\w+)'\]", r"\1", source) or node.name
        sizes = numbers(value.shape) if isinstance(value, Tensor) else []
        is_of_module = isinstance(value, nn.Parameter) or (source or "L[")[:2] not in ("L[", "G[")
        inputs[node] = _Input(name, value, sizes, name in seq_dims, is_of_module)
    lengths = {_length(node) for site in sites for node in (site.query, site.key)}
    if not sites:
        telling = (entry for entry in inputs.values() if _tells_length(entry))
        lengths = {entry.sizes[min(len(entry.sizes) - 1, 1)] for entry in telling}
    for node, entry in inputs.items():
        is_free = not lengths.intersection(entry.sizes) if sites else not entry.sizes
        if entry.is_named:
            named, site = seq_dims[entry.name], f"options={{'seq_dims': ...}}, {entry.name}"
            entry.dim = None if named is None else dim_of(entry.value, named, site=site)
        elif not (entry.is_of_module or is_free):
            usual = (SEQUENCE_DIM,) if node in attended else _PLACES.get(len(entry.sizes), (1,))
            likely = [i for i in usual if lengths.intersection(entry.sizes[i : i + 1])]
            is_clear = likely and (sites or len(likely) == 1)
            entry.dim = likely[0] if is_clear else f"an input {entry.name} of {entry.sizes}"
    told = {entry.sizes[entry.dim] for entry in inputs.values() if isinstance(entry.dim, int)}
    for entry in inputs.values():
        places = [i for i, size in enumerate(entry.sizes) if size in told]
        if isinstance(entry.dim, str) and len(places) == 1:
            entry.dim = places[0]
    return [*inputs.values()]


def _tells_length(entry: _Input) -> bool:
    """Whether dim 1 of an input, or its only dim, holds tokens if no attention says what does."""
    value, num_dims = entry.value, len(entry.sizes)
    if entry.is_of_module or isinstance(value, DTensor) or num_dims not in (1, 2, 3):
        return False
    # A matrix of floats may be a table as well, or have tokens in dim 0.
    return num_dims == 3 or not (value.is_floating_point() or value.is_complex())


def _refuse_other_names(arguments: set[str], seq_dims: Mapping[str, int | None]) -> None:
    """Refuse names that no input has; what a graph does not use is still an input of the frame.

    Only where options declare the mesh: there a model is one graph, and has one frame.
    """
    known = frame_locals()
    others = [n for n in seq_dims if n not in arguments and re.split(r"\W", n)[0] not in known]
    if others and known:
        raise InvalidArgument(
            site='options={"seq_dims": ...}',
            expected=f"names of inputs: {', '.join(sorted(known | arguments))}",
            got=", ".join(map(repr, others)),
            remedy="name inputs as the model's forward does",
        )


def shards_of(gm: fx.GraphModule) -> dict[int, tuple[str, int]]:
    """Return the plain inputs that were found to be shards: by place, name and sequence dim."""
    nodes = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {place: node.meta[_SHARD] for place, node in nodes if _SHARD in node.meta}


# In the meta of plain inputs that are shards: their name, and the dim that their tokens are in.
_SHARD = "cp_inductor_shard"

# Where the tokens of an input are, by its number of dims; of four, behind batch and heads.
_PLACES = {1: (0,), 4: (1, 2)}


def _origin(node: fx.Node) -> fx.Node:
    """Return what a region has wrapped into a DTensor, or copied to have whole rows."""
    while node.target in (DTensor.from_local, MARK) or method_of(node) is Tensor.clone:
        (node,) = node.all_input_nodes[:1]
    return node


def _type_of(entry: _Input, value: Any, is_even: Callable[[int], bool]) -> Type:
    """Return the type of an input by the convention."""
    if isinstance(entry.dim, str):
        got = f"{entry.dim}, of which it is not known where its tokens are"
        name_it = "or name the dim, as in options={'seq_dims': {'ids': 1}}"
        remedy = f"call transpose(1, 2) after the split into heads, {name_it}"
        return Mixed("a compiled graph over plain shards", got, remedy)
    if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
        return Own()
    return Same() if entry.dim is None else shards_at(value, entry.dim, is_even)


def _type_in_region(
    inputs: Sequence[_Input], sites: Sequence[Site], typer: EagerTyper, place: int, value: Tensor
) -> Type:
    """Return the type of an input in a region: what was made in it of what was cut for it."""
    entry = inputs[place]
    is_said = entry.is_named or isinstance(value, DTensor)
    known = None if is_said else typer.find(value)
    if known is None and (is_said or sites or entry.is_of_module):
        known = _type_of(entry, value, typer.is_even)
    return typer.type_of(value) if known is None else known
