"""What the library keeps between calls, and `reset`, which drops it.

    @lru_cache(maxsize=64)          as in functools, and `reset` clears it
    @on_reset                       a function that `reset` calls

Every module says so of what it keeps, where it keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

Result = TypeVar("Result")

_drops: list[Callable[[], None]] = []


def on_reset(drop: Callable[[], None]) -> Callable[[], None]:
    """Call a function of a module in every `reset`."""
    _drops.append(drop)
    return drop


def lru_cache(maxsize: int | None) -> Callable[[Callable[..., Result]], _lru_cache_wrapper[Result]]:
    """Keep the results of a function of a module until `reset`."""

    def keep(function: Callable[..., Result]) -> _lru_cache_wrapper[Result]:
        kept = functools.lru_cache(maxsize)(function)
        on_reset(kept.cache_clear)
        return kept

    return keep


def cache(function: Callable[..., Result]) -> _lru_cache_wrapper[Result]:
    """Keep all results of a function of a module until `reset`."""
    return lru_cache(None)(function)


def reset() -> None:
    """Drop all that the library keeps between calls: plans, what ranks agreed on, and stores.

    What was said once, such as a warning, may be said again. Compiled functions stay valid, and so
    do models. Call it on all ranks at the same point of the program, outside of attentions: the
    next attention is compared anew on all of them. After `destroy_process_group` it drops the last
    references of this library to stores of the group. What `torch.compile` keeps, such as the
    guards of compiled functions, is dropped by `torch._dynamo.reset()`.
    """
    for drop in _drops:
        drop()
