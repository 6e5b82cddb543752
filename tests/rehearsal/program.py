"""Load the code that Inductor generated for a GPU so that it runs on the CPU, as it stands.

    import torch                                            left out: given, with parts replaced
    from torch._C import _cuda_getCurrentRawStream as ...   left out: given
    kernel = async_compile.triton('kernel', '''...''')      a kernel that the interpreter runs
    class Runner: def call(self, args): ...                 unchanged
    buf0 = empty_strided_cuda((256, 768), ...)              memory of the pretended device
    extern_kernels.addmm(..., out=buf0)                     computed on the CPU, arguments checked
    buf2 = torch.ops._c10d_functional.all_to_all_single...  a real exchange
    assert_size_stride(buf2, ...)                           as generated

The code is run in a namespace that has other things under some names, and is not changed; nothing
else in the process is. Statements that would bind those names again are skipped.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels

from tests.rehearsal.exchanges import COLLECTIVES, WAIT, Exchanges
from tests.rehearsal.kernels import load_kernel
from tests.rehearsal.stand_ins import STAND_INS, UNREAD, stand_in

if TYPE_CHECKING:
    from tests.rehearsal.device import Device

CPU = torch.device("cpu")


def load_program(
    code: str,
    path: Path,
    device: Device,
    exchanges: Exchanges,
    constants: Mapping[str, Any],
    read_only: Sequence[int] = (),
) -> Callable[[list[Any]], Any]:
    """Load generated code; return its function from a list of inputs to a list of outputs.

    To be called where a GPU is pretended.

    Args:
        path: of a file to write the code to. Kernels are written to a folder beside it.
        constants: tensors that the code reads by name.
        read_only: inputs that it must not write to, by their places.
    """
    path.write_text(code)
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    device.sources[str(path)] = code.splitlines()
    given = _names(device, exchanges, folder)
    tree = ast.parse(code, str(path))
    tree.body = [kept for statement in tree.body if (kept := _without(statement, given))]
    namespace: dict[str, Any] = {"__name__": "rehearsed", "__file__": str(path)}
    namespace.update(constants, **given)
    exec(compile(tree, str(path), "exec"), namespace)
    call = namespace["call"]

    def run(inputs: list[Any]) -> Any:
        tensors = [inputs[place] for place in read_only if isinstance(inputs[place], Tensor)]
        with device.memory.inputs_unchanged(tensors):
            outputs = call(inputs)
        with device.at_work("return"):
            for number, value in enumerate(outputs):
                if isinstance(value, Tensor):
                    device.memory.check_read(value, f"output {number} of {path.name}")
        return outputs

    return run


def _without(statement: ast.stmt, given: Mapping[str, Any]) -> ast.stmt | None:
    """Return a statement without what it would bind to given names; None if nothing is left."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        statement.names = [
            one
            for one in statement.names
            if (one.asname or one.name.partition(".")[0]) not in given
        ]
        return statement if statement.names else None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return None if isinstance(target, ast.Name) and target.id in given else statement
    if isinstance(statement, ast.If):  # of `if __name__ == "__main__"`
        return None
    return statement


def _names(device: Device, exchanges: Exchanges, folder: Path) -> dict[str, Any]:
    """Return what has another meaning here than on a GPU."""
    calls = Calls(device, exchanges)
    cuda = Overlay(torch.cuda, {"_DeviceGuard": nullcontext, "set_device": lambda index: None})

    def empty(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return device.memory.empty(shape, stride, dtype, device.target())

    def empty_on_host(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return device.memory.empty(shape, stride, dtype, device.target(), on_host=True)

    guards = torch._C._dynamo.guards
    return {
        "torch": Overlay(torch, {"cuda": cuda, "ops": Ops(torch.ops, calls)}),
        "get_raw_stream": lambda index: 0,
        "empty_strided_cuda": empty,
        "empty_strided_cpu": empty_on_host,
        "empty_strided_cpu_pinned": empty_on_host,
        "empty_strided_p2p": None,
        "AsyncCompile": lambda: _Kernels(device, folder),
        "extern_kernels": _Extern(calls),
        "assert_size_stride": guards.assert_size_stride,
    }


class Overlay:
    """A module of which some names are replaced."""

    def __init__(self, module: Any, replaced: Mapping[str, Any]) -> None:
        self._module, self._replaced = module, replaced

    def __getattr__(self, name: str) -> Any:
        replaced = self._replaced
        return replaced[name] if name in replaced else getattr(self._module, name)


class Ops:
    """`torch.ops`, and what is in it down to overloads, which are called by `Calls`."""

    def __init__(self, real: Any, calls: Calls) -> None:
        self._real, self._calls = real, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if isinstance(found, torch._ops.OpOverload):
            return lambda *args, **kwargs: self._calls.call(found, args, kwargs)
        if isinstance(found, (torch._ops.OpOverloadPacket, torch._ops._OpNamespace)):
            return Ops(found, self._calls)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the default overload."""
        return self._calls.call(self._real.default, args, kwargs)


class _Kernels:
    """What `async_compile` is in generated code."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device, self.folder = device, folder

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        return load_kernel(self.device, name, source, self.folder)

    def wait(self, scope: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        # C++ kernels, of what a GPU program computes on the host.
        return getattr(AsyncCompile(), name)


class _Extern:
    """Inductor's `extern_kernels`: matrix multiplications of libraries."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        function = _bmm_dtype if name == "bmm_dtype" else getattr(extern_kernels, name)
        return lambda *args, **kwargs: self._calls.extern(name, function, args, kwargs)


def _bmm_dtype(one: Tensor, other: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    """Multiply halves into float32, which torch does on GPUs alone."""
    return torch.bmm(one.to(out_dtype), other.to(out_dtype), out=out)


class Calls:
    """Calls of ops and of extern kernels, with what they read and write."""

    def __init__(self, device: Device, exchanges: Exchanges) -> None:
        self.device, self.exchanges = device, exchanges

    def call(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Call an op: exchange, compute by a plain implementation, or run it on the CPU."""
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: CPU, (args, kwargs))
        with self.device.at_work(op.name()):
            if op is WAIT:
                return self.exchanges.wait(args[0])
            if op in COLLECTIVES:
                return self.exchanges.start(op, args, kwargs)
            self._check_inputs(op, args, kwargs)
            if op in STAND_INS:
                results = stand_in(op, args, kwargs, self._complain)
                self.device.report.replaced[op.name()] += 1
            else:
                results = op(*args, **kwargs)
                if not op.is_view:
                    self.device.report.replaced[op.name()] += 1
            return self._adopt(results, (args, kwargs))

    def extern(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Call a matrix multiplication, into `out` if there is one."""
        with self.device.at_work(f"extern_kernels.{name}"):
            out = kwargs.get("out")
            inputs = [one for one in args if isinstance(one, Tensor)]
            for place, one in enumerate(args):
                if isinstance(one, Tensor):
                    self.device.memory.check_read(one, self.device.argument_at(place))
            # Offsets of groups are integers.
            dtypes = [one.dtype for one in inputs if one.is_floating_point()]
            of_out = [] if out is None or not out.is_floating_point() else [out.dtype]
            wanted = kwargs.get("out_dtype", dtypes[0] if dtypes else None)
            if len(set(dtypes)) > 1 or of_out not in ([], [wanted]):
                self._complain(f"operands of {[*dtypes, *of_out]}")
            result = function(*args, **kwargs)
            if out is not None:
                self.device.memory.mark(out, "out")
            else:
                result = self._adopt(result, inputs)
        self.device.report.replaced[f"extern_kernels.{name}"] += 1
        return result

    def _complain(self, what: str) -> None:
        self.device.note("broken contract", "", what)

    def _check_inputs(self, op: Any, args: Any, kwargs: Any) -> None:
        memory = self.device.memory
        for place, parameter in enumerate(op._schema.arguments):
            is_by_place = place < len(args)
            given = args[place] if is_by_place else kwargs.get(parameter.name)
            name = self.device.argument_at(place) if is_by_place else parameter.name
            for tensor in _tensors(given):
                if parameter.is_write:
                    memory.mark(tensor, name)
                elif not op.is_view and parameter.name not in UNREAD:
                    memory.check_read(tensor, name)

    def _adopt(self, results: Any, inputs: Any) -> Any:
        """Move what an op has made into the device's memory; views of inputs stay what they are."""
        known = {one.untyped_storage().data_ptr() for one in _tensors(inputs)}

        def move(result: Tensor) -> Tensor:
            if not result.numel() or result.untyped_storage().data_ptr() in known:
                return result
            return self.device.memory.adopt(result, self.device.target())

        return pytree.tree_map_only(Tensor, move, results)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
