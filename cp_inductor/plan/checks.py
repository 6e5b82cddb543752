"""Refuse impossible numbers, by name, before anything is planned with them.

    world_size=10**9  =>  InvalidArgument: plan_attention: expected world_size from 1 to 4096, ...

The upper limits are far beyond real runs. Up to them, planning ends and its integers do not
overflow.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from cp_inductor.errors import InvalidArgument

MAX_WORLD_SIZE = 4096
# Pairs of queries and keys are counted in 64 bits.
MAX_LENGTH = (1 << 31) - 1
MAX_BYTES = (1 << 63) - 1
# The least and the most that the numbers of a recipe may be.
LIMITS = {
    "world_size": (1, MAX_WORLD_SIZE),
    "query_length": (1, MAX_LENGTH),
    "key_length": (1, MAX_LENGTH),
    "num_heads": (1, 1 << 16),
    "num_kv_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 16),
    "itemsize": (1, 16),
    "stages": (0, MAX_WORLD_SIZE),  # the ring has one for each other rank
    "keep": (0, MAX_WORLD_SIZE),
    # Planning takes time with the number of chunks, and balance needs fewer per rank of many ranks.
    "chunks": (0, 4096),
    "late": (0, 1),
}


def check_count(name: str, value: object, least: int, most: int, *, site: str) -> None:
    """Refuse a value that is not an integer in a range, whose ends are included, and bools."""
    if type(value) is not int or not least <= value <= most:
        refuse(name, f"an integer from {least} to {most}", value, site)


def check_speed(name: str, value: object, *, site: str, is_zero_allowed: bool = False) -> None:
    """Refuse a value that is not a finite number above zero, or zero if that has a meaning."""
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (0 < value <= sys.float_info.max or (is_zero_allowed and value == 0))
    ):
        return
    least = "zero, or a finite number above" if is_zero_allowed else "a finite number above zero"
    refuse(name, least, value, site)


def check_type(name: str, value: object, kind: type, *, site: str) -> None:
    """Refuse a value that is not an instance of a class."""
    if not isinstance(value, kind):
        refuse(name, f"a {kind.__name__}", value, site)


def refuse(name: str, expected: str, value: object, site: str) -> NoReturn:
    """Refuse a value of an argument, which is to be something else."""
    if isinstance(value, int) and value.bit_length() > 128:  # Python may refuse to print it
        got = f"an integer of {value.bit_length()} bits"
    else:
        got = repr(value)[:60]
    raise InvalidArgument(
        site=site, expected=f"{name} to be {expected}", got=got, remedy=f"correct {name}"
    )
