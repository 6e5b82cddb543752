"""Import the function that a user names on the command line, and call it.

module:function    path/to/file.py:function
  => function(mesh), or function() => model, (args...), {kwargs...}, {options...}
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from cp_inductor.errors import CPError


class CannotLoad(CPError):
    """There is no such function, or it returns something else."""


@dataclass(frozen=True, slots=True)
class Example:
    """A model and what it is called with.

    Attributes:
        model: a module or function.
        args: its arguments.
        kwargs: more, by name.
        options: of torch.compile.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None


def load_example(name: str, mesh: DeviceMesh) -> Example:
    """Call the function that a user named; give it the mesh if it takes one.

    Args:
        name: ``module:function``, the module as Python imports it or a path.
        mesh: of the world the model is for.

    Raises:
        CannotLoad: nothing of that name, or not a model with its arguments.
    """
    function = _find(name)
    built = function(mesh) if inspect.signature(function).parameters else function()
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
    model, args, *rest = parts
    return Example(model, tuple(args), *rest)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.rpartition(":")
    try:
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
    path = Path(name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look their module up by its name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
