"""A call of an op, as the rules see it, what many rules ask about it, and where they register."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from cp_inductor.sequence.types import Mixed, Same, Shards, Sum, Type, describe
from cp_inductor.torch_private.arguments import OpOverload, bind_arguments
from cp_inductor.torch_private.sizes import size_hint
from cp_inductor.torch_private.tracing import tensors_in

POSITIONS = "pass positions, and what else stands at tokens, as inputs, sharded like the tokens"
SUMS = (
    "use dist.all_reduce first, or reduction='sum' and divide by the number of tokens of the whole"
    " sequence; or pass DTensors"
)


class Mixes(Exception):
    """What an op computes is not known to be anything of the whole."""

    def __init__(self, got: str, remedy: str = "", *, is_vote: bool = False) -> None:
        super().__init__(got)
        self.got, self.remedy, self.is_vote = got, remedy, is_vote


def numbers(sizes: Iterable[int | torch.SymInt]) -> list[int]:
    """Return sizes or strides in this compile, see `number`."""
    return [number(size) for size in sizes]


def number(size: int | torch.SymInt) -> int:
    """Return a size or stride in this compile; an unbacked one as a large odd number."""
    if isinstance(size, torch.SymInt) and has_free_unbacked_symbols(size):
        # Data decides it, so it equals itself and nothing else.
        return (1 << 31) - 1 + 2 * (hash(str(size)) % (1 << 20))
    return size_hint(size)


TypeOf = Callable[[Tensor], Type]


class OpCall:
    """A call of an op, as a rule sees it."""

    def __init__(self, op: OpOverload, args: Any, kwargs: Any, out: Any, type_of: TypeOf) -> None:
        self.op, self.type_of = op, type_of
        self.bound = bind_arguments(op, args, kwargs)
        self.tensors, self.outs = tensors_in(self.bound), tensors_in(out)
        self.types = [type_of(tensor) for tensor in self.tensors]

    def written(self) -> list[Tensor]:
        """Return the tensors that the op writes to and does not return."""
        names = [argument.name for argument in self.op._schema.arguments if argument.is_write]
        returned = {id(out) for out in self.outs}
        written = tensors_in([self.bound.get(name) for name in names])
        return [tensor for tensor in written if id(tensor) not in returned]

    def of(self, types: Sequence[Type]) -> OpCall:
        """Return the call for other types of its tensors."""
        call = copy(self)
        known = {id(tensor): kind for tensor, kind in zip(self.tensors, types, strict=True)}
        call.types, call.type_of = list(types), lambda tensor: known[id(tensor)]
        return call

    def lengths(self) -> frozenset[int]:
        """Return how many tokens it is given; -1 for sums over tokens."""
        lengths = {kind.length for kind in self.types if isinstance(kind, Shards)}
        lengths |= {-1 for kind in self.types if isinstance(kind, Sum)}
        return frozenset(lengths).union(*(g.lengths for g in self.types if isinstance(g, Mixed)))

    def shards(self, name: str = "self") -> Shards:
        """Return the type of an argument that must be of shards."""
        kind = self.type_of(self.bound[name])
        if not isinstance(kind, Shards):
            raise Mixes(f"{self.op} of {describe_kind(kind)} and tokens")
        return kind

    def is_same(self, name: str) -> bool:
        """Whether an argument is no tensor, or the same on every rank."""
        argument = self.bound[name]
        return not isinstance(argument, Tensor) or isinstance(self.type_of(argument), Same)

    def dims(self, name: str = "dim", of: str = "self") -> tuple[int, ...]:
        """Return the dims that an argument names; all if it names none."""
        ndim, named = self.bound[of].ndim, self.bound.get(name)
        if isinstance(named, int):
            named = [named]
        return tuple(dim % max(ndim, 1) for dim in named) if named else tuple(range(ndim))

    def aligned(self, out: Tensor, tensors: Sequence[Tensor] | None = None) -> Shards:
        """Return where the tokens are in a result that tensors are broadcast to."""
        shards: Shards | None = None
        tensors = self.tensors if tensors is None else tensors
        for tensor in tensors:
            kind = self.type_of(tensor)
            if isinstance(kind, Sum):
                raise Mixes(f"{self.op} of tokens and {describe_kind(kind)}", SUMS)
            if isinstance(kind, Shards):
                moved = replace(kind, dim=kind.dim + out.ndim - tensor.ndim)
                if shards not in (None, moved):
                    raise Mixes(f"{self.op} of tokens with other tokens, or along two dims")
                shards = moved
        if shards is None:
            raise Mixes(f"{self.op} of what is no shard")
        if numbers(out.shape)[shards.dim] != shards.outer * shards.length * shards.inner:
            raise Mixes(f"{self.op}, which repeats a token")
        for tensor in tensors:
            self.check_beside(tensor, shards.dim - out.ndim + tensor.ndim)
        return shards

    def check_beside(self, tensor: Tensor, dim: int) -> None:
        """Refuse numbers that are the same on every rank but differ from token to token."""
        kind = self.type_of(tensor)
        if not isinstance(kind, Same) or dim < 0 or is_uniform(tensor, kind):
            return
        if number(tensor.shape[dim]) != 1 and number(tensor.stride(dim)) != 0:
            size = number(tensor.shape[dim])
            got = f"{self.op} of tokens and of {size} numbers that are the same on every rank"
            raise Mixes(f"{got}, though other tokens are there", POSITIONS)

    def check_even(self, shards: Shards) -> None:
        """Refuse a mean over tokens of which ranks have unequally many."""
        if not shards.is_even:
            raise Mixes(f"{self.op} over unequally long shards: ranks weigh unequally", SUMS)


def is_uniform(tensor: Tensor, kind: Type) -> bool:
    """Whether every rank has one and the same number, at all entries of a tensor."""
    return isinstance(kind, Same) and (kind.is_uniform or tensor.numel() == 1)


def describe_kind(kind: Type) -> str:
    """Say what a tensor is, without numbers."""
    return "tokens" if isinstance(kind, Shards) else describe(kind)


Rule = Callable[[OpCall], "list[Type]"]
RULES: dict[OpOverload, Rule] = {}
TAGGED: dict[torch.Tag, Rule] = {}


def overloads(ops: Iterable[Any]) -> set[OpOverload]:
    """Return overloads, and all overloads of packets."""
    known = set()
    for op in ops:
        is_one = isinstance(op, OpOverload)
        known |= {op} if is_one else {getattr(op, name) for name in op.overloads()}
    return known


def rule(*ops: Any, tag: torch.Tag | None = None) -> Callable[[Rule], Rule]:
    """Register a rule for overloads, for all of packets, and for tagged ops without another."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(overloads(ops), rule))
        if tag is not None:
            TAGGED[tag] = rule
        return rule

    return register


def find_rule(op: OpOverload) -> Rule | None:
    """Return the rule of an op, or of its tag."""
    return RULES.get(op) or next((TAGGED[tag] for tag in op.tags if tag in TAGGED), None)
