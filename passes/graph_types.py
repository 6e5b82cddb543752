"""Give everything in a Dynamo graph over plain shards a type, and check every call of it.

    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
        x = embedding(ids)          eager code: x is Shards(1)
        x = compiled_block(x)       Shards(1) in, so Shards(1) out
        x = compiled_conv(x)        Mixed
        loss(x).backward()          raises SequenceMixed

A graph is run on fake tensors, op by op (`sequence.follow`). An attention over a sharded sequence,
and what makes DTensors of shards for it, is not run: where its tokens are is known.

Code that was compiled once also runs on tensors of other types and lengths, as of another block or
batch. So the graph is followed anew for each types that its inputs have, on the fake tensors with
which it was traced. There tokens have another number; `_resized` says which.

Assumes: a graph from Dynamo whose attentions were found, and that who compiles it changes it behind
this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils import _pytree as pytree

from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import CPError
from cp_inductor.graph.nodes import name_of
from cp_inductor.graph.subgraphs import copy_graphs, method_of
from cp_inductor.passes.attentions import CAPTURED, SDPA_OP
from cp_inductor.region.marks import FLEX, LEFT_ALONE, MARK, PER_RANK, is_marked
from cp_inductor.region.modes import typers_of_program
from cp_inductor.sequence.eager import EagerTyper
from cp_inductor.sequence.follow import EXPECTED, REMEDY, Typer, warn_of_sums
from cp_inductor.sequence.rules.call import numbers
from cp_inductor.sequence.types import Mixed, Own, Same, Shards, Type, describe, first_own, identity
from cp_inductor.sequence.wholes import count_labels, range_over_ranks
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.modes import autocast_restored
from cp_inductor.torch_private.tracing import fake_copy, fake_mode_of, map_tensors, unbacked_ignored
from cp_inductor.trust.agreement import tell_refusal

# What converts between DTensors and plain tensors.
REWRAPPING = frozenset(
    {DTensor.from_local, DTensor.to_local, DTensor.redistribute, DTensor.full_tensor}
)


def follow_graph(
    gm: fx.GraphModule,
    sites: set[fx.Node],
    values: Sequence[Any],
    types: Sequence[Type],
    is_even: Callable[[int], bool],
) -> tuple[GraphTyper, list[Any], Any]:
    """Run a graph on fake tensors; return what knows their types, the inputs and the results.

    Refused is an attention, and a tensor that the model keeps, that depends on what mixes tokens.
    The sites are the attentions over a sharded sequence. `values` and `types` are of the inputs,
    one of which is a tensor; types of others are not read. `is_even` is that of a `Typer`.
    """
    like = next(value for value in values if isinstance(value, Tensor))
    local = held_by_rank(like)
    with (
        torch._C.DisableTorchFunction(),
        torch.enable_grad(),
        fake_mode_of(local),
        unbacked_ignored(local),
        autocast_restored() as entered,
    ):
        typer = GraphTyper(is_even)
        entering = [fake_copy(value) if isinstance(value, Tensor) else value for value in values]
        typed = [(t, k) for t, k in zip(entering, types, strict=True) if isinstance(t, Tensor)]
        typer.types.update(typed)
        returned = _Follower(gm, typer, entered, sites).run(*entering)
        typer.refuse_kept([tensor for tensor, kind in typed if isinstance(kind, Same)])
    return typer, entering, returned


class GraphTyper(Typer):
    """Types the values of a graph."""

    node: fx.Node

    def locate(self) -> str:
        """Return the name and source line of the node."""
        return name_of(self.node)

    def meet_first(self, tensor: Tensor) -> Type:
        """Return the type of a constant of the graph."""
        return Same()

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Give results their types; refuse numbers and sizes, which have none, of tokens."""
        super().meet(op, args, kwargs, out)
        outs = self.leaves(out)
        own = first_own(map(self.type_of, self.leaves((args, kwargs))))
        is_read = torch.Tag.data_dependent_output in op.tags and not outs
        is_sized = any(has_free_unbacked_symbols(result) for result in outs) and any(
            isinstance(self.types[result], Mixed) for result in outs
        )
        if own is not None and (is_read or is_sized):
            got = f"a number or a size that is read off {describe(own)}"
            raise self.refusal(EXPECTED, got, f"use dist.all_reduce first; {REMEDY}")


class _Follower(fx.Interpreter):
    """Runs a Dynamo graph on fake tensors; handles attentions and the making of DTensors itself."""

    def __init__(
        self, gm: fx.GraphModule, typer: GraphTyper, entered: list[Any], sites: set[fx.Node]
    ) -> None:
        super().__init__(gm)
        self.typer, self.entered, self.sites = typer, entered, sites
        self.extra_traceback = False  # which would change the text of errors

    def run_node(self, n: fx.Node) -> Any:
        self.typer.node = n
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if (by_hand := self._by_hand(n)) is not None:
            return by_hand(n, args, kwargs)
        if is_marked(n, PER_RANK):
            return self.typer.trust(getattr(self, n.op), n.target, args, kwargs)
        self.typer.check_call(n.target, args, kwargs)
        with self.typer:
            return getattr(self, n.op)(n.target, args, kwargs)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return fake_copy(value) if isinstance(value, Tensor) else value

    def _by_hand(self, node: fx.Node) -> Callable[..., Any] | None:
        if (method_of(node) or node.target) in REWRAPPING:
            return self._rewrap
        if node.op == "call_method":
            return None
        if node.target in CAPTURED and (node in self.sites or is_marked(node, LEFT_ALONE)):
            return self._attend
        if node.target in (torch.amp._enter_autocast, torch.amp._exit_autocast):
            return self._autocast
        if node.target is count_labels:
            return self._count
        if node.target is MARK:
            return lambda node, args, kwargs: args[0]
        is_body = isinstance(node.target, torch._ops.HigherOrderOperator)
        return self._call_body if is_body else None

    def _attend(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.target is FLEX:
            tensors = args[:3]
        else:
            bound = bind_arguments(SDPA_OP, args, kwargs)
            tensors = [bound[name] for name in ("query", "key", "value")]
            self.typer.refuse_mixed(bound["attn_mask"])
        if node in self.sites:
            self.typer.check_attention(name_of(node), *tensors)
        results = map_tensors(fake_copy, node.meta["example_value"])
        for result in self.typer.leaves(results):
            self.typer.attended(result, tensors, is_local=node not in self.sites)
        return results

    def _count(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        counted, kind = fake_copy(args[0]), self.typer.type_of(args[0])
        if isinstance(kind, Shards):
            kind = replace(kind, is_counted=True)
        self.typer.types[counted] = kind
        return counted

    def _rewrap(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Convert between a local tensor and a DTensor: the tokens stay where they are."""
        kind, out = self.typer.type_of(args[0]), fake_copy(node.meta["example_value"])
        if isinstance(kind, Shards):
            if node.target is DTensor.from_local and isinstance(out, DTensor):
                dims = [getattr(placement, "dim", None) for placement in out.placements]
                kind = next((place for place in kind.places() if place.dim in dims), kind)
            size = numbers(out.shape)[kind.dim]
            kind = replace(kind, length=size // (kind.outer * kind.inner), others=())
        self.typer.types[out] = kind
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
        is_function = node.target is torch.ops.higher_order.autograd_function_apply
        bodies = bodies[:1] if is_function else bodies
        is_known = len(bodies) == 1 and not any(isinstance(x, (tuple, list)) for x in operands)
        if node.target is torch.ops.higher_order.cond:
            # All ranks must take one branch.
            kind = self.typer.type_of(args[0]) if isinstance(args[0], Tensor) else Same()
            is_known = isinstance(kind, (Same, Own))
        counts = {len(body.graph.find_nodes(op="placeholder")) for body in bodies}
        if not is_known or counts != {len(operands)}:
            return self._lose(node, args)
        followers = [_Follower(body, self.typer, self.entered, self.sites) for body in bodies]
        results = [follower.run(*operands) for follower in followers]
        self.typer.node = node
        types = [[*map(self.typer.types.get, self.typer.leaves(out))] for out in results]
        if any(other != types[0] for other in types):
            return self._lose(node, args)
        # A function with a backward of its own returns as well what that needs.
        return results[0][0] if is_function else results[0]

    def _lose(self, node: fx.Node, args: Any) -> Any:
        """Return results of which nothing is known; of tensors that ranks share, the same."""
        kinds = {type(self.typer.type_of(tensor)) for tensor in self.typer.leaves(args)}
        got = f"{node.target}, which is not known to keep tokens apart"
        lost = Same() if kinds == {Same} else Mixed(name_of(node), got, REMEDY)
        out = map_tensors(fake_copy, node.meta["example_value"])
        self.typer.types.update(dict.fromkeys(self.typer.leaves(out), lost))
        return out


# Calls a compiled graph.
Run = Callable[..., Any]
# Returns one whose calls are checked, given where its arguments are among the inputs.
Checking = Callable[[Run, Sequence[int]], Run]
# Returns the type of an input, given its place.
TypeOf = Callable[[EagerTyper, int, Tensor], Type]
# A type, and the sizes of the tensor that it is of.
_Sized = tuple[Type, Sequence[int]]
# The types of inputs that a graph writes to, and of its results; None for all other values.
_Judgement = tuple[list[_Sized | None], list[_Sized | None]]


class GraphTypes:
    """What a graph makes of the types of its inputs, for each types that they had in a call.

    A graph from Dynamo is copied. Its sites are the attentions over a sharded sequence.
    """

    def __init__(self, gm: fx.GraphModule, sites: Collection[fx.Node], type_of: TypeOf) -> None:
        self.gm, copies = copy_graphs(gm)
        self.sites = {copies[node] for node in sites}
        inputs = gm.graph.find_nodes(op="placeholder")
        self.values = [node.meta.get("example_value") for node in inputs]
        self.type_of = type_of
        self.known: dict[Hashable, _Judgement] = {}

    def check(self, values: Sequence[Any]) -> None:
        """Check the call for which the graph is compiled, if it is known with which inputs."""
        pairs = zip(values, self.values, strict=False)
        is_alike = all(isinstance(x, Tensor) == isinstance(y, Tensor) for x, y in pairs)
        if len(values) != len(self.values) or not is_alike:
            return  # DDP has cut the graph up
        with torch._C.DisableTorchFunction():
            for typer in typers_of_program():
                self._judge(typer, dict(enumerate(values)))

    def typed(self, run: Run, places: Sequence[int]) -> Run:
        """Return a compiled graph that is checked before each call, and types what it returns.

        Its arguments are at these places among the inputs of the graph.
        """

        def call(*args: Any) -> Any:
            inputs = dict(zip(places, args, strict=True))
            with torch._C.DisableTorchFunction():
                judged = {typer: self._judge(typer, inputs) for typer in typers_of_program()}
            with ExitStack() as stack:
                for typer in judged:
                    stack.enter_context(typer.running())
                results = run(*args)
            with torch._C.DisableTorchFunction():
                for typer, judgement in judged.items():
                    if judgement is not None:
                        written, returned = judgement
                        _tell(typer, args, [written[place] for place in places])
                        _tell(typer, pytree.tree_leaves(results), returned)
            return results

        return call

    def _judge(self, typer: EagerTyper, inputs: Mapping[int, Any]) -> _Judgement | None:
        """Return what a call makes of its inputs, and the results; None if it does not matter."""
        tensors = {p: value for p, value in inputs.items() if isinstance(value, Tensor)}
        if typer.is_idle(tensors.values()):
            return None
        kinds = {place: self.type_of(typer, place, value) for place, value in tensors.items()}
        key = tuple((p, tensors[p].shape, identity(kind)) for p, kind in kinds.items())
        if key not in self.known:
            types: list[Type] = [Same()] * len(self.values)
            for p, kind in kinds.items():
                types[p] = _resized((kind, tensors[p].shape), numbers(self.values[p].shape))
            try:
                self.known[key] = self._follow(typer, types)
            except CPError as error:
                tell_refusal(typer.group_name, error)
                raise
        return self.known[key]

    def _follow(self, typer: EagerTyper, types: Sequence[Type]) -> _Judgement:
        evens = {kind.length: kind.is_even for kind in types if isinstance(kind, Shards)}

        def is_even(length: int) -> bool:
            return evens[length] if length in evens else typer.is_even(length)

        followed, inputs, returned = follow_graph(self.gm, self.sites, self.values, types, is_even)
        warn_of_sums(followed, returned)

        def typed(value: Any) -> _Sized | None:
            is_tensor = isinstance(value, Tensor)
            return (followed.type_of(value), numbers(value.shape)) if is_tensor else None

        pairs = zip(map(typed, pytree.tree_leaves(inputs)), types, strict=True)
        written = [None if kind is None or kind[0] == before else kind for kind, before in pairs]
        return written, [*map(typed, pytree.tree_leaves(returned))]


def compare_lengths(
    dims: Mapping[int, int], group_name: str, error: CPError, run: Run, places: Sequence[int]
) -> Run:
    """Return a compiled graph that lets ranks compare how many tokens they have, in each call.

    A mean over a rank's tokens is a part of the whole's if all ranks have as many of them. Between
    attentions ranks agree on that; in a graph without any, nobody else asks. `dims` are those of
    the tokens of inputs, by their places. The error is raised if lengths differ.
    """

    def call(*args: Any) -> Any:
        shards = [(v, dims[p]) for p, v in zip(places, args, strict=True) if p in dims]
        total = sum(tensor.shape[dim] for tensor, dim in shards)
        count = torch.tensor(total, device=shards[0][0].device)
        least, most = range_over_ranks(count, group_name)
        if least != most:
            raise error
        return run(*args)

    return call


def _tell(typer: EagerTyper, values: Sequence[Any], judged: Sequence[_Sized | None]) -> None:
    for value, kind in zip(values, judged, strict=True):
        if isinstance(value, Tensor) and kind is not None:
            typer.take(value, _resized(kind, value.shape))


def _resized(sized: _Sized, sizes: Sequence[int]) -> Type:
    """Return the type of a tensor of other sizes, in the same dims."""
    kind, before = sized
    if not isinstance(kind, Shards) or list(before) == list(sizes):
        return kind
    places = []
    for place in kind.places():
        length, rest = divmod(sizes[place.dim], place.outer * place.inner)
        if rest:
            got = "tokens that were flattened with a batch of another size"
            return Mixed("a compiled graph", got, REMEDY)
        places.append(replace(place, length=length))
    return kind.at(places)
