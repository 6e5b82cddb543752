"""Replace methods of other libraries' classes, for programs that name this library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

NAME = "cp_inductor"

# Set on a model of which only what is below its head is compiled.
HEAD_IS_EAGER = "_cp_inductor_head_is_eager"

Method = Callable[..., Any]


def replace_method(owner: Any, name: str, make: Callable[[Method], Method]) -> None:
    """Replace a method of a class, or a function of a module, by what `make` makes of it, once."""
    original = getattr(owner, name)
    if getattr(original, "_is_of_cp_inductor", False):
        return
    new = functools.wraps(original)(make(original))
    new._is_of_cp_inductor = True  # type: ignore[attr-defined]
    setattr(owner, name, new)


def is_ours(accelerator: Any) -> bool:
    """Whether an Accelerator shares sequences among ranks by this library."""
    config = getattr(accelerator, "parallelism_config", None)
    return config is not None and config.cp_enabled and config.cp_backend == NAME
