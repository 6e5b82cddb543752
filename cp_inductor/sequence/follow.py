"""Follow types through the ops that run, and refuse what uses what was mixed.

    with typer:                     x: Shards(1)
        y = x.cumsum(1)             y: Mixed("cumsum, which mixes tokens")
        z = x.gelu()                z: Shards(1)
    typer.check_attention(y, ...)   raises SequenceMixed

A mixed tensor is refused when something depends on it: an attention, a backward, a result of a
graph or region, a number that Python reads. A model may compute mixed tensors that it does not use.
Tensors are held weakly. A write to a tensor also changes the types of tensors that share its
memory.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.errors import SequenceMixed, SequenceWarning
from cp_inductor.sequence.rules.call import SUMS, Mixes, OpCall, find_rule, numbers
from cp_inductor.sequence.rules.infer import infer_types
from cp_inductor.sequence.types import (
    ATTENDED_DIM,
    Mixed,
    Own,
    Same,
    Shards,
    Sum,
    Type,
    describe,
    first_own,
    regroup,
)
from cp_inductor.torch_private.modes import OpWatcher
from cp_inductor.torch_private.tracing import tensors_in

EXPECTED = "what computes each token by itself, attention, and sums over tokens"
REMEDY = (
    "compute it before the sequence is sharded, or pass DTensors; if each rank should compute it"
    " within its own shard, say so: with cp_inductor.per_rank()"
)
_WRITES = "which writes to what it does not return"


class Typer(OpWatcher):
    """Gives every tensor that ops make inside a type.

    `is_even` says whether all ranks have as many tokens as this one, given how many it has.
    """

    # Higher-order ops have no rules, so nothing is known about their results.
    supports_higher_order_operators = True
    leaves = staticmethod(tensors_in)

    def __init__(self, is_even: Callable[[int], bool]) -> None:
        super().__init__()
        self.is_even = is_even
        self.types: MutableMapping[Tensor, Type] = WeakTensorKeyDictionary()

    def locate(self) -> str:
        """Return where the program is."""
        raise NotImplementedError

    def refusal(
        self, expected: str, got: str, remedy: str = REMEDY, site: str = ""
    ) -> SequenceMixed:
        """Return the error that refuses what the program calls, here or at a site."""
        site = site or self.locate()
        return SequenceMixed(site=site, expected=expected, got=got, remedy=remedy)

    def meet_first(self, tensor: Tensor) -> Type:
        """Return the type of a tensor that no op inside has made."""
        raise NotImplementedError

    def type_of(self, tensor: Tensor) -> Type:
        """Return the type of a tensor."""
        known = self.types.get(tensor)
        if known is None:
            known = self.types[tensor] = self.meet_first(tensor)
        return known

    def type_attended(self, tensor: Tensor) -> Type:
        """Return the type of a query, key or value."""
        return self.type_of(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        if is_aten and find_rule(func) is None:
            # In inference mode, composite ops are not decomposed before they come here.
            with self:
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        return super().__torch_dispatch__(func, types, args, kwargs)

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Give the results of an op their types."""
        if not op._schema.is_mutable and not self.leaves(out):
            return
        call = OpCall(op, args, kwargs, out, self.type_of)
        if call.outs:
            try:
                types: Sequence[Type] = infer_types(call)
            except Mixes as error:
                types = [self._mixed(call, error)] * len(call.outs)
            for tensor, kind in zip(call.outs, types, strict=True):
                self.put(tensor, kind)
        for tensor in call.written():
            if all(isinstance(kind, Same) for kind in call.types):
                self.put(tensor, Same())
            elif any(isinstance(kind, Own) for kind in call.types):
                self.put(tensor, Own())
            else:
                self.put(tensor, self._mixed(call, Mixes(f"{op}, {_WRITES}")))

    def _mixed(self, call: OpCall, error: Mixes) -> Mixed:
        words = (error.got, error.remedy or REMEDY)
        return Mixed(self.locate(), *words, call.lengths(), error.is_vote)

    def put(self, tensor: Tensor, kind: Type) -> None:
        """Set the type of a tensor: a result, or what was written to."""
        known = self.types.get(tensor)
        self.types[tensor] = kind
        if known is None or (known == kind and not isinstance(kind, (Mixed, Same))):
            return
        for other in list(self.types):
            if other is not tensor and _share_memory(other, tensor):
                self.types[other] = self._after_write(tensor, kind, other)

    def _after_write(self, part: Tensor, kind: Type, other: Tensor) -> Type:
        """Return the type of a tensor after a write to a part of its memory."""
        before = self.types[other]
        if isinstance(kind, Same) and isinstance(before, (Same, Own)):
            # The rest of it may hold another number.
            return Same() if isinstance(before, Same) else before
        if isinstance(kind, Own) or before == kind:
            return kind
        if isinstance(kind, Shards) and isinstance(before, Shards) and before.length == 1:
            return before  # all entries belong to its single token
        if isinstance(before, Same) and before.is_uniform and isinstance(kind, Shards):
            sizes, part_sizes = numbers(other.shape), numbers(part.shape)
            if len(sizes) == len(part_sizes) and sizes[kind.dim] == part_sizes[kind.dim]:
                return kind
            if numbers([other.numel()]) == numbers([part.numel()]) and part.is_contiguous():
                places = regroup(part_sizes, kind, sizes) if other.is_contiguous() else None
                if places:
                    return kind.at(places)
        return Mixed(self.locate(), "a write to a part of a tensor that others read", REMEDY)

    def trust(self, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function that is meant within each shard: what it returns and writes to is Own."""
        read = self.leaves((args, kwargs))
        versions = [version_of(tensor) for tensor in read]
        out = func(*args, **kwargs)
        written = [t for t, before in zip(read, versions, strict=True) if version_of(t) != before]
        for tensor in (*written, *self.leaves(out)):
            # A later `to_local` makes a view of the local tensor without calling any mode.
            with torch.no_grad():
                parts = [tensor, tensor.to_local()] if isinstance(tensor, DTensor) else [tensor]
            for part in parts:
                self.type_of(part)
                self.put(part, Own())
        return out

    def check_call(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse what no op says: losses divided by a number of tokens that differs among ranks.

        These are `kl_div` with "batchmean", and the cross entropy of probabilities. And slices that
        end behind this rank's tokens, for which torch calls no op.
        """
        if func in (Tensor.__getitem__, operator.getitem) and isinstance(args[0], Tensor):
            self._check_slices(*args)
        if func not in (F.kl_div, F.cross_entropy):
            return
        bound = signature(func).bind(*args, **kwargs).arguments
        kind, reduction = self.type_of(bound["input"]), bound.get("reduction", "mean")
        if not isinstance(kind, Shards) or kind.is_even:
            return
        if func is F.kl_div:
            is_mean = reduction == "batchmean" and kind.dim == 0
        else:
            is_mean = reduction == "mean" and bound["target"].is_floating_point()
        if is_mean:
            got = f"{func.__name__}, reduction={reduction!r}, over shards that are unequally long"
            raise self.refusal("a mean over as many tokens on every rank", got, SUMS)

    def _check_slices(self, tensor: Tensor, index: Any) -> None:
        kind = self.type_of(tensor)
        index = index if isinstance(index, tuple) else (index,)
        index = [item for item in index if item is not None]
        if not isinstance(kind, Shards) or any(isinstance(item, (Tensor, list)) for item in index):
            return
        for place, item in enumerate(index):
            if item is ...:
                index[place : place + 1] = [slice(None)] * (tensor.ndim - len(index) + 1)
        taken = index[kind.dim] if kind.dim < len(index) else None
        (size,) = numbers(tensor.shape[kind.dim : kind.dim + 1])
        stop = taken.stop if isinstance(taken, slice) else None
        if isinstance(stop, int) and size < stop < sys.maxsize:
            got = f"a slice up to token {stop}, of which this rank has {size}"
            raise self.refusal(EXPECTED, got)

    def refuse_mixed(self, values: Any) -> None:
        """Refuse mixed tensors."""
        for tensor in self.leaves(values):
            kind = self.types.get(tensor)
            if isinstance(kind, Mixed):
                raise self.refusal(EXPECTED, kind.got, kind.remedy, kind.site)

    def refuse_kept(self, tensors: Iterable[Tensor]) -> None:
        """Refuse what a program has written into tensors that are the same on every rank.

        A number, as of losses that are added up for a log, may be each rank's own.
        """
        for tensor in tensors:
            kind, sizes = first_own([self.types.get(tensor)]), tuple(numbers(tensor.shape))
            if kind is not None and any(size != 1 for size in sizes):
                expected = f"a tensor of {sizes}, which a model keeps, to be the same on all ranks"
                site, remedy = getattr(kind, "site", ""), f"use dist.all_reduce first; {REMEDY}"
                raise self.refusal(expected, describe(kind), remedy, site)

    def check_attention(self, site: str, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse an attention unless it is over the tokens, in dim 2."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self.refuse_mixed(tensor)
            kind = self.type_attended(tensor)
            places = kind.places() if isinstance(kind, Shards) else ()
            is_own = isinstance(kind, Own)
            if not is_own and shards_at(tensor, ATTENDED_DIM, self.is_even) not in places:
                raise SequenceMixed(
                    site=site,
                    expected="query, key and value of shape (batch, heads, tokens, features), with"
                    f" this rank's tokens in dim {ATTENDED_DIM}",
                    got=f"a {name} of {describe(kind)}",
                    remedy="call transpose(1, 2) after the split into heads, name the dim of tokens"
                    " of every input (buffer_seq_dims), put what takes in shards from another"
                    " rank, as a stage of a pipeline, into cp_inductor.per_rank(), or, if attention"
                    " is within each shard, put it into cp_inductor.local_attention()",
                )

    def attended(self, out: Tensor, tensors: Sequence[Tensor], *, is_local: bool) -> None:
        """Give the result of an attention its type."""
        result = shards_at(out, ATTENDED_DIM, self.is_even)
        kinds = [self.type_attended(tensor) for tensor in tensors]
        if isinstance(result, Shards) and isinstance(kinds[0], Shards):
            # The result may be wrapped, and then as long as the whole.
            result = replace(result, is_even=kinds[0].is_even)
        if is_local:
            result = next((kind for kind in kinds if isinstance(kind, Mixed)), kinds[0])
            dims = {kind.dim for kind in kinds if isinstance(kind, Shards)}
            if (isinstance(result, Same) and dims) or dims - {ATTENDED_DIM}:
                result = Own()
        self.types[out] = result


def shards_at(tensor: Tensor, dim: int, is_even: Callable[[int], bool]) -> Type:
    """Return the type of a tensor whose dim holds this rank's tokens."""
    dim %= tensor.ndim
    (length,) = numbers(tensor.shape[dim : dim + 1])
    # A rank without tokens computes nothing. The other ranks judge.
    return Shards(dim, length, is_even=is_even(length)) if length else Own()


def warn_of_sums(typer: Typer, values: Any) -> None:
    """Warn of results that are sums over each rank's own tokens, and no losses."""
    for tensor in typer.leaves(values):
        kind = typer.types.get(tensor)
        if isinstance(kind, Sum) and tensor.ndim > 1:
            text = f"the model returns {describe(kind)}, which is not that of the whole sequence"
            warnings.warn(f"{text}; {REMEDY}", SequenceWarning, stacklevel=2)
            return


def _share_memory(tensor: Tensor, other: Tensor) -> bool:
    try:
        return tensor.untyped_storage() is other.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False  # without memory, as sparse tensors


def version_of(tensor: Tensor) -> int:
    """Return what a write to a tensor or a view of it changes; in inference mode, nothing does."""
    return -1 if tensor.is_inference() else tensor._version
