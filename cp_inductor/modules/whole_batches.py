"""Cut whole batches into a rank's part, inside a model, and make its results whole.

    model(input_ids (B, S), labels (B, S), pixel_values (B, C, H, W))      plain, on every rank
      =>
    input_ids, labels      DTensors [Shard(1)]
    pixel_values           a DTensor [Replicate]
      => the model's own forward =>
    loss                   plain, of the whole batch
    logits                 a DTensor [Shard(1)]; plain and whole with outputs="whole"

A DTensor says how it is cut, and what computes with it asks it. So the choice of what to cut is one
of speed and memory, and never of numbers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.fx.traceback import annotate

from cp_inductor.dtensor.limits import dim_of
from cp_inductor.dtensor.wrap import is_whole, wrap_whole
from cp_inductor.errors import UnsupportedWrite
from cp_inductor.kept import cache
from cp_inductor.modules.weights import Options
from cp_inductor.trust.agreement import note_batch

log = logging.getLogger("cp_inductor")

# What Dynamo notes where a part is cut, with the name of the argument.
PART_OF_BATCH = "cp_part_of_batch"
# The dim of tokens in a batch of sequences.
TOKENS = 1


@dataclass(frozen=True)
class WholeBatches:
    """How a model takes whole batches."""

    site: str  # of the model, for errors
    names: tuple[str, ...]  # of the arguments of the model's forward, by position
    options: Options  # how it was parallelized
    lengths: set[tuple[int, ...]] = field(default_factory=set)  # that were compiled

    def cut(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
        """Return the arguments of a call, of which plain tensors are DTensors, or stay whole."""
        named, leaves, lengths = self._read(args, kwargs)

        def place(name: str, tensor: Tensor) -> Any:
            with annotate({PART_OF_BATCH: name}):
                return self._placed(tensor, self._dim(name, tensor, lengths))

        placed = [map_parts(place, value, name) for name, value in named]
        _say(self.site, tuple((name, self._dim(name, leaf, lengths)) for name, leaf in leaves))
        return placed[: len(args)], dict(zip(kwargs, placed[len(args) :], strict=True))

    def refuse_changes(self, before: Sequence[Any], now: Sequence[Any]) -> None:
        """Refuse other items in copies of a batch's lists and dicts: the batch does not have them.

        Both are the `contents_of` what `cut` has made of a batch.
        """
        kinds = (str, int, float)
        are_same = [
            item is other
            or (type(item) is type(other) and isinstance(item, kinds) and item == other)
            for item, other in zip(before, now, strict=False)
        ]
        if len(before) != len(now) or not all(are_same):
            _raise_of_items(self.site)

    def refuse_writes(self, batch: Any, parts: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Refuse writes in place to what `cut` has made of a batch: they have not reached it."""
        known = {id(tensor) for tensor in tensors_of(batch)}
        for name, part in self._read(parts, named)[1]:
            is_cut = isinstance(part, DTensor) and not is_whole(part)
            if is_cut and id(part) not in known and not part.is_inference() and part._version:
                raise write_to_part(self.site, name)

    def mark_lengths(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Let Dynamo take lengths for symbols, and nothing else, from the second ones on.

        It takes all sizes that change for symbols, unless dynamic=False. The number of sequences
        must stay a number: DTensor (torch 2.13) has no views of tensors in which it is a symbol.
        """
        _, leaves, lengths = self._read(args, kwargs)
        self.lengths.add(tuple(lengths))
        for name, tensor in leaves if len(self.lengths) > 1 else ():
            dim = self._dim(name, tensor, lengths)
            if dim is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
                torch._dynamo.mark_static(tensor, [n for n in range(tensor.ndim) if n != dim])

    def _read(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[tuple[str, Any]], list[tuple[str, Tensor]], list[int]]:
        """Return the arguments and their tensors, with names, and the lengths of sequences."""
        more = [f"argument {number}" for number in range(len(self.names), len(args))]
        names = [*self.names, *more][: len(args)]
        named = [*zip(names, args, strict=True), *kwargs.items()]
        leaves = [leaf for name, value in named for leaf in leaves_of(name, value)]
        lengths: list[int] = []
        for name, tensor in leaves:
            dim = self._dim(name, tensor, ())
            # Symbols that are compared become one, from here on: the graphs of all ranks are alike.
            if dim is not None and not any(tensor.shape[dim] == length for length in lengths):
                lengths.append(tensor.shape[dim])
        return named, leaves, lengths

    def make_whole(self, output: Any) -> Any:
        """Return results of which those without tokens are plain and whole."""

        def whole(name: str, tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            has_tokens = not all(p.is_replicate() or p.is_partial() for p in tensor.placements)
            if has_tokens and self.options.outputs != "whole":
                return tensor
            plain: Tensor = tensor.full_tensor()
            if not has_tokens:
                plain = plain.clone()  # a loss that the program may divide in place
            if plain.requires_grad and not torch.compiler.is_compiling():
                # Eager code may use it beside results with tokens.
                plain.register_hook(lambda g: g.full_tensor() if isinstance(g, DTensor) else g)
            return plain

        return map_parts(whole, output, is_ours=True)

    def _dim(self, name: str, tensor: Tensor, lengths: Sequence[int]) -> int | None:
        """Return the dim in which a tensor is cut; None if it stays whole."""
        if isinstance(tensor, DTensor) or not tensor.numel():
            return None
        if name in self.options.seq_dims:
            dim, site = self.options.seq_dims[name], f"{self.site}, seq_dims[{name!r}]"
            return None if dim is None else dim_of(tensor, dim, site=site)
        if tensor.ndim == 2 and not (tensor.is_floating_point() or tensor.is_complex()):
            return TOKENS
        dims = [d for d in range(1, tensor.ndim) if any(tensor.shape[d] == n for n in lengths)]
        # A mask of pairs has two such dims. It stays whole.
        return dims[0] if dims[:1] == [TOKENS] or len(dims) == 1 else None

    def _placed(self, tensor: Tensor, dim: int | None) -> Any:
        if isinstance(tensor, DTensor):
            return tensor
        mesh = self.options.mesh
        note_batch(str(mesh.get_group(0).group_name), tensor)
        if dim is None and not tensor.requires_grad and not tensor.is_floating_point():
            return tensor  # whose numbers Python may read, such as sizes of images
        others: list[Placement] = [Replicate()] * (mesh.ndim - 1)
        whole = wrap_whole(tensor, mesh)
        return whole if dim is None else whole.redistribute(mesh, [Shard(dim), *others])


def write_to_part(site: str, name: str) -> UnsupportedWrite:
    """Return the error of a write in place to this rank's part of an argument of a model."""
    return UnsupportedWrite(
        site=site,
        expected="a forward that leaves its batch as it is",
        got=f"a write in place to {name}, of which the batch has at most this rank's part",
        remedy=f"write to a clone, as {name} = {name}.clone()",
    )


def leaves_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a value, each with the name that is nearest to it."""
    if isinstance(value, Tensor):
        yield name, value
    else:
        for key, item in _items(value):
            yield from leaves_of(name if isinstance(value, (list, tuple)) else str(key), item)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a value."""
    return [tensor for _, tensor in leaves_of("", value)]


def map_parts(
    function: Callable[[str, Tensor], Any], value: Any, name: str = "", *, is_ours: bool = False
) -> Any:
    """Return a value with its tensors replaced; what has none is returned as it is.

    The function takes the name that is nearest to a tensor, and the tensor. If the value is ours,
    dicts of other classes in it, such as a ModelOutput, are changed and not copied.
    """
    if isinstance(value, Tensor):
        return function(name, value)
    if not any(True for _ in leaves_of(name, value)):
        return value
    is_list = isinstance(value, (list, tuple))
    parts = {
        key: map_parts(function, item, name if is_list else str(key), is_ours=is_ours)
        for key, item in _items(value)
    }
    if type(value) is dict:
        return parts
    if isinstance(value, dict):
        made = value if is_ours else value.copy()
        if type(made) is not type(value):  # its class has no `copy` of its own
            made = type(value)(made)
        for key, item in parts.items():
            made[key] = item
        return made
    if is_list:
        items = list(parts.values())
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    # Not `replace`: it would call `__post_init__`, and lose what that has set.
    made = object.__new__(type(value))
    for name, item in parts.items():
        object.__setattr__(made, name, item)
    return made


def contents_of(copied: Any, original: Any) -> list[Any]:
    """Return what copies of lists, dicts and records hold now, but for what is as it was given."""
    # Dynamo (2.13) cannot ask this of tuples.
    if not isinstance(copied, tuple) and copied is original:
        return []
    if not isinstance(copied, (dict, list, tuple)) and not _is_record(copied):
        return [copied]
    others = dict(_items(original))
    return [x for key, item in _items(copied) for x in (key, *contents_of(item, others.get(key)))]


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a dict, a list or a record holds, by its keys, places or names."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if not _is_record(value):
        return ()
    # In slots or not, also what only its `__post_init__` knows.
    fields = [part.name for part in dataclasses.fields(value)]
    names = dict.fromkeys((*fields, *getattr(value, "__dict__", ())))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# Dynamo calls it while it traces, and raises what it raises.
@torch.compiler.assume_constant_result
def _raise_of_items(site: str) -> None:
    raise UnsupportedWrite(
        site=site,
        expected="a forward that leaves the lists, dicts and records of its batch",
        got="other items in one, of which the model has a copy with its part of the batch",
        remedy="return what the next step needs, or keep it as an attribute of the model",
    )


# Dynamo calls it while it traces.
@torch.compiler.assume_constant_result
def _say(site: str, dims: tuple[tuple[str, int | None], ...]) -> None:
    _say_once(site, dims)


@cache
def _say_once(site: str, dims: tuple[tuple[str, int | None], ...]) -> None:
    """Log what of a batch is cut."""
    cut = ", ".join(f"{name} along dim {dim}" for name, dim in dims if dim is not None)
    whole = ", ".join(name for name, dim in dims if dim is None)
    log.info("%s: each rank takes its part of %s; whole: %s", site, cut or "nothing", whole or "-")
