"""Give types to what eager code computes in a region, every time it runs.

    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
        x = embedding(ids)                  ids, x: Shards(1), because ids is a buffer
        x = x.cumsum(1)                     x: Mixed
        loss = model(x); loss.backward()    raises SequenceMixed

Only the buffers of a region are declared. Other tensors from outside, such as weights, must be the
same on every rank. If a region has no buffers, all tensors but weights hold tokens in dim 1, or in
dim 0 if they have no other dim. A function of torch always makes the same types of the same types.
So a call that was typed once is not followed op by op again. That makes the check cheap enough to
run every time.

Each function runs under a `Typer`, a mode for ops. The mode is on for one function at a time, so
that nothing else (Dynamo, backwards, hooks of other libraries) meets it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from traceback import walk_stack
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor.errors import SequenceMixed
from cp_inductor.kept import on_reset
from cp_inductor.sequence.follow import EXPECTED, REMEDY, Typer, shards_at, version_of
from cp_inductor.sequence.rules.views import MASKS
from cp_inductor.sequence.types import (
    ATTENDED_DIM,
    Mixed,
    Own,
    Same,
    Shards,
    Type,
    describe,
    first_own,
    identity,
)
from cp_inductor.sequence.wholes import COUNTED_LOSSES, Wholes, count_labels, range_over_ranks
from cp_inductor.source import user_line
from cp_inductor.torch_private.modes import (
    is_backward_compiled,
    is_in_backward,
    is_transforming,
    name_of_function,
)

# When one of these is called, the forward is over.
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})

# Functions by which Python reads a tensor's values. Those in the first two sets answer yes or no.
_COMPARING = frozenset({Tensor.equal, torch.equal, Tensor.allclose, torch.allclose})
_DECIDING = _COMPARING | {Tensor.__bool__, torch.is_nonzero, Tensor.is_nonzero, Tensor.__contains__}
# After these, other code reads the memory, or another tensor shares it.
_HANDING_OUT = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__} | {Tensor.untyped_storage, Tensor.storage}
)
_READING = _DECIDING | _HANDING_OUT | {Tensor.item, Tensor.tolist, Tensor.__index__}
_READING |= {Tensor.__int__, Tensor.__float__, Tensor.__complex__}

# Attributes and methods that return no tensor.
_SIZES = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "layout", "grad_fn"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "itemsize", "nbytes", "_version"),
    )
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_contiguous}

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class _Trust(threading.local):
    depth = 0


TRUST = _Trust()


class EagerTyper(Typer):
    """Gives types to what a program in a region over the ranks of a group computes."""

    def __init__(self, group_name: str, is_even: Callable[[int], bool]) -> None:
        super().__init__(is_even)
        self.group_name = group_name
        self.name = ""
        self.is_over = self.is_running = self.has_buffers = False
        self.was_read: Type | None = None
        self.wholes = Wholes()
        self.declared: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self.kept: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()

    def declare(self, shard: Tensor, dim: int, whole: Tensor) -> None:
        """Take a tensor for this rank's shard of a whole one."""
        self.has_buffers = True
        self.types[shard] = shards_at(shard, dim, self.is_even)
        self.declared[shard] = None
        self.wholes.declare(shard, whole, shard.shape[dim])

    def locate(self) -> str:
        """Return the function and the place where the program calls it."""
        return f"{self.name} ({user_line()})"

    def find(self, tensor: Tensor) -> Type | None:
        """Return the type of a tensor, if it came from this region or from an earlier one."""
        known = self.types.get(tensor)
        if known is not None:
            return known
        left, version = _LEFT.get(tensor, (None, 0))
        return left if version == version_of(tensor) or isinstance(tensor, nn.Parameter) else None

    def meet_first(self, tensor: Tensor) -> Type:
        """Return the type of a tensor from outside, or from code that is not followed."""
        if not _is_plain(tensor):
            self._refuse_methods([tensor])
            return Own()
        if isinstance(tensor, nn.Parameter) or not tensor.ndim:
            return self.find(tensor) or Same()
        if tensor.grad_fn is not None and self.has_buffers:
            return Own()
        known = self.find(tensor)
        if known is not None:
            return known
        if self.has_buffers or _is_of_a_module(tensor):
            self.kept[tensor] = None
            return Same()
        return shards_at(tensor, min(tensor.ndim - 1, 1), self.is_even)

    def type_attended(self, tensor: Tensor) -> Type:
        """Return the type of a query, key or value; it may come from outside."""
        if tensor not in self.types:
            is_own = self.has_buffers or not _is_plain(tensor)
            self.types[tensor] = Own() if is_own else shards_at(tensor, ATTENDED_DIM, self.is_even)
        return self.types[tensor]

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Give results their types, and note whether a number is read off tokens.

        A size that data decides counts as read: compiled code reads it where no mode is called.
        """
        super().meet(op, args, kwargs, out)
        outs = self.leaves(out)
        if torch.Tag.data_dependent_output in op.tags and not outs:
            own = first_own(map(self.type_of, self.leaves((args, kwargs))))
            self.was_read = self.was_read or own
        if _is_sized_by_data(op, args, outs):
            sized = (kind for kind in map(self.type_of, outs) if isinstance(kind, Mixed))
            self.was_read = self.was_read or next(sized, None)

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch and type what it returns."""
        is_optimizing = self.is_over and not torch.is_grad_enabled()
        if self.is_running or is_optimizing or is_in_backward() or func in _SIZES:
            return func(*args, **kwargs)
        self.name = name_of_function(func)
        leaves = self.leaves((args, kwargs))
        if func in _BACKWARDS:
            self._end_forward()
            self.refuse_mixed(leaves)
            if is_backward_compiled():
                return self.trust(func, *args, **kwargs)
            is_last = func is not torch.autograd.grad and not kwargs.get("create_graph")
            if is_last and len(args) <= 2:  # gradients leave; nothing is made of them here
                with self.running():
                    return func(*args, **kwargs)
        elif func in _READING:
            if func in (Tensor.untyped_storage, Tensor.storage) and not _is_memory_read():
                return func(*args, **kwargs)
            return self._read(func, args, kwargs, leaves)
        elif func == _SET_DATA and all(map(_is_plain, leaves)):
            self.type_of(args[0])  # notes that the program keeps it
            func(*args, **kwargs)
            return self.put(args[0], self.type_of(args[1]))
        elif func is Tensor.register_hook and not TRUST.depth:
            return func(args[0], self._typed_hook(args[0], *args[1:], **kwargs))
        elif isinstance(func, torch._ops.HigherOrderOperator):
            self._refuse_methods(leaves)
            return func(*args, **kwargs)
        elif TRUST.depth or not all(map(_is_plain, leaves)):
            self._refuse_methods(leaves)
            return self.trust(func, *args, **kwargs)
        elif str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            return self._communicate(func, args, kwargs)
        elif func in COUNTED_LOSSES:
            args, kwargs = self._count_labels(func, args, kwargs)
        self.check_call(func, args, kwargs)
        out = self._type(func, args, kwargs)
        self.wholes.follow(func, args, kwargs, out)
        return out

    def is_idle(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a compiled graph over these tensors need not be checked.

        Behind a backward, what is not known to be tokens are gradients and an optimizer's states.
        """
        if self.is_running or is_in_backward():
            return True
        return self.is_over and first_own(map(self.find, tensors)) is None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let code run whose results `take` will be told."""
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before

    def take(self, tensor: Tensor, kind: Type) -> None:
        """Give a tensor the type that compiled code has given it, or left it with."""
        if _is_plain(tensor):
            self.put(tensor, kind)

    def _end_forward(self) -> None:
        """Check what the program keeps, once: a backward writes to gradients."""
        if not self.is_over:
            self.refuse_kept(list(self.kept))
        self.is_over = True

    def _type(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        key = self._key(func, args, kwargs)
        known = None if key is None else _TYPED.get(key)
        if known is not None:
            out = func(*args, **kwargs)
            outs = self.leaves(out)
            if len(outs) == len(known):  # a gradient may have come or gone since then
                for tensor, kind in zip(outs, known, strict=True):
                    self.types[tensor] = kind
            return out
        before = [(tensor, tensor._version) for tensor in self.leaves((args, kwargs)) if key]
        self.was_read = None
        try:
            with self.running(), self:
                out = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError):
            self.refuse_mixed((args, kwargs))  # on other ranks the call may have succeeded
            raise
        if self.was_read is not None and not self.is_over and not _only_checks(func, args, kwargs):
            raise self._reading_refusal(_say_read(self.was_read, "a number"))
        if key is not None and all(tensor._version == version for tensor, version in before):
            self._remember(key, [tensor for tensor, _ in before], self.leaves(out))
        return out

    def _key(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Hashable | None:
        """Return all that the types of a function's results depend on; None if it is not known."""
        # A gradient depends on how its outputs were made; transforms wrap what is typed.
        if func in _BACKWARDS or is_transforming():
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        parts: list[Hashable] = [func, tree]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.is_inference():
                    return None
                layout = leaf.shape, leaf.stride(), leaf.dtype
                parts.append((identity(self.type_of(leaf)), *layout))
            elif isinstance(leaf, slice):
                parts.append((slice, leaf.start, leaf.stop, leaf.step))
            elif isinstance(leaf, _PLAIN):
                parts.append((type(leaf), leaf))
            else:
                return None
        return tuple(parts)

    def _remember(self, key: Hashable, inputs: list[Tensor], outs: list[Tensor]) -> None:
        types = [self.types.get(tensor) for tensor in outs]
        is_old = any(item is other for item in inputs for other in outs)
        if not is_old and not any(item is None or isinstance(item, Mixed) for item in types):
            if len(_TYPED) >= _MOST:
                _TYPED.clear()
            _TYPED[key] = types

    def _communicate(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Follow a program that communicates, and so knows that there are ranks."""
        groups = [a for a in (*args, *kwargs.values()) if isinstance(a, dist.ProcessGroup)]
        out = func(*args, **kwargs)
        if not groups or groups[0].group_name == self.group_name:
            kind = Same() if func in _GIVING_ALL_THE_SAME else Own()
            for tensor in self.leaves((args, kwargs, out)):
                self.types[tensor] = kind
        return out

    def _read(self, func: Callable[..., Any], args: Any, kwargs: Any, leaves: list[Tensor]) -> Any:
        """Let Python read numbers of the whole sequence, and no others.

        A number that depends on whole-number buffers only is computed from the whole buffers. A
        rank may also decide by its own tokens, such as whether any of them is infinite. If all
        ranks decide alike, that is the decision of the whole.
        """
        out = func(*args, **kwargs)
        if self.is_over or TRUST.depth:
            return out
        kinds = [self.type_of(leaf) for leaf in leaves if _is_plain(leaf)]
        own = first_own(kinds)
        if own is None:
            return out
        whole = self.wholes.find(leaves[0]) if len(leaves) == 1 else None
        if whole is not None:
            return func(whole)
        is_vote = func in _COMPARING or (isinstance(own, Mixed) and own.is_vote)
        if is_vote and isinstance(out, bool) and all(map(_is_vote, kinds)):
            vote = torch.tensor(int(out), device=leaves[0].device)
            least, most = range_over_ranks(vote, self.group_name)
            if least == most:
                return out
            got = f"{name_of_function(func)} to be {out} on this rank, and not on another"
        else:
            what = "decision" if func in _DECIDING else "number"
            got = _say_read(own, "the memory" if func in _HANDING_OUT else f"a {what}")
        raise self._reading_refusal(got)

    def _reading_refusal(self, got: str, site: str = "") -> SequenceMixed:
        expected = f"Python to read numbers of the whole sequence; {EXPECTED}"
        remedy = f"use dist.all_reduce first, or read it after the region; {REMEDY}"
        return self.refusal(expected, got, remedy, site)

    def _refuse_methods(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors of a class that has functions of its own, but no ops to be typed.

        And nested ones, whose rows are parts of sequences. Within `per_rank` they are trusted.
        """
        for tensor in () if TRUST.depth else tensors:
            is_typed = _is_plain(tensor) or isinstance(tensor, nn.Parameter)
            has_no_ops = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
            if tensor.is_nested or (has_no_ops and not is_typed):
                name = "nested tensor" if tensor.is_nested else type(tensor).__name__
                got = f"a {name}, whose functions are not followed"
                raise self.refusal("tokens as torch.Tensor", got)

    def _typed_hook(self, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[..., Any]:
        """Return a hook on tokens, after which their gradient must still be that of each token."""
        kind = self.type_of(tensor)
        site = self.locate()
        if not isinstance(kind, Shards) or _is_of_torch(hook):
            return hook

        def typed(grad: Tensor) -> Any:
            self.types[grad], self.was_read = kind, None
            with self:
                changed = hook(grad)
            result = kind if changed is None else self.type_of(changed)
            self.refuse_mixed(changed)
            if changed is not None and self.was_read is not None:
                raise self._reading_refusal(_say_read(self.was_read, "a number"), site)
            is_of_tokens = isinstance(result, Shards) and result.places()[0] in kind.places()
            if not is_of_tokens and not isinstance(result, Own):
                expected = f"a hook that returns a gradient of {describe(kind)}"
                raise self.refusal(expected, describe(result), site=site)
            return changed

        return typed

    def _count_labels(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        bound = signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        call = bound.arguments
        labels, kind = call["target"], self.type_of(call["target"])
        is_mean = call["reduction"] == "mean" and not labels.is_floating_point()
        if is_mean and isinstance(kind, Shards):
            # Another rank may have refused it before: an index is in range of one shard alone.
            self.refuse_mixed(call["input"])
            where = (call["ignore_index"], self.group_name, self.locate())
            call["target"] = counted = count_labels(labels, call["input"].detach(), *where)
            self.types[counted] = replace(kind, is_counted=True)
        return bound.args, bound.kwargs

    def check_mask(self, mask: Tensor, lengths: set[int]) -> None:
        """Refuse a mask over the whole sequence that was computed from shards, and mixes tokens.

        If no shards were declared, a tensor as long as whole queries and keys is no shard. It may
        become a mask, which ranks compare.
        """
        kind = self.types.get(mask)
        is_of_whole = isinstance(kind, Mixed) and kind.lengths and kind.lengths <= lengths
        if self.has_buffers or not is_of_whole:
            self.refuse_mixed(mask)

    def check_left(self) -> None:
        """Refuse mixed tensors that leave the region, also in what a module keeps.

        Other tensors are known in later regions, as the states of an earlier segment are.
        """
        left = list(self.types.items())
        self.refuse_mixed([t for t, kind in left if isinstance(kind, Mixed) and not kind.is_vote])
        self._end_forward()
        for tensor, kind in left:
            is_own = first_own([kind]) is not None and tensor.numel() > 1
            if is_own and not tensor.is_inference() and tensor not in self.declared:
                _LEFT[tensor] = (kind, tensor._version)


# What regions have left, with the version of what it was.
_LEFT: MutableMapping[Tensor, tuple[Type, int]] = WeakTensorKeyDictionary()

# The types of a function's results, by all that they depend on. A model has some hundred different
# calls at each length, so that many lengths find room.
_TYPED: dict[Hashable, list[Any]] = {}
_MOST = 10_000
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis))
_GIVING_ALL_THE_SAME = frozenset(
    {dist.all_reduce, dist.all_gather, dist.all_gather_into_tensor, dist.broadcast}
)


@on_reset
def forget_judgements() -> None:
    """Type every function again."""
    _TYPED.clear()
    _LEFT.clear()


def _say_read(own: Type, what: str) -> str:
    return own.got if isinstance(own, Mixed) else f"{what} of {describe(own)}"


def _is_sized_by_data(op: torch._ops.OpOverload, args: Any, outs: Sequence[Tensor]) -> bool:
    """Whether values decide the sizes of results, or of what a result in no dense layout holds."""
    if op is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in MASKS for index in args[1])
    is_tagged = torch.Tag.dynamic_output_shape in op.tags
    return is_tagged or any(out.layout is not torch.strided for out in outs)


def _only_checks(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a function reads numbers only to check that they are in range."""
    if func is not F.one_hot:
        return False
    classes: int = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    return classes >= 0


def _is_vote(kind: Type) -> bool:
    """Whether a decision on which all ranks agree is right for the whole."""
    if isinstance(kind, Shards):
        return kind.is_even  # a rank without tokens would not vote
    return kind.is_vote if isinstance(kind, Mixed) else kind == Same(is_uniform=True)


def _is_of_torch(hook: Any) -> bool:
    """Whether torch made a hook, as FSDP does, to know when a module's backward begins."""
    name = getattr(getattr(hook, "func", hook), "__module__", "")
    return str(name).startswith("torch.")


def _is_of_a_module(tensor: Tensor) -> bool:
    """Whether a module that is being called, or a part of it, has a tensor as a buffer."""
    owners = (frame.f_locals.get("self") for frame, _ in walk_stack(sys._getframe(1)))
    modules = {id(owner): owner for owner in owners if isinstance(owner, nn.Module)}
    return any(buffer is tensor for module in modules.values() for buffer in module.buffers())


# The rest of torch asks for a storage to tell views apart, or to make a fake tensor.
_SAVING = frozenset(
    function.__code__.co_filename
    for function in (Tensor.__reduce_ex__, torch.save, torch.UntypedStorage.__reduce__)
)
_TORCH, _PACKAGE = (
    os.path.dirname(path) + os.sep
    for path in (torch.__file__, os.path.dirname(os.path.abspath(__file__)))
)


def _is_memory_read() -> bool:
    """Whether who asks for a storage reads it: the program itself, or `torch.save` for it."""
    names = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe(1)))
    name = next((name for name in names if not name.startswith(_PACKAGE)), "")
    return not name.startswith(_TORCH) or name in _SAVING


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not tensor.is_nested
