"""Import the function that a user names on the command line, and call it to get a model.

module:function    path/to/file.py:function
  => function(mesh), or function()  =>  model, (args...), {kwargs...}, {options...}
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cp_inductor.errors import CPError
from cp_inductor.inspect.world import Example
from cp_inductor.torch_private.dynamo import graph_break_reason


class CannotLoad(CPError):
    """The named function does not exist, or does not return a model and its arguments."""


def load_example(name: str, mesh: DeviceMesh) -> Example:
    """Call the function that a user named, with the mesh if it takes an argument.

    Args:
        name: ``module:function``, where module is a name to import or the path of a ``.py`` file.
        mesh: of the ranks that the model is for.

    Raises:
        CannotLoad: the function does not exist, or raises, or does not return a model and its
            arguments.
    """
    try:
        function = _find(name)
        built = function(mesh) if inspect.signature(function).parameters else function()
    except CPError:
        raise
    except Exception as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        raise CannotLoad(
            site=name,
            expected="code that builds a model and its arguments",
            got=f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})",
            remedy="call the function in a program of its own to see the whole traceback",
        ) from error
    parts = built if isinstance(built, tuple) else (built,)
    is_right = (
        2 <= len(parts) <= 4
        and callable(parts[0])
        and isinstance(parts[1], (tuple, list))
        and all(isinstance(part, Mapping) for part in parts[2:])
    )
    if not is_right:
        raise CannotLoad(
            site=name,
            expected="a function that returns (model, args), optionally followed by kwargs"
            " and options",
            got=f"{type(built).__name__} of {[type(part).__name__ for part in parts]}",
            remedy="return the model and a tuple of its arguments",
        )
    return Example(*parts)


@contextmanager
def failures_named(name: str) -> Iterator[None]:
    """Raise as one line why Dynamo did not capture the model that a user named.

    Raises:
        CannotLoad: it did not; what it calls or is called with is at fault, and not the library.
    """
    try:
        yield
    except CPError:
        raise
    except Exception as error:
        reason = graph_break_reason(error)
        if reason is None:
            raise
        raise CannotLoad(
            site=name,
            expected="a model that runs on its arguments and is captured whole",
            got=reason,
            remedy="call it on plain tensors first; then with torch.compile(fullgraph=True)",
        ) from error


def _find(name: str) -> Callable[..., Any]:
    module_name, colon, function_name = name.rpartition(":")
    try:
        if not colon:
            module = _import(name)
            functions = ", ".join(
                name
                for name, value in vars(module).items()
                if inspect.isfunction(value)
                and value.__module__ == module.__name__
                and name[0] != "_"
            )
            raise AttributeError(f"no function; there are {functions or 'none'}")
        module = _import(module_name)
        found: Callable[..., Any] = getattr(module, function_name)
    except (ImportError, AttributeError, FileNotFoundError, ValueError) as error:
        raise CannotLoad(
            site=name,
            expected="module:function, or path/to/file.py:function",
            got=str(error),
            remedy="name a function that can be imported from here",
        ) from None
    return found


def _import(name: str) -> Any:
    if not name.endswith(".py"):
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(name)
    # So that the file can import those beside it; behind all else, lest a folder of the same name
    # take the place of a module of Python's in the processes that are started from here.
    folder = str(Path(name).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    return import_file(Path(name), is_registered=True)


def import_file(path: Path, *, is_registered: bool = False) -> Any:
    """Import a file; if registered, dataclasses and pickle find its classes in `sys.modules`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if is_registered:
        sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
