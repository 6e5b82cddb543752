"""Check every call of a graph that was compiled in a region, and say what it returns.

    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
        x = embedding(ids)          eager code: x is Shards(1)
        x = compiled_block(x)       Shards(1) in, so Shards(1) out
        x = compiled_conv(x)        Mixed
        loss(x).backward()          raises SequenceMixed

Code that was compiled once also runs on tensors of other types and lengths: for another block of a
model, behind `per_rank`, on a batch of another length. So the graph is followed anew for each types
that its inputs have, on the fake tensors of which it was traced. There tokens have another number;
`_resized` says which.

Assumes: who compiles the graph changes it behind this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from cp_inductor.errors import CPError
from cp_inductor.graph.subgraphs import copy_graphs
from cp_inductor.passes.follow_graph import follow_graph
from cp_inductor.region.regions import typers_of_program
from cp_inductor.sequence.count_labels import range_over_ranks
from cp_inductor.sequence.eager import EagerTyper
from cp_inductor.sequence.follow import REMEDY, warn_of_sums
from cp_inductor.sequence.rules.call import numbers
from cp_inductor.sequence.types import Mixed, Same, Shards, Type, conditions
from cp_inductor.trust.agreement import tell_refusal

# Returns the type of an input, given its place.
TypeOf = Callable[[EagerTyper, int, Tensor], Type]


# A type, and the sizes of the tensor that it is of.
_Sized = tuple[Type, Sequence[int]]
# Of the inputs that a graph writes to, and of its results; None for others, and for no tensors.
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
        """Check the call for which the graph is compiled, if it is known with which inputs.

        Raises:
            SequenceMixed: an attention, or a tensor that the model keeps, depends on what mixes
                tokens.
        """
        pairs = zip(values, self.values, strict=False)
        is_alike = all(isinstance(x, Tensor) == isinstance(y, Tensor) for x, y in pairs)
        if len(values) != len(self.values) or not is_alike:
            return  # DDP has cut the graph up
        with torch._C.DisableTorchFunction():
            for typer in typers_of_program():
                self._judge(typer, values, range(len(values)))

    def typed(self, run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
        """Return a compiled graph that is checked before each call, and types what it returns.

        Its arguments are at these places among the inputs of the graph.
        """

        @wraps(run)
        def call(*args: Any) -> Any:
            args = _at_places(args, places)
            with torch._C.DisableTorchFunction():
                judged = {typer: self._judge(typer, args, places) for typer in typers_of_program()}
            with ExitStack() as stack:
                for typer in judged:
                    stack.enter_context(typer.running())
                results = run(*args)
            with torch._C.DisableTorchFunction():
                for typer, found in judged.items():
                    if found is not None:
                        written, returned = found
                        _tell(typer, args, [written[place] for place in places])
                        _tell(typer, pytree.tree_leaves(results), returned)
            return results

        return call

    def _judge(
        self, typer: EagerTyper, values: Sequence[Any], places: Sequence[int]
    ) -> _Judgement | None:
        """Return what a call makes of its inputs, and the results; None if it does not matter."""
        tensors = {p: v for p, v in zip(places, values, strict=True) if isinstance(v, Tensor)}
        if typer.is_idle(tensors.values()):
            return None
        given = {place: self.type_of(typer, place, value) for place, value in tensors.items()}
        key = tuple(
            (place, found, tensors[place].shape, *conditions(found))
            for place, found in given.items()
        )
        if key not in self.known:
            types: list[Type] = [Same()] * len(self.values)
            for place, one in given.items():
                sizes = numbers(self.values[place].shape)
                types[place] = _resized((one, tensors[place].shape), sizes)
            try:
                self.known[key] = self._follow(typer, types)
            except CPError as error:
                tell_refusal(typer.group_name, error)
                raise
        return self.known[key]

    def _follow(self, typer: EagerTyper, types: Sequence[Type]) -> _Judgement:
        evens = {one.length: one.is_even for one in types if isinstance(one, Shards)}

        def is_even(length: int) -> bool:
            return evens[length] if length in evens else typer.is_even(length)

        followed, given, returned = follow_graph(self.gm, self.sites, self.values, types, is_even)
        warn_of_sums(followed, returned)

        def typed(value: Any) -> _Sized | None:
            is_tensor = isinstance(value, Tensor)
            return (followed.type_of(value), numbers(value.shape)) if is_tensor else None

        pairs = zip(map(typed, pytree.tree_leaves(given)), types, strict=True)
        written = [None if one is None or one[0] == before else one for one, before in pairs]
        return written, [*map(typed, pytree.tree_leaves(returned))]


class AlikeLengths:
    """Lets ranks compare how many tokens they have, in each call of a graph without attention.

    A mean over a rank's tokens is a part of the whole's if all ranks have as many of them. Between
    attentions ranks agree on that; here nobody else asks.

    It knows the dim of the tokens of each input that has any, by its place, the group of the ranks
    that share the sequence, and the error that there is if lengths differ.
    """

    def __init__(self, dims: Mapping[int, int], group_name: str, error: CPError) -> None:
        self.dims, self.group_name, self.error = dims, group_name, error

    def typed(self, run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
        """Return a compiled graph that compares lengths before each call."""

        @wraps(run)
        def call(*args: Any) -> Any:
            args = _at_places(args, places)
            shards = [
                (v, self.dims[p]) for p, v in zip(places, args, strict=True) if p in self.dims
            ]
            total = sum(tensor.shape[dim] for tensor, dim in shards)
            count = torch.tensor(total, device=shards[0][0].device)
            least, most = range_over_ranks(count, self.group_name)
            if least != most:
                raise self.error
            return run(*args)

        return call


def _at_places(args: tuple[Any, ...], places: Sequence[int]) -> tuple[Any, ...]:
    return tuple(args[place] for place in places) if len(args) > len(places) else args


def _tell(typer: EagerTyper, values: Sequence[Any], found: Sequence[_Sized | None]) -> None:
    for value, one in zip(values, found, strict=True):
        if isinstance(value, Tensor) and one is not None:
            typer.take(value, _resized(one, value.shape))


def _resized(found: _Sized, sizes: Sequence[int]) -> Type:
    """Return the type of a tensor of other sizes, in the same dims."""
    given, before = found
    if not isinstance(given, Shards) or list(before) == list(sizes):
        return given
    places = []
    for place in given.places():
        length, rest = divmod(sizes[place.dim], place.outer * place.inner)
        if rest:
            got = "tokens that were flattened with a batch of another size"
            return Mixed("a compiled graph", got, REMEDY)
        places.append(replace(place, length=length))
    return given.at(places)
