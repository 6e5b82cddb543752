"""Ask less of the C++ compiler than Inductor does, on a CPU.

    vector units      Inductor compiles, loads and runs a test for each of the CPU's, and uses the
                      best: 3 tests of seconds each with AVX-512. Here it stops at what it uses.
    kernels           Inductor compiles each as a library. Most of the time goes into headers and
                      linking. Here the kernels of a graph are divided among as many libraries as
                      Inductor compiles at a time.
    what each needs   The test and the header that is compiled once take seconds, when the first
                      kernel is. Here they begin on another thread, while Python traces.

All change what is compiled, and nothing in what runs: the same kernels, with the same flags.
Inductor finds a library by its source. Where a graph is loaded without this module, the same code
gets one library for each kernel.

Read in torch 2.11.0, 2.13.0 and 2.15.0: `valid_vec_isa_list` and `pick_vec_isa`
(torch._inductor.cpu_vec_isa), `CppPythonBindingsCodeCache.load_pybinding_async`
(torch._inductor.codecache), which compiles the header before it hands on the kernel;
`AsyncCompile.cpp_pybinding` (torch._inductor.async_compile).
"""

from __future__ import annotations

import logging
import platform
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import islice
from typing import Any
from unittest import mock

from torch import Tensor

log = logging.getLogger("cp_inductor")


@contextmanager
def few_calls_of_compiler() -> Iterator[None]:
    """Compile graphs, and load compiled graphs, within."""
    with _best_vector_unit_first(), _few_libraries():
        yield


# --- What each kernel needs ------------------------------------------------------------------

_started: list[threading.Thread] = []

_NO_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel() {}
"""


@contextmanager
def compiler_started(inputs: Sequence[Any], config_patches: Mapping[str, Any]) -> Iterator[None]:
    """Compile a graph within; at the first one for the CPU, the compiler starts at once.

    Args:
        inputs: example inputs of the graph.
        config_patches: of Inductor's config, for this graph.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import get_compile_threads

    devices = {value.device.type for value in inputs if isinstance(value, Tensor)}
    if _started or devices != {"cpu"} or get_compile_threads() <= 1:
        yield
        return
    with config.patch(dict(config_patches)):
        # Config belongs to a context, and a new thread has a new one.
        settings = copy_context()
    thread = threading.Thread(
        target=settings.run, args=(_compile_what_each_needs,), name="cp_inductor_compiler"
    )
    _started.append(thread)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _compile_what_each_needs() -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    try:
        # The kernel itself is not compiled: nobody waits for it.
        CppPythonBindingsCodeCache.load_pybinding_async(
            [], _NO_KERNEL, submit_fn=lambda task: None, extra_flags=()
        )
    except Exception as error:
        # Whoever compiles a kernel meets it again, and raises it.
        log.debug("the C++ compiler did not start: %s", error)


# --- Vector units ----------------------------------------------------------------------------


@contextmanager
def _best_vector_unit_first() -> Iterator[None]:
    """Test a vector unit only if no better one works."""
    from torch._inductor import cpu_vec_isa

    found_by: Any = cpu_vec_isa.valid_vec_isa_list
    # Nothing is compiled to find the units of other CPUs.
    if found_by is _vector_units or platform.machine() not in ("x86_64", "AMD64"):
        yield
        return
    with mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", _vector_units):
        yield


@cache
def _vector_units() -> _LazyList:
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    of_cpu = set(x86_isa_checker())
    # The truth value of a unit is whether its test works.
    return _LazyList(
        unit for unit in supported_vec_isa_list if set(str(unit).split()) <= of_cpu and unit
    )


class _LazyList(Sequence[Any]):
    """The items of an iterator, each computed when it is first asked for."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._known = items, list[Any]()
        self._lock = threading.Lock()

    def __getitem__(self, place: Any) -> Any:
        with self._lock:
            if isinstance(place, slice) or place < 0:
                self._known.extend(self._items)
            else:
                self._known.extend(islice(self._items, max(0, place + 1 - len(self._known))))
            return self._known[place]

    def __len__(self) -> int:
        return len(self[:])

    def __bool__(self) -> bool:
        return any(True for _ in self)


# --- Libraries -------------------------------------------------------------------------------

# About as many are compiled together at most: with more, the compiler takes more memory.
MOST_KERNELS = 16

# A kernel that needs nothing but headers. In the groups: the headers, and from its name's end on.
_KERNEL = re.compile(
    r'((?:\s*#include [^\n]+\n)+)\s*extern "C"\s+void\s+kernel(\((?:(?!\bkernel\b).)*)', re.DOTALL
)
_DIRECTIVE = re.compile(r"^\s*#\s*(?!pragma\b)", re.MULTILINE)

# Python functions for kernels. `parse_arg` is Inductor's, from the same file.
_BINDINGS = """
template <typename... Args, size_t... places>
static void call_with(
    void (*kernel)(Args...), PyObject* args, std::index_sequence<places...>) {
  kernel(parse_arg<Args>(args, places)...);
}

template <typename... Args>
static PyObject* call_from_python(void (*kernel)(Args...), PyObject* args) {
  try {
    if (PyTuple_GET_SIZE(args) != sizeof...(Args)) [[unlikely]]
      throw std::runtime_error("wrong number of arguments");
    call_with(kernel, args, std::index_sequence_for<Args...>{});
    Py_RETURN_NONE;
  } catch (std::exception const& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unhandled error");
  }
  return nullptr;
}

static PyMethodDef bound_kernels[] = {%s};
"""
_BOUND_KERNEL = """
  {"kernel", [](PyObject*, PyObject* args) { return call_from_python(kernel_%d, args); },
   METH_VARARGS, ""},
"""

# What the one function of the library returns: all of them.
_ALL_KERNELS = """
PyObject* kernels = PyTuple_New(%(num_kernels)d);
if (kernels == nullptr) return nullptr;
for (Py_ssize_t i = 0; i < %(num_kernels)d; ++i) {
  PyObject* bound = PyCFunction_New(&bound_kernels[i], self);
  if (bound == nullptr) { Py_DECREF(kernels); return nullptr; }
  PyTuple_SET_ITEM(kernels, i, bound);
}
return kernels;
"""


@contextmanager
def _few_libraries() -> Iterator[None]:
    """Compile kernels that are asked for one after the other together, when one is needed.

    A module that Inductor generated asks for all its kernels, and then waits for them.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    load_one = CppPythonBindingsCodeCache.__dict__["load_pybinding_async"].__func__
    if hasattr(load_one, "_few_libraries"):
        yield  # a backward that is compiled within the forward's compile
        return
    asked_for = _Kernels(load_one)

    @wraps(load_one)
    def load_with_others(
        cls: Any, argtypes: Sequence[str], main_code: str, *args: Any, **kwargs: Any
    ) -> Callable[[], Any]:
        nonlocal asked_for
        submit = kwargs.get("submit_fn")
        is_usual = cls is CppPythonBindingsCodeCache and not args and set(kwargs) == {"submit_fn"}
        if not is_usual or submit is None or not _is_plain(main_code):
            result: Callable[[], Any] = load_one(cls, argtypes, main_code, *args, **kwargs)
            return result
        while (wait := asked_for.add(argtypes, main_code, submit)) is None:
            asked_for = _Kernels(load_one)
        return wait

    load_with_others._few_libraries = True  # type: ignore[attr-defined]
    with mock.patch.object(
        CppPythonBindingsCodeCache, "load_pybinding_async", classmethod(load_with_others)
    ):
        yield


def _is_plain(code: str) -> bool:
    """Whether all of a source is one kernel, and the headers that it needs."""
    parts = _KERNEL.fullmatch(code)
    return parts is not None and _DIRECTIVE.search(parts[2]) is None


@dataclass
class _Kernels:
    """Kernels that are compiled together.

    Attributes:
        load_one: Inductor's `load_pybinding_async`, which takes the class first.
        asked_for: of each kernel, the types of its arguments and its source.
        submit: runs a function on another thread.
        is_closed: they are being compiled: no more are added.
    """

    load_one: Callable[..., Any]
    asked_for: list[tuple[Sequence[str], str]] = field(default_factory=list)
    submit: Any = None
    is_closed: bool = False
    _functions: list[Any] | None = None
    _adding: threading.Lock = field(default_factory=threading.Lock)
    _compiling: threading.Lock = field(default_factory=threading.Lock)

    def add(self, argtypes: Sequence[str], code: str, submit: Any) -> Callable[[], Any] | None:
        """Add a kernel.

        Returns:
            What waits for the kernel, and returns it as a Python function. None if it is too late.
        """
        with self._adding:
            if self.is_closed:
                return None
            place, self.submit = len(self.asked_for), submit
            self.asked_for.append((argtypes, code))
        return lambda: self._compiled()[place]

    def _compiled(self) -> list[Any]:
        with self._adding:
            self.is_closed = True
        with self._compiling:
            if self._functions is None:
                self._functions = self._compile()
            return self._functions

    def _compile(self) -> list[Any]:
        from torch._inductor.async_compile import get_compile_threads

        for thread in _started:
            thread.join()  # or both would look for the header
        libraries = _divide([code for _, code in self.asked_for], max(1, get_compile_threads()))
        waiting = [self._submit(places) for places in libraries]
        functions: list[Any] = [None] * len(self.asked_for)
        for places, wait in zip(libraries, waiting, strict=True):
            for place, function in zip(places, wait(), strict=True):
                functions[place] = function
        return functions

    def _submit(self, places: Sequence[int]) -> Callable[[], Sequence[Any]]:
        """Begin to compile one library; return what waits for its functions."""
        from torch._inductor.codecache import CppPythonBindingsCodeCache
        from torch._inductor.exc import CppCompileError

        def submit_alone(place: int) -> Callable[[], Any]:
            load, kernel = self.load_one, self.asked_for[place]
            wait: Callable[[], Any] = load(
                CppPythonBindingsCodeCache, *kernel, submit_fn=self.submit
            )
            return wait

        if len(places) == 1:
            alone = submit_alone(places[0])
            return lambda: [alone()]

        codes = [self.asked_for[place][1] for place in places]
        library = type(
            "CppKernelsCodeCache",
            (CppPythonBindingsCodeCache,),
            {
                "extra_parse_arg": _for_format(_bindings(len(codes))),
                "call_entry_function": _for_format(_ALL_KERNELS % {"num_kernels": len(codes)}),
            },
        )
        wait_all = self.load_one(library, (), _as_one(codes), submit_fn=self.submit)

        def functions() -> Sequence[Any]:
            try:
                found: Sequence[Any] = wait_all()()
            except CppCompileError as error:
                log.debug("%d kernels do not compile together: %s", len(codes), error)
                return [wait() for wait in [submit_alone(place) for place in places]]
            return found

        return functions


def _divide(codes: Sequence[str], num_threads: int) -> list[list[int]]:
    """Divide kernels among libraries of about the same length; return the places of each's.

    As few as there are threads; or a multiple, so that none has very many kernels.
    """
    rounds = -(-len(codes) // (num_threads * MOST_KERNELS))
    libraries: list[list[int]] = [[] for _ in range(min(num_threads * rounds, len(codes)))]
    lengths = [0] * len(libraries)
    for place in sorted(range(len(codes)), key=lambda place: -len(codes[place])):
        shortest = lengths.index(min(lengths))
        libraries[shortest].append(place)
        lengths[shortest] += len(codes[place])
    return [sorted(places) for places in libraries]


def _as_one(codes: Sequence[str]) -> str:
    """Return one source of several kernels: the headers of all, and functions `kernel_0`, ..."""
    parts = [_KERNEL.fullmatch(code) for code in codes]
    headers = dict.fromkeys(
        line.strip() for part in parts if part for line in part[1].splitlines() if line.strip()
    )
    kernels = [f"static void kernel_{i}{part[2]}" for i, part in enumerate(parts) if part]
    return "\n".join(["", *headers, "#include <utility>", *kernels, ""])


def _bindings(num_kernels: int) -> str:
    return _BINDINGS % "".join(_BOUND_KERNEL % i for i in range(num_kernels))


def _for_format(text: str) -> str:
    """Return what `str.format` makes the text of."""
    return text.replace("{", "{{").replace("}", "}}")
