"""Refuse operations other than attention that mix tokens of plain shards.

    ids (B, S)                             Shards(1): an input with as many tokens as an attention
    y = x.cumsum(1)                        Mixed
    out = attention(split(linear(y)))      => SequenceMixed: ... cumsum, which mixes tokens

Nothing about a plain tensor says that it is a shard, so inputs are told by convention: parameters
and buffers of modules are the same on every rank; of any other tensor dim 1 holds this rank's
tokens, if it is as long as its queries or keys (dim 0 of what has one dim, dim 2 of what is a
query, key or value itself). Beside such an input another dim that is as long will do, as of a table
of angles (S, D). ``options={"seq_dims": {"ids": 1}}`` says it of the rest. The graph is run once on
fake tensors, and every aten op is given types (`sequence.rules`). What is not proven to compute
each token by itself is refused if an attention or a result of the graph depends on it; so all ranks
refuse alike. A result that is a sum over tokens, and no number, gets a `SequenceWarning`.

The library spmd_types (0.2.3) does the same with DTensor's propagator, and is not used: both know
neither a dim into which batch and tokens were flattened, nor means. It takes 2 ms for an op, and
replaces torch.autograd.Function.apply for the whole process.

Losses that are means over labels are made to compare how many labels count on each rank
(`sequence.count_labels`); nothing else is changed.

Assumes: a graph from Dynamo whose attentions were found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from cp_inductor.dtensor.axis import is_sequence_sharded
from cp_inductor.dtensor.limits import dim_of
from cp_inductor.errors import SequenceMixed
from cp_inductor.graph.nodes import graphs_of, source_line
from cp_inductor.graph.subgraphs import method_of
from cp_inductor.passes.attentions import CAPTURED
from cp_inductor.passes.sites import Site
from cp_inductor.region.flex_calls import FLEX
from cp_inductor.region.marks import is_left_alone, is_per_rank
from cp_inductor.region.traced import MARK
from cp_inductor.sequence.count_labels import COUNTED_LOSSES, count_labels
from cp_inductor.sequence.follow import EXPECTED, REMEDY, Typer, warn_of_sums
from cp_inductor.sequence.rules.call import numbers
from cp_inductor.sequence.types import Mixed, Own, Same, Shards, Sum, Type, describe
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dynamo import graph_inputs
from cp_inductor.torch_private.modes import autocast_restored
from cp_inductor.torch_private.tracing import fake_copy, fake_mode_of, unbacked_ignored

aten = torch.ops.aten


def check_sequence(
    gm: fx.GraphModule, sites: Sequence[Site], seq_dims: Mapping[str, int | None] | None = None
) -> None:
    """Check a Dynamo graph over plain shards.

    Args:
        gm: the graph. Its means over labels are changed, nothing else.
        sites: all its attentions over a sharded sequence. Those over plain tensors, or over
            DTensors that wrap plain shards for the attention only, tell which dims are the
            sequence.
        seq_dims: of inputs, by their names in the model; None: the same on every rank.

    Raises:
        SequenceMixed: an attention, or a result, depends on what mixes tokens.
    """
    sites = [site for site in sites if site.axis.world_size > 1 and _is_of_shards(site)]
    if not sites:
        return
    _count_all_labels(gm, sites[0].axis.group_name)
    query = sites[0].query.meta["example_value"]
    local = query.to_local() if isinstance(query, DTensor) else query
    with (
        torch._C.DisableTorchFunction(),
        torch.enable_grad(),
        fake_mode_of(local),
        unbacked_ignored(local),
        autocast_restored() as entered,
    ):
        typer = _GraphTyper(_uneven_lengths(sites))
        inputs = _inputs(gm, sites, seq_dims or {})
        _mark_shards(gm, inputs)
        arguments = [_declare(typer, *given) for given in inputs]
        try:
            returned = _Follower(gm, typer, entered, {site.node for site in sites}).run(*arguments)
            typer.refuse_mixed(returned)
            same = [given for given, (_, dim) in zip(arguments, inputs, strict=True) if dim is None]
            typer.refuse_kept(typer.leaves(same))
        except SequenceMixed as error:
            raise _with_guesses(error, gm, inputs, seq_dims or {}) from None
    warn_of_sums(typer, returned)


def _with_guesses(
    error: SequenceMixed,
    gm: fx.GraphModule,
    inputs: Sequence[tuple[Any, int | str | None]],
    seq_dims: Mapping[str, int | None],
) -> SequenceMixed:
    """Return a refusal that may be due to inputs of which two dims are as long as the tokens."""
    shards = shards_of(gm)
    guessed = [
        f"{name} {tuple(sizes)}"
        for place, (name, dim) in shards.items()
        if (sizes := numbers(inputs[place][0].shape)).count(sizes[dim]) > 1 and name not in seq_dims
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


def _is_of_shards(site: Site) -> bool:
    """Whether an attention is over plain shards, or over DTensors that only wrap plain shards."""
    return site.query.target is DTensor.from_local or not is_sequence_sharded(
        site.query.meta["example_value"]
    )


def _count_all_labels(gm: fx.GraphModule, group_name: str) -> None:
    """Let means over labels compare how many count on each rank."""
    for graph in graphs_of(gm):
        for node in graph.nodes:
            if node.op != "call_function" or node.target not in COUNTED_LOSSES or is_per_rank(node):
                continue
            given = signature(node.target).bind(*node.args, **node.kwargs)
            given.apply_defaults()
            labels = given.arguments["target"]
            value = labels.meta["example_value"]
            if given.arguments["reduction"] != "mean" or value.is_floating_point():
                continue
            if isinstance(value, DTensor):
                continue
            with graph.inserting_before(node):
                where = (given.arguments["ignore_index"], group_name, _name(node))
                counted = graph.call_function(
                    count_labels, (labels, given.arguments["input"], *where)
                )
            counted.meta = {**labels.meta, "stack_trace": node.meta.get("stack_trace")}
            given.arguments["target"] = counted
            node.args, node.kwargs = given.args, given.kwargs
    gm.recompile()


def _name(node: fx.Node) -> str:
    return f"{node.name} ({source_line(node)})"


def _uneven_lengths(sites: Sequence[Site]) -> frozenset[int]:
    """Return how many tokens this rank has of sequences that do not divide by the ranks."""
    uneven = set()
    for site in sites:
        if not site.attention.is_per_batch:
            recipe = site.attention.recipe
            whole = (recipe.query_length, recipe.key_length)
            own = (_length(site.query), _length(site.key))
            world = site.axis.world_size
            uneven |= {n for n, m in zip(own, whole, strict=True) if m % world}
    return frozenset(uneven)


def _length(node: fx.Node) -> int:
    """Return how many tokens of a query, key or value this rank has."""
    value = node.meta["example_value"]
    local = value.to_local() if isinstance(value, DTensor) else value
    return numbers(local.shape)[SEQUENCE_DIM]


def _inputs(
    gm: fx.GraphModule, sites: Sequence[Site], seq_dims: Mapping[str, int | None]
) -> list[tuple[Any, int | str | None]]:
    """Return the inputs of a graph, each with its sequence dim; None if it has none."""
    lengths = {_length(node) for site in sites for node in (site.query, site.key)}
    attended = {_origin(node) for site in sites for node in (site.query, site.key, site.value)}
    names = {node: name for node, name, _ in graph_inputs(gm.graph)}
    given = {n: n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")}
    sizes = {n: numbers(v.shape) if isinstance(v, Tensor) else [] for n, v in given.items()}
    dims: dict[fx.Node, int | str | None] = {}
    for node, value in given.items():
        name = names.get(node, "")
        argument = _argument(node, name)
        is_of_module = isinstance(value, nn.Parameter) or (name and name[:2] not in ("L[", "G["))
        usual = [i for i in _PLACES.get(len(sizes[node]), (1,)) if sizes[node][i : i + 1]]
        if argument in seq_dims:
            dims[node] = _named_dim(argument, seq_dims[argument], value)
        elif is_of_module or not lengths.intersection(sizes[node]):
            dims[node] = None
        elif node in attended:
            dims[node] = SEQUENCE_DIM
        else:
            found = [i for i in usual if sizes[node][i] in lengths]
            dims[node] = found[0] if found else f"an input {argument} of {sizes[node]}"
    told = {sizes[node][dim] for node, dim in dims.items() if isinstance(dim, int)}
    for node, dim in dims.items():
        places = [i for i, size in enumerate(sizes[node]) if size in told]
        if isinstance(dim, str) and len(places) == 1:
            dims[node] = places[0]
    return [(value, dims[node]) for node, value in given.items()]


def _named_dim(argument: str, dim: int | None, value: object) -> int | None:
    """Return a dim that an option names, counted from the first."""
    site = f"options={{'seq_dims': ...}}, {argument}"
    return None if dim is None else dim_of(value, dim, site=site)


def _mark_shards(gm: fx.GraphModule, inputs: Sequence[tuple[Any, int | str | None]]) -> None:
    """Leave in plain inputs that are shards, for `shards_of`, which dim their tokens are in."""
    for node, (value, dim) in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(dim, int) and not isinstance(value, DTensor):
            node.meta[_SHARD] = dim


def shards_of(gm: fx.GraphModule) -> dict[int, tuple[str, int]]:
    """Return the plain inputs that were found to be shards: by place, name and sequence dim."""
    names = {node: _argument(node, name) for node, name, _ in graph_inputs(gm.graph)}
    nodes = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {
        place: (names.get(node, node.name), node.meta[_SHARD])
        for place, node in nodes
        if _SHARD in node.meta
    }


def _argument(node: fx.Node, name: str) -> str:
    """Return the name of an input as an argument of the model, if it is one."""
    return re.sub(r"^L\['(\w+)'\]", r"\1", name) or node.name


_SHARD = "cp_inductor_shard"

_NAME_IT = (
    "call transpose(1, 2) after the split into heads, or name the dim, as in"
    " options={'seq_dims': {'ids': 1}}"
)

# Where the tokens of an input are, by its number of dims; of four, behind batch and heads.
_PLACES = {1: (0,), 4: (1, 2)}


def _origin(node: fx.Node) -> fx.Node:
    """Return what a region has wrapped into a DTensor, or copied to have whole rows."""
    while node.target in (DTensor.from_local, MARK) or method_of(node) is Tensor.clone:
        (node,) = node.all_input_nodes[:1]
    return node


def _declare(typer: _GraphTyper, value: Any, dim: int | str | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = fake_copy(value)
    found: Type = Same()
    if isinstance(dim, str):
        got = f"{dim}, of which it is not known where its tokens are"
        found = Mixed("options={'mesh': ...}", got, _NAME_IT)
    elif isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
        found = Own()
    elif dim is not None:
        found = typer.shards(copy, dim)
    typer.types[copy] = found
    return copy


class _GraphTyper(Typer):
    """Types the values of a graph.

    Args:
        uneven: how many tokens this rank has of sequences that do not divide by the ranks.
    """

    def __init__(self, uneven: frozenset[int]) -> None:
        super().__init__(lambda length: length not in uneven)
        self.node: fx.Node | None = None

    def locate(self) -> str:
        """Return the name and source line of the node."""
        assert self.node is not None
        return _name(self.node)

    def meet_first(self, tensor: Tensor) -> Type:
        """Return the type of a constant of the graph."""
        return Same()

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Give results their types; refuse numbers and sizes, which have none, of tokens."""
        super().meet(op, args, kwargs, out)
        outs = self.leaves(out)
        found = [self.type_of(tensor) for tensor in self.leaves((args, kwargs))]
        own = next((one for one in found if isinstance(one, (Shards, Sum, Mixed))), None)
        is_read = torch.Tag.data_dependent_output in op.tags and not outs
        is_sized = any(has_free_unbacked_symbols(one) for one in outs) and any(
            isinstance(self.types[one], Mixed) for one in outs
        )
        if own is not None and (is_read or is_sized):
            raise SequenceMixed(
                site=self.locate(),
                expected=EXPECTED,
                got=f"a number or a size that is read off {describe(own)}",
                remedy=f"use dist.all_reduce first; {REMEDY}",
            )


class _Follower(fx.Interpreter):
    """Runs a Dynamo graph on fake tensors; handles attentions and the making of DTensors itself."""

    def __init__(
        self, gm: fx.GraphModule, typer: _GraphTyper, entered: list[Any], sites: set[fx.Node]
    ) -> None:
        super().__init__(gm)
        self.typer, self.entered, self.sites = typer, entered, sites
        self.extra_traceback = False  # which would change the text of errors

    def run_node(self, n: fx.Node) -> Any:
        self.typer.node = n
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        by_hand = self._by_hand(n)
        if by_hand is not None:
            return by_hand(n, args, kwargs)
        if is_per_rank(n):
            with self.typer.trusting(args, kwargs) as made:
                made.append(getattr(self, n.op)(n.target, args, kwargs))
            return made[0]
        with self.typer:
            return getattr(self, n.op)(n.target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return fake_copy(value) if isinstance(value, Tensor) else value

    def _by_hand(self, node: fx.Node) -> Callable[..., Any] | None:
        if node.op == "call_method":
            return self._rewrap if method_of(node) in _REWRAPPING else None
        if node.target in CAPTURED and (node in self.sites or is_left_alone(node)):
            return self._attend
        if node.target in (torch.amp._enter_autocast, torch.amp._exit_autocast):
            return self._autocast
        if node.target in _REWRAPPING:
            return self._rewrap
        if node.target is count_labels:
            return self._count
        if node.target is MARK:
            return self._pass_on
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self._call_body
        return None

    def _attend(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is FLEX:
            tensors = args[:3]
        else:
            bound = bind_arguments(aten.scaled_dot_product_attention.default, args, kwargs)
            tensors = [bound[name] for name in ("query", "key", "value")]
            self.typer.refuse_mixed(bound["attn_mask"])
        is_local = node not in self.sites
        if not is_local:
            self.typer.check_attention(_name(node), *tensors)
        results = pytree.tree_map_only(Tensor, fake_copy, node.meta["example_value"])
        for result in self.typer.leaves(results):
            self.typer.attended(result, tensors, is_local=is_local)
        return results

    def _count(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        counted, found = fake_copy(args[0]), self.typer.type_of(args[0])
        if isinstance(found, Shards):
            found = replace(found, is_counted=True)
        self.typer.types[counted] = found
        return counted

    def _pass_on(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        return args[0]

    def _rewrap(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Convert between a local tensor and a DTensor: the tokens stay where they are."""
        found, out = self.typer.type_of(args[0]), fake_copy(node.meta["example_value"])
        if isinstance(found, Shards):
            if node.target is DTensor.from_local and isinstance(out, DTensor):
                dims = [getattr(placement, "dim", None) for placement in out.placements]
                found = next((place for place in found.places() if place.dim in dims), found)
            size = numbers(out.shape)[found.dim]
            found = replace(found, length=size // (found.outer * found.inner), others=())
        self.typer.types[out] = found
        return out

    def _autocast(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is torch.amp._enter_autocast:
            self.entered.append(torch.amp._enter_autocast(*args, **kwargs))
            return self.entered[-1]
        self.entered.remove(args[0])
        return torch.amp._exit_autocast(*args, **kwargs)

    def _call_body(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run the bodies of a higher-order op that are called once, with its operands."""
        bodies = [arg for arg in args if isinstance(arg, fx.GraphModule)]
        operands = [] if not bodies else list(args[1 + args.index(bodies[-1]) :])
        # Some are named, some are given their operands as one.
        operands = [operand for operand in operands if not isinstance(operand, str)]
        if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
            operands = list(operands[0])
        if node.target is torch.ops.higher_order.autograd_function_apply:
            bodies = bodies[:1]
        is_known = len(bodies) == 1 and not any(isinstance(one, (tuple, list)) for one in operands)
        if node.target is torch.ops.higher_order.cond:
            # All ranks must take one branch.
            is_known = not isinstance(args[0], Tensor) or isinstance(
                self.typer.type_of(args[0]), (Same, Own)
            )
        counts = {len(body.graph.find_nodes(op="placeholder")) for body in bodies}
        if not is_known or counts != {len(operands)}:
            return self._lose(node, args)
        first, *others = (
            _Follower(body, self.typer, self.entered, self.sites).run(*operands) for body in bodies
        )
        self.typer.node = node
        for other in others:
            if [self.typer.types.get(t) for t in self.typer.leaves(other)] != [
                self.typer.types.get(t) for t in self.typer.leaves(first)
            ]:
                return self._lose(node, args)
        # A function with a backward of its own returns as well what that needs.
        is_function = node.target is torch.ops.higher_order.autograd_function_apply
        return first[0] if is_function else first

    def _lose(self, node: fx.Node, args: Any) -> Any:
        """Return results of which nothing is known; of tensors that ranks share, the same."""
        given = [self.typer.type_of(tensor) for tensor in self.typer.leaves(args)]
        is_same = bool(given) and all(isinstance(one, Same) for one in given)
        got = f"{node.target}, which is not known to keep tokens apart"
        out = pytree.tree_map_only(Tensor, fake_copy, node.meta["example_value"])
        for leaf in self.typer.leaves(out):
            self.typer.types[leaf] = Same() if is_same else Mixed(_name(node), got, REMEDY)
        return out


_REWRAPPING = frozenset(
    {DTensor.from_local, DTensor.to_local, DTensor.redistribute, DTensor.full_tensor}
)
