"""Follow the sequence through eager code in a region, and judge it before its backward.

    with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
        x = embedding(ids)                  recorded: x [b s d], s is a buffer's, and attended
        x = x.cumsum(1)                     recorded: mixes along s
        loss = model(x); loss.backward()    judged: SequenceMixed

Each torch function that reaches the region's mode runs under a `Recorder`, a mode for ops. It is on
for one function at a time, so that nothing else (Dynamo, backwards, hooks of other libraries) meets
it. A compiled piece is checked by its compile; its results count as new inputs. The program's
tensors are held weakly, so they keep no memory.

Following costs Python time for every op. So a place in the program is followed the first time that
it runs, and again only after it has called other functions than when it was judged, or the same in
another order.

Assumes: one forward at a time per region.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Sequence
from types import FrameType, MethodWrapperType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from cp_inductor.errors import CPError
from cp_inductor.sequence.follow_ops import Value
from cp_inductor.sequence.judge import Judge, warn
from cp_inductor.sequence.record import Recorder, dims_of
from cp_inductor.sequence.tracks import COMPUTED, FREE, GIVEN, Born, Kind
from cp_inductor.torch_private.modes import is_in_backward

# Behind which a forward is over.
_BACKWARDS = frozenset({Tensor.backward, torch.autograd.backward, torch.autograd.grad})

_INSIDE = tuple(
    os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)

# Of each place, the calls that were judged: as a hash of the functions in their order.
_JUDGED: dict[Hashable, set[int]] = {}
# And the functions that were called in those, by identity.
_FOLLOWED: dict[Hashable, set[object]] = {}
# Of those, the places that have called something else since.
_CHANGED: set[Hashable] = set()
# A place that never calls the same twice is followed so many times.
_MOST = 16


def place_of_caller() -> str:
    """Return the file and line of the program that called into this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) and os.sep in name and "contextlib" not in name:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "a program"


class Watch:
    """What a region has seen of the program inside.

    Args:
        place: where the region stands in the program.
        rank: of this process among the ranks that share the sequence.
        buffers: shards, each with its sequence dim.
    """

    def __init__(
        self, place: Hashable, rank: int, buffers: Sequence[tuple[Tensor, int]] = ()
    ) -> None:
        self.place = place
        self.site = str(place[0]) if isinstance(place, tuple) else "a region"
        self.rank = rank
        self.buffers = tuple(buffers)
        self.calls = 0
        self.functions: set[object] = set()
        self.recorder: _EagerRecorder | None = None
        self.is_over = False

    def run(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function of torch and follow it."""
        if self.is_over or is_in_backward():
            return func(*args, **kwargs)
        recorder = self._recorder()
        self.calls = hash((self.calls, id(func)))
        if not isinstance(func, MethodWrapperType):  # reading an attribute computes nothing
            self.functions.add(func)
        if recorder is None:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
            # Who communicates knows that there are ranks.
            for leaf in leaves:
                recorder.forget(leaf)
            return func(*args, **kwargs)
        is_of_graph = isinstance(func, torch._ops.OpOverload) and _is_in_graph()
        if is_of_graph or isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        if not all(map(_is_plain, leaves)):
            return func(*args, **kwargs)
        recorder.begin(func, args)
        with recorder:
            return func(*args, **kwargs)

    def attend(
        self,
        func: object,
        tensors: Sequence[Tensor],
        out: Tensor,
        *,
        is_sharded: bool,
    ) -> None:
        """Follow an attention that a region computes."""
        if self.is_over or is_in_backward():
            return
        recorder = self._recorder()
        if recorder is not None and all(map(_is_plain, (*tensors, out))):
            query, key, _ = tensors
            recorder.begin(func, (), is_allowed=not is_sharded)
            lengths = (query.shape[2], key.shape[2]) if is_sharded else None
            recorder.try_to(lambda: Recorder.attend(recorder, func, tensors, out, lengths))

    def is_end(self, func: object) -> bool:
        """Whether a function ends a forward."""
        return func in _BACKWARDS

    def judge(self, layout: str) -> None:
        """Judge what was seen, once.

        Raises:
            SequenceMixed: an op mixes along the sequence, or a rank would count its tokens from 0.
        """
        if self.is_over:
            return
        self.is_over, recorder = True, self.recorder
        self.recorder = None
        known = _JUDGED.get(self.place, set())
        if recorder is None:
            is_new = self.calls not in known and self.place not in _CHANGED
            if self.calls and is_new and len(known) < _MOST:
                _CHANGED.add(self.place)
                others = self.functions - _FOLLOWED.get(self.place, set())
                if others:
                    names = sorted(str(getattr(one, "__name__", one)) for one in others)
                    warn(
                        f"{self.site}: {', '.join(names)} ran, but not when this place was checked"
                        " for operations that mix tokens; the next run is checked"
                    )
            return
        if recorder.failure is None:
            # What is refused is followed, and refused, again.
            recorder.try_to(Judge(recorder.record, self.rank, layout).judge)
        if recorder.failure is not None:
            warn(
                f"{self.site}: could not check whether anything but attention mixes tokens"
                f" ({recorder.failure})"
            )
        _CHANGED.discard(self.place)
        _JUDGED[self.place] = known | {self.calls}
        _FOLLOWED.setdefault(self.place, set()).update(self.functions)

    def start_again(self) -> None:
        """Prepare for the next forward."""
        self.calls, self.recorder, self.is_over = 0, None, False
        self.functions = set()

    def _recorder(self) -> _EagerRecorder | None:
        if not self.calls and (self.place not in _JUDGED or self.place in _CHANGED):
            self.recorder = _EagerRecorder()
            for buffer, dim in self.buffers:
                value = self.recorder.meet_first(buffer)
                self.recorder.record.sequences.append(value.dims[dim])
        return self.recorder


def forget_judgements() -> None:
    """Follow every place again."""
    _JUDGED.clear()
    _FOLLOWED.clear()
    _CHANGED.clear()


def _is_in_graph() -> bool:
    """Whether the caller of an op is code that torch.fx wrote, for a graph that was checked."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_INSIDE):
            return frame.f_code.co_filename.startswith("<eval_with_key>")
        frame = frame.f_back
    return False


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


class _EagerRecorder(Recorder):
    """Records what a program does.

    Attributes:
        failure: the error that stopped the recording; None if there was none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = ""
        self.is_allowed = False
        self.failure: str | None = None

    def begin(self, func: object, args: Sequence[Any], *, is_allowed: bool = False) -> None:
        """Set the function that runs next."""
        self.name = str(getattr(func, "__name__", func))
        self.is_allowed = is_allowed
        self.is_explicit = func is torch.narrow or func is Tensor.narrow
        if func is Tensor.__getitem__:
            given = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.is_explicit = any(
                isinstance(item, slice) and item.start is not None for item in given
            )

    def locate(self) -> tuple[str, bool]:
        """Return the function and the place where the program calls it."""
        return f"{self.name} ({place_of_caller()})", self.is_allowed

    def meet_first(self, tensor: Tensor) -> Value:
        """Record a tensor that comes from outside the region or was not followed."""
        born = Born(Kind.WEIGHT) if isinstance(tensor, nn.Parameter) else GIVEN
        if not tensor.ndim:
            born = FREE
        value = self.set(tensor, dims_of(tensor, born))
        self.record.given.append(value)
        return value

    def forget(self, tensor: Tensor) -> None:
        """Record that a tensor was communicated."""
        self.set(tensor, dims_of(tensor, COMPUTED))

    def meet(self, op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Follow an op; if that fails, let the program go on."""
        if self.failure is None and not op.namespace.startswith("cp_inductor"):
            self.try_to(lambda: Recorder.meet(self, op, args, kwargs, out))

    def try_to(self, do: Callable[[], None]) -> None:
        """Follow, and record an error that stops it."""
        try:
            do()
        except (CPError, Warning):
            raise
        except Exception as error:
            text = str(error).splitlines() or [""]
            self.failure = f"{type(error).__name__}: {text[0]}"
