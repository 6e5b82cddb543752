"""What is asked of the C++ compiler: less than by Inductor, and the same kernels."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor import codecache, config, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.exc import CppCompileError

from cp_inductor.torch_private import cpp_compiler
from cp_inductor.torch_private.cpp_compiler import (
    _divide,
    _is_plain,
    _LazyList,
    compiler_started,
    few_calls_of_compiler,
)

HEADER = "\n#include <torch/csrc/inductor/cpp_prefix.h>\n"


def adds(number: int, *, after: str = "") -> str:
    """Source of a kernel that adds a number to one element, as Inductor writes it."""
    return (
        f'{HEADER}extern "C"  void  kernel(const float* in_ptr0,\n    float* out_ptr0)\n'
        f"{{\n    out_ptr0[0] = in_ptr0[0] + {number};\n}}\n{after}"
    )


@contextmanager
def counted_libraries() -> Iterator[list[str]]:
    """Collect the kernels' libraries that are built; not tests of vector units, nor headers."""
    built: list[str] = []
    build = CppBuilder.build

    def build_and_note(self: CppBuilder) -> None:
        if (path := self.get_target_file_path()).endswith(".main.so"):
            built.append(path)
        build(self)

    with mock.patch.object(CppBuilder, "build", build_and_note):
        yield built


def compile_all(*sources: str) -> tuple[list[Callable[..., None]], int]:
    """Compile kernels as a generated module does; return them, and the number of libraries."""
    with few_calls_of_compiler(), config.patch(compile_threads=2), counted_libraries() as built:
        compiling = AsyncCompile()
        waiting = [
            compiling.cpp_pybinding(["const float*", "float*"], source) for source in sources
        ]
        scope = {f"kernel_{i}": kernel for i, kernel in enumerate(waiting)}
        compiling.wait(scope)
    return list(scope.values()), len(built)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with mock.patch.dict(CppPythonBindingsCodeCache.cache, clear=True):
        yield


def results_of(kernels: list[Callable[..., None]]) -> list[float]:
    given = torch.tensor([0.5])
    found = []
    for kernel in kernels:
        result = torch.empty(1)
        kernel(given, result)
        found.append(result.item())
    return found


def test_kernels_are_divided_among_as_many_libraries_as_are_compiled_at_a_time() -> None:
    kernels, num_libraries = compile_all(*[adds(number) for number in range(5)])
    assert results_of(kernels) == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert num_libraries == 2
    # The next module asks for some of them again, and for another one.
    kernels, _ = compile_all(*[adds(number) for number in (4, 2, 7)])
    assert results_of(kernels) == [4.5, 2.5, 7.5]


@pytest.mark.parametrize(
    ("num_kernels", "threads", "sizes"),
    [
        (1, 2, [1]),
        (3, 8, [1, 1, 1]),
        (5, 2, [2, 3]),
        (32, 2, [16, 16]),
        (33, 2, [8, 8, 8, 9]),
        (40, 1, [13, 13, 14]),
    ],
)
def test_no_library_has_very_many_kernels(num_kernels: int, threads: int, sizes: list[int]) -> None:
    libraries = _divide(["same length"] * num_kernels, threads)
    assert sorted(len(places) for places in libraries) == sizes
    assert sorted(place for places in libraries for place in places) == [*range(num_kernels)]


def test_long_kernels_are_spread() -> None:
    assert _divide(["l" * 30, "l" * 40, "s", "s", "s"], 2) == [[1], [0, 2, 3, 4]]


def test_a_kernel_that_fails_says_so() -> None:
    throws = adds(1).replace("{\n", '{\n    throw std::runtime_error("it failed");\n')
    kernels, _ = compile_all(adds(0), throws, adds(2))
    with pytest.raises(RuntimeError, match="it failed"):
        kernels[1](torch.zeros(1), torch.zeros(1))
    with pytest.raises(RuntimeError, match="number of arguments"):
        kernels[2](torch.zeros(1))
    assert results_of([kernels[0], kernels[2]]) == [0.5, 2.5]


def test_kernels_that_do_not_compile_together_are_compiled_alone() -> None:
    clash = "static int of_the_kernel = 1;\n"
    kernels, num_libraries = compile_all(*[adds(number, after=clash) for number in range(4)])
    assert results_of(kernels) == [0.5, 1.5, 2.5, 3.5]
    assert num_libraries >= 4


def test_what_does_not_compile_at_all_is_inductors_error() -> None:
    with pytest.raises(CppCompileError):
        compile_all(adds(1), adds(2).replace("+", "plus"), adds(3))


@pytest.mark.parametrize(
    ("source", "is_plain"),
    [
        (adds(1), True),
        (adds(1).replace("out_ptr0[0] =", "#pragma omp parallel\n    out_ptr0[0] ="), True),
        # A function before it, a macro, a call of itself, another declaration.
        (adds(1).replace('extern "C"', 'static int f() { return 1; }\nextern "C"'), False),
        (adds(1).replace("{\n", "{\n#define SIZE 4\n"), False),
        (adds(1).replace("out_ptr0[0] =", "kernel(in_ptr0, out_ptr0); out_ptr0[0] ="), False),
        (adds(1).replace('extern "C"  void', 'extern "C" __declspec(dllexport) void'), False),
    ],
)
def test_only_what_is_one_function_is_joined(source: str, is_plain: bool) -> None:
    assert _is_plain(source) is is_plain


def test_a_graph_gets_the_numbers_of_plain_inductor() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        for i in range(4):  # kernels that differ
            x = torch.softmax(x @ y, -1).sin() * i + x.mean(0, keepdim=True) // 0.1
        return x

    def compile_anew() -> tuple[Tensor, int]:
        torch._dynamo.reset()
        PyCodeCache.cache_clear()
        compiled = torch.compile(function, options=options)
        with counted_libraries() as built:
            return compiled(x, y), len(built)

    x, y = torch.randn(37, 37), torch.randn(37, 37)
    options: dict[str, Any] = {"fx_graph_cache": False, "compile_threads": 2}
    expected, num_kernels = compile_anew()
    with few_calls_of_compiler():
        result, num_libraries = compile_anew()
    assert torch.equal(result, expected)
    assert num_kernels > num_libraries == 2


# --- What each kernel needs ------------------------------------------------------------------


class Started:
    """What the compiler is asked for, and with which vector length."""

    def __init__(self) -> None:
        self.asked_for: list[tuple[str, int | None]] = []

    def __call__(self, argtypes: list[str], code: str, **kwargs: Any) -> None:
        self.asked_for.append((threading.current_thread().name, config.cpp.simdlen))
        raise CppCompileError(["g++"], "no space left")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(cpp_compiler, "_started", [])
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", started)
    return started


def test_the_compiler_starts_with_the_first_graph(started: Started) -> None:
    inputs = [torch.zeros(1), 3]
    with config.patch(compile_threads=2):
        for _ in range(2):
            with compiler_started(inputs, {"cpp.simdlen": 256}):
                pass
    assert started.asked_for == [("cp_inductor_compiler", 256)]


@pytest.mark.parametrize(
    ("inputs", "threads"), [([torch.zeros(1, device="meta")], 2), ([], 2), ([torch.zeros(1)], 1)]
)
def test_it_does_not_start_for_graphs_elsewhere(
    inputs: list[Tensor], threads: int, started: Started
) -> None:
    with config.patch(compile_threads=threads), compiler_started(inputs, {}):
        pass
    assert started.asked_for == []


def test_the_header_is_compiled_before_the_first_kernel() -> None:
    with (
        mock.patch.object(cpp_compiler, "_started", []),
        mock.patch.object(codecache, "_precompile_header", return_value="") as compile_header,
        config.patch(compile_threads=2, cpp_cache_precompile_headers=True),
        few_calls_of_compiler(),
        compiler_started([torch.zeros(1)], {}),
        counted_libraries() as built,
    ):
        pass
    compile_header.assert_called_once()
    assert built == []


is_x86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.skipif(not is_x86, reason="nothing is tested to find the vector units of this CPU")
@pytest.mark.parametrize("capability", [None, "avx2", "avx512", "default"])
@pytest.mark.parametrize("simdlen", [None, 1, 256, 512])
def test_the_vector_unit_is_inductors(
    capability: str | None, simdlen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capability is not None:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    works = lambda self, vec_isa_ok: str(self) != "avx512"  # noqa: E731
    cpp_compiler._vector_units.cache_clear()
    with (
        config.patch({"cpp.simdlen": simdlen}),
        mock.patch.object(cpu_vec_isa.VecISA, "_VecISA__bool__impl", works),
        mock.patch.object(cpu_vec_isa.VecISA, "check_build", return_value=True),
    ):
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        expected = cpu_vec_isa.pick_vec_isa()
        with few_calls_of_compiler():
            assert cpu_vec_isa.pick_vec_isa() is expected
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpp_compiler._vector_units.cache_clear()


def test_a_lazy_list_computes_what_it_is_asked_for() -> None:
    computed = []

    def items() -> Iterator[int]:
        for i in range(4):
            computed.append(i)
            yield i

    lazy: Any = _LazyList(items())
    assert computed == []
    assert lazy
    assert computed == [0]
    assert lazy[0] == 0
    assert lazy[1] == 1
    assert computed == [0, 1]
    assert list(lazy) == [0, 1, 2, 3]
    assert len(lazy) == 4
    assert lazy[-1] == 3
    assert not _LazyList(iter(()))
    with pytest.raises(IndexError):
        lazy[4]
