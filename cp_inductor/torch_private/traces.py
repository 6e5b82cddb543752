"""Do something of ours while Dynamo traces for our backends, and at no other time.

    _compile(frame, backend=ours)        start; traced, our backend called; end
    _compile(frame, backend=another)     traced, the other backend called

Dynamo calls a backend after it has traced a function, and has no hook for a backend before that.
Its callbacks run for compiles of every backend, while it holds a lock that is not re-entrant: a
callback that Dynamo traces waits for itself. So this wraps the function with which Dynamo traces
and compiles a frame, which knows the backend, and the one within it that only traces: what failed
is named there, while the graph still has its nodes.

A compile of another backend may run within one of ours, or the other way round: the inner one
decides until it ends.

Assumes: Dynamo's own lock lets one thread at a time trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch._dynamo import convert_frame
from torch._dynamo.exc import SkipFrame, UncapturedHigherOrderOpError, Unsupported, UserError

from cp_inductor.torch_private.shardings import TRACING, forget_shardings, remembered
from cp_inductor.torch_private.symbolic_dtensor import SymbolicLengths

NameOf = Callable[[Exception], Exception | None]
Tell = Callable[[Exception, Mapping[str, Any], Mapping[str, Any]], None]


class Traces:
    """What Dynamo traces for some backends."""

    def __init__(self) -> None:
        self._symbolic_lengths = SymbolicLengths()
        self._watched: list[tuple[Any, NameOf, Tell | None]] = []
        # Names what is raised while Dynamo traces for one of them, as it does now.
        self.name: NameOf | None = None
        # Are called with the local variables of a frame that is about to be traced.
        self.before: list[Callable[[Mapping[str, Any]], None]] = []
        # Contexts that are entered while Dynamo traces, and left when it has.
        self.around = ExitStack()

    @property
    def is_ours(self) -> bool:
        """Whether Dynamo traces for one of them now, on this thread."""
        return TRACING.is_ours

    def watch(self, backend: Callable[..., Any], name: NameOf, tell: Tell | None = None) -> None:
        """Watch what Dynamo traces for a backend from now on.

        Args:
            backend: of torch.compile.
            name: returns the error to raise for one of Dynamo's; None leaves it as it is.
            tell: is called with what is raised for a frame that cannot be traced or compiled, its
                local variables, and the options of torch.compile.
        """
        self._watched.append((backend, name, tell))
        _wrap_once(self)

    def run(self, arguments: Mapping[str, Any], trace: Callable[[], Any]) -> Any:
        """Trace a frame; these are the arguments of `_compile`."""
        backend, frame = arguments["compiler_fn"], arguments["locals"]
        layers = list(_layers_of_backend(backend))
        # What the user passed to torch.compile. A method stands for its function.
        innermost = getattr(layers[-1], "__func__", layers[-1])
        watched = (layer[1:] for layer in self._watched if layer[0] is innermost)
        name, tell = next(watched, (None, None))
        if name is not None:
            for prepare in self.before:
                prepare(frame)
        outer, self.name = self.name, name
        try:
            with self.switched(name is not None):
                return trace()
        except Exception as error:
            if tell is not None and not is_run_by_python(error, is_whole=arguments["one_graph"]):
                wrapped = [x for x in layers if isinstance(x, torch._TorchCompileWrapper)]
                options = wrapped[0].kwargs.get("options") if wrapped else None
                tell(error, frame, options or {})
            raise
        finally:
            self.name = outer
            if name is not None and not self.is_ours:
                # A fake mesh equals the one it stands for: DTensor would go on with it outside.
                forget_shardings()

    @contextmanager
    def switched(self, is_ours: bool) -> Iterator[None]:
        """Within this context, what Dynamo traces is ours, or is not."""
        before, outer = self.is_ours, self.around
        self._switch(is_ours)
        try:
            with ExitStack() as self.around:
                yield
        finally:
            self.around = outer
            self._switch(before)

    def _switch(self, is_ours: bool) -> None:
        if is_ours == self.is_ours:
            return
        TRACING.is_ours = is_ours
        if is_ours:
            self._symbolic_lengths.start()
        else:
            self._symbolic_lengths.end()
            remembered.end()


traces = Traces()


def _layers_of_backend(backend: Any) -> Iterator[Any]:
    """Yield a backend, and what it wraps.

    Around the user's are `torch._TorchCompileWrapper`, functions with `_torchdynamo_orig_backend`
    (torch._dynamo.eval_frame), `functools.partial`, and within DDP the method `compile_fn` of a
    `DDPOptimizer` (torch._dynamo.backends.distributed), which knows its `backend_compile_fn`
    (2.13-2.15).
    """
    while True:
        yield backend
        if hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        elif isinstance(backend, torch._TorchCompileWrapper):
            backend = backend.compiler_fn
        elif isinstance(backend, partial):
            backend = backend.func
        elif hasattr(getattr(backend, "__self__", None), "backend_compile_fn"):
            backend = backend.__self__.backend_compile_fn
        else:
            return


def is_run_by_python(error: Exception, *, is_whole: bool) -> bool:
    """Whether Dynamo lets Python run a frame that it could not trace, instead of raising the error.

    `ConvertFrame` (torch._dynamo.convert_frame, 2.13-2.15) does so with frames that are skipped,
    and without fullgraph=True with most of what it does not support.
    """
    if torch._dynamo.config.suppress_errors or isinstance(error, SkipFrame):
        return True
    is_raised = is_whole or isinstance(error, UncapturedHigherOrderOpError)
    return isinstance(error, (Unsupported, UserError)) and not is_raised


def _wrap_once(traces: Traces) -> None:
    """Wrap the functions with which Dynamo compiles a frame; a second call changes nothing.

    `_compile` (torch._dynamo.convert_frame, 2.13-2.15), whose `skip` counts the frames of Python
    above it. Its callers cannot be wrapped: they look at the frame that called them. It calls
    `compile_frame`, and clears the graph of what that could not trace (2.14).
    """
    compile_whole, compile_frame = convert_frame._compile, convert_frame.compile_frame
    if hasattr(compile_whole, "__wrapped__"):
        return
    signature = inspect.signature(compile_whole)

    @wraps(compile_whole)
    def compile_watched(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        # Two frames of Python are added: this one, and that of `Traces.run`.
        call.arguments["skip"] = call.arguments.get("skip", 0) + 2
        return traces.run(call.arguments, partial(compile_whole, *call.args, **call.kwargs))

    @wraps(compile_frame)
    def compile_named(*args: Any, **kwargs: Any) -> Any:
        try:
            return compile_frame(*args, **kwargs)
        except Exception as error:
            named = None if traces.name is None else traces.name(error)
            if named is None:
                raise
            raise named.with_traceback(error.__traceback__) from None

    convert_frame._compile = compile_watched
    convert_frame.compile_frame = compile_named
