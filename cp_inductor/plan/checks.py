"""Refuse impossible numbers, by name, before anything is planned with them.

    world_size=10**9  =>  InvalidArgument: plan_attention: expected world_size from 1 to 4096, ...

The upper limits are far beyond real runs. Up to them, planning ends and its integers do not
overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NoReturn

from cp_inductor.errors import InvalidArgument

MAX_WORLD_SIZE = 4096
# Planning takes time with the number of chunks, and balance needs fewer per rank of many ranks.
MAX_CHUNKS = 4096
# Pairs of queries and keys are counted in 64 bits.
MAX_LENGTH = (1 << 31) - 1
MAX_HEADS = MAX_HEAD_DIM = 1 << 16
MAX_ITEMSIZE = 16
MAX_BYTES = (1 << 63) - 1


def check_shape(sizes: Mapping[str, int], *, site: str) -> None:
    """Refuse an attention of impossible sizes, by their names in a recipe.

    Raises:
        InvalidArgument: a size is out of its range, or KV heads do not divide the query heads.
    """
    for name, most in (
        ("world_size", MAX_WORLD_SIZE),
        ("query_length", MAX_LENGTH),
        ("key_length", MAX_LENGTH),
        ("num_heads", MAX_HEADS),
        ("num_kv_heads", MAX_HEADS),
        ("head_dim", MAX_HEAD_DIM),
        ("itemsize", MAX_ITEMSIZE),
    ):
        check_count(name, sizes[name], 1, most, site=site)
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise InvalidArgument(
            site=site,
            expected=f"a num_kv_heads that divides num_heads={sizes['num_heads']}",
            got=str(sizes["num_kv_heads"]),
            remedy="choose a num_kv_heads that divides num_heads",
        )


def check_count(name: str, value: object, least: int, most: int, *, site: str) -> None:
    """Refuse a value that is not an integer in a range, whose ends are included.

    Raises:
        InvalidArgument: names the argument. True and False are refused as well.
    """
    if type(value) is not int or not least <= value <= most:
        _refuse(name, f"an integer from {least} to {most}", value, site)


def check_speed(name: str, value: object, *, site: str, is_zero_allowed: bool = False) -> None:
    """Refuse a value that is not a finite number above zero, or zero if that has a meaning.

    Raises:
        InvalidArgument: names the argument.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        is_there = value > 0 or (is_zero_allowed and value == 0)
        if is_there and math.isfinite(value):
            return
    least = "zero, or a finite number above" if is_zero_allowed else "a finite number above zero"
    _refuse(name, least, value, site)


def check_type(name: str, value: object, kind: type, *, site: str) -> None:
    """Refuse a value that is not an instance of a class.

    Raises:
        InvalidArgument: names the argument.
    """
    if not isinstance(value, kind):
        _refuse(name, f"a {kind.__name__}", value, site)


def _refuse(name: str, expected: str, value: object, site: str) -> NoReturn:
    if isinstance(value, int) and value.bit_length() > 128:  # Python may refuse to print it
        got = f"an integer of {value.bit_length()} bits"
    else:
        got = repr(value)[:60]
    raise InvalidArgument(
        site=site, expected=f"{name} to be {expected}", got=got, remedy=f"correct {name}"
    )
