"""Replace methods of other libraries' classes, for programs that name this library.

def prepare_model(original, self, model): ...
replace_method(Accelerator, "prepare_model", prepare_model, when=is_ours)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAME = "cp_inductor"

# Set on a model of which only what is below its head is compiled.
HEAD_IS_EAGER = "_cp_inductor_head_is_eager"

Method = Callable[..., Any]


def replace_method(
    owner: Any, name: str, new: Method, *, when: Callable[[Any], bool] | None = None
) -> None:
    """Replace a method of a class, or a function of a module; a second call changes nothing.

    Args:
        owner: the class or module.
        name: of the method.
        new: takes the original, and then what the original takes.
        when: whether the new method is to be called, given the first argument; otherwise, the
            original is.

    Raises:
        AttributeError: there is no such method.
    """
    original = getattr(owner, name)
    if getattr(original, "_is_of_cp_inductor", False):
        return

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if when is not None and not when(args[0]):
            return original(*args, **kwargs)
        return new(original, *args, **kwargs)

    replaced._is_of_cp_inductor = True  # type: ignore[attr-defined]
    setattr(owner, name, replaced)


@contextmanager
def attributes_of(owner: Any, **values: Any) -> Iterator[None]:
    """Within this context, attributes of an object have other values."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def is_ours(owner: Any) -> bool:
    """Whether an Accelerator, or a Trainer's, shares sequences among ranks by this library."""
    accelerator = getattr(owner, "accelerator", owner)
    config = getattr(accelerator, "parallelism_config", None)
    return config is not None and config.cp_enabled and config.cp_backend == NAME
