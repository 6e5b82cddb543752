"""Run Triton kernels by Triton's interpreter, on numpy arrays, under our own memory accesses.

Read in triton 3.7.1. Needs ``TRITON_INTERPRET=1`` in the environment before triton is imported;
otherwise its functions, also those of its own library, are made for the compiler.

What differs from `triton.runtime.interpreter` as it stands:

* every access is handed to a `DeviceMemory`, with the buffer that it must stay within: the upper
  16 bits of a pointer, which no address needs, are the number of the argument it was made from;
* float32 is rounded to bfloat16 as a GPU does (to nearest, ties to even; the interpreter
  truncates), and arithmetic of bfloat16 is arithmetic of numbers (not of their bits);
* reductions and scans by any function work on arrays, by halves, not element by element;
* functions of libdevice compute (they are stubs that return None);
* the language is patched once, not at each call of each function: the process does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.special
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.rehearsal.memory import DeviceMemory

Array = NDArray[Any]

NUMBER_SHIFT = np.uint64(48)
ADDRESS = np.uint64((1 << 48) - 1)


class Interpreter:
    """Triton's interpreter in this process, from now on; a memory carries out all accesses."""

    def __init__(self, memory: DeviceMemory) -> None:
        from triton import language as tl
        from triton.runtime import interpreter

        self._builder: Any = interpreter.interpreter_builder
        self._builder.__class__ = _builder_class(interpreter, memory)
        self._interpreter = interpreter
        self._tl = tl
        _patch(interpreter)

    def run(
        self, function: Any, arguments: Mapping[str, Any], types: Mapping[str, str], grid: Any
    ) -> None:
        """Run every program of a grid (x, y, z) of a function that `triton.jit` has made.

        Pointers are tagged addresses; types, of what is no constant, are Triton's: ``*bf16``.
        """
        converted = {
            name: self._convert(value, types[name]) if name in types else value
            for name, value in arguments.items()
        }
        rewritten = function.rewrite()
        self._builder.set_grid_dim(*grid)
        with np.errstate(all="ignore"):
            for x in range(grid[0]):
                for y in range(grid[1]):
                    for z in range(grid[2]):
                        self._builder.set_grid_idx(x, y, z)
                        rewritten(**converted)

    def _convert(self, value: Any, name: str) -> Any:
        kind = self._tl.str_to_ty(name, None)
        dtype = np.dtype(np.uint64) if name[0] == "*" else self._interpreter._get_np_dtype(kind)
        handle = self._interpreter.TensorHandle(np.array([value], dtype=dtype), kind)
        return self._tl.tensor(handle, kind)


def constants_of(function: Any) -> frozenset[str]:
    """Return the names of the parameters that `triton.jit` was told are constants."""
    from triton.runtime.jit import _normalize_ty

    annotations = function.fn.__annotations__.items()
    return frozenset(name for name, kind in annotations if _normalize_ty(kind) == "constexpr")


@cache
def _patch(interpreter: Any) -> None:
    """Patch what is the same for every memory."""
    from triton import language as tl

    _replace_libdevice(interpreter)
    _reduce_arrays(interpreter)
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter.InterpretedFunction.__call__ = _call_rewritten


def _call_rewritten(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


def widen(bits: Array) -> Array:
    """Return float32 numbers of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: Array) -> Array:
    """Return bfloat16 bits of float32 numbers, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _builder_class(interpreter: Any, memory: DeviceMemory) -> type:
    import triton.language as tl

    handle, np_dtype = interpreter.TensorHandle, interpreter._get_np_dtype

    def numbers(value: Any) -> Array:
        """Return the data of a handle as numbers that numpy can compute with."""
        data: Array = value.data
        return widen(data) if value.dtype.scalar == tl.bfloat16 else data

    class Builder(interpreter.InterpreterBuilder):
        def create_masked_load(
            self, ptrs: Any, mask: Any, other: Any, *hints: Any, **more: Any
        ) -> Any:
            kind = ptrs.get_element_ty()
            dtype = np_dtype(kind)
            instead = None if other is None else other.data
            return handle(memory.load(ptrs.data, mask.data, instead, dtype), kind)

        def create_masked_store(
            self, ptrs: Any, value: Any, mask: Any, *hints: Any, **more: Any
        ) -> None:
            dtype = np_dtype(ptrs.get_element_ty())
            memory.store(ptrs.data, value.data.astype(dtype, copy=False), mask.data)

        def create_atomic_rmw(
            self, op: Any, ptr: Any, value: Any, mask: Any, sem: Any, scope: Any
        ) -> Any:
            values = value.data.astype(np_dtype(ptr.get_element_ty()), copy=False)
            combine: Any = _ATOMICS[op.name]
            at = partial(_at_bits, combine) if value.dtype.scalar == tl.bfloat16 else combine.at
            old = memory.update(ptr.data, values, mask.data, at)
            return handle(old, value.dtype.scalar)

        def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
            raise NotImplementedError("atomic_cas, which no kernel of Inductor has")

        def create_assert(self, condition: Any, message: str) -> None:
            if not np.all(condition.data):
                memory.note("assertion of a kernel", "", message)

        def cast_impl(self, src: Any, dst_type: Any) -> Any:
            to = dst_type.scalar
            data = numbers(src)
            if to == tl.bfloat16:
                return handle(narrow(data.astype(np.float32)), to)
            return handle(data.astype(np_dtype(to)), to)

        def create_fp_to_fp(self, src: Any, dst_type: Any, rounding: Any) -> Any:
            kinds = {src.dtype.scalar, dst_type.scalar}
            if kinds <= {tl.bfloat16, tl.float16, tl.float32, tl.float64}:
                return self.cast_impl(src, dst_type)
            return super().create_fp_to_fp(src, dst_type, rounding)

        # As in the parent, by name, which refer to `cast_impl` and `binary_op`.
        def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
            if lhs.dtype.scalar != tl.bfloat16:
                return super().binary_op(lhs, rhs, op)
            result = op(numbers(lhs), numbers(rhs))
            is_truth = result.dtype == np.bool_
            return handle(result if is_truth else narrow(result), lhs.dtype.scalar)

        def unary_op(self, arg: Any, op: Any) -> Any:
            if arg.dtype.scalar != tl.bfloat16:
                return super().unary_op(arg, op)
            return handle(narrow(op(numbers(arg))), arg.dtype.scalar)

        def create_fma(self, x: Any, y: Any, z: Any) -> Any:
            if z.dtype.scalar != tl.bfloat16:
                return super().create_fma(x, y, z)
            return handle(narrow(numbers(x) * numbers(y) + numbers(z)), z.dtype.scalar)

        def create_dot(self, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
            product = np.matmul(numbers(a), numbers(b), dtype=d.data.dtype)
            return handle(product + d.data, d.dtype.scalar)

    return Builder


def _at_bits(combine: np.ufunc, memory: Array, places: Array, values: Array) -> None:
    """Do what ``combine.at`` does, on bits of bfloat16: one value after the other, each rounded."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] + 1))
    turns = np.arange(len(ordered)) - np.repeat(starts, np.diff(starts, append=len(ordered)))
    by_turn = np.argsort(turns, kind="stable")
    for chosen in np.split(order[by_turn], np.cumsum(np.bincount(turns))[:-1]):
        at = places[chosen]
        memory[at] = narrow(combine(widen(memory[at]), widen(values[chosen])))


_ATOMICS: Mapping[str, Any] = {
    **{"ADD": np.add, "FADD": np.add, "MIN": np.minimum, "MAX": np.maximum},
    **{"UMIN": np.minimum, "UMAX": np.maximum},
    **{"AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor},
}


def _reduce_arrays(interpreter: Any) -> None:
    """Make reductions and scans by any function work on whole arrays."""
    from torch._inductor.runtime import triton_helpers

    known = {
        triton_helpers.maximum: np.max,  # numpy's give NaN for NaN, as these do
        triton_helpers.minimum: np.min,
    }

    def reduce(self: Any, input: Sequence[Any]) -> list[Any]:
        axis, arrays = self.axis, [one.handle.data for one in input]
        if axis is None:
            axis, arrays = 0, [array.reshape(-1) for array in arrays]
        if self.combine_fn in known:
            results = [known[self.combine_fn](arrays[0], axis=axis)]
        else:
            results = halve(self, [np.moveaxis(array, axis, 0) for array in arrays], input)
        if self.keep_dims:
            shape = [1] * input[0].handle.data.ndim
            results = [
                one.reshape(shape) if self.axis is None else np.expand_dims(one, axis)
                for one in results
            ]
        return [self.to_tensor(one, given.dtype) for one, given in zip(results, input, strict=True)]

    def halve(self: Any, arrays: list[Array], input: Sequence[Any]) -> list[Array]:
        while (length := len(arrays[0])) > 1:
            half = length // 2
            combined = combine(
                self,
                [array[:half] for array in arrays],
                [array[half : 2 * half] for array in arrays],
                input,
            )
            rest = [array[2 * half :] for array in arrays]
            arrays = [np.concatenate(pair) for pair in zip(combined, rest, strict=True)]
        return [array[0] for array in arrays]

    def scan(self: Any, input: Sequence[Any]) -> list[Any]:
        arrays = [np.moveaxis(one.handle.data, self.axis, 0) for one in input]
        step = 1
        while step < len(arrays[0]):
            # Whole arrays, because a block's length is a power of two; of its beginning, the
            # combined values are not used.
            shifted = [np.roll(one, step, axis=0) for one in arrays]
            combined = combine(self, shifted, arrays, input)
            arrays = [
                np.concatenate([one[:step], new[step:]])
                for one, new in zip(arrays, combined, strict=True)
            ]
            step *= 2
        return [
            self.to_tensor(np.moveaxis(one, 0, self.axis), given.dtype)
            for one, given in zip(arrays, input, strict=True)
        ]

    def combine(
        self: Any, left: list[Array], right: list[Array], input: Sequence[Any]
    ) -> list[Array]:
        tensors = [
            self.to_tensor(array, given.dtype)
            for side in (left, right)
            for array, given in zip(side, input, strict=True)
        ]
        result = self.combine_fn(*tensors)
        results = result if isinstance(result, tuple) else (result,)
        return [
            np.broadcast_to(one.handle.data, array.shape)
            for one, array in zip(results, left, strict=True)
        ]

    interpreter.ReduceOps.generic_reduce = reduce
    interpreter.ScanOps.generic_scan = scan


# Functions of libdevice that Inductor's code calls. Those that are not here raise when called.
_LIBDEVICE: Mapping[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "sqrt", "cos", "sin", "tan")},
    **{name: getattr(np, name) for name in ("cosh", "sinh", "tanh", "log", "log1p", "log2")},
    **{name: getattr(np, name) for name in ("log10", "fmod", "floor", "ceil", "trunc", "hypot")},
    **{name: getattr(np, name) for name in ("copysign", "nextafter", "isnan", "isinf", "rint")},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("sin", "cos", "tan")},
    **{f"a{name}h": getattr(np, f"arc{name}h") for name in ("sin", "cos", "tan")},
    **{name: getattr(scipy.special, name) for name in ("erf", "erfc", "erfinv", "erfcx")},
    "abs": np.abs,
    "atan2": np.arctan2,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "lgamma": scipy.special.gammaln,
    "nearbyint": np.rint,
    "llrint": lambda x: np.rint(x).astype(np.int64),
    "signbit": lambda x: np.signbit(x).astype(np.int32),
    "finitef": np.isfinite,
    "isfinited": np.isfinite,
    "div_rn": np.divide,
    "fast_tanhf": np.tanh,
    "ldexp": np.ldexp,
    "fma": lambda x, y, z: x * y + z,
}


def _replace_libdevice(interpreter: Any) -> None:
    """Give the stubs of libdevice, which triton has where there is no GPU, something to compute."""
    import triton.language as tl
    from triton.language.extra import libdevice

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"libdevice.{name}, of which rehearse knows no plain version")

    def compute(function: Callable[..., Array], *args: Any, **kwargs: Any) -> Any:
        semantic = interpreter.interpreter_semantic
        tensors = [semantic.to_tensor(one) for one in args]
        dtype = tensors[0].handle.data.dtype
        result = np.asarray(function(*(one.handle.data for one in tensors)))
        kinds = {
            np.dtype(bool): tl.int1,
            np.dtype(np.int32): tl.int32,
            np.dtype(np.int64): tl.int64,
        }
        scalar = kinds.get(result.dtype, tensors[0].dtype)
        if scalar is tensors[0].dtype:
            result = result.astype(dtype)
        shape = next((one.type for one in tensors if one.type.is_block()), None)
        kind = scalar if shape is None else tl.block_type(scalar, list(result.shape))
        return tl.tensor(interpreter.TensorHandle(result, scalar), kind)

    for name, stub in list(vars(libdevice).items()):
        if callable(stub):
            known = _LIBDEVICE.get(name)
            setattr(libdevice, name, partial(compute, known) if known else partial(missing, name))
