"""Refuse flags that mean nothing when they are set, and names in the environment that are no flags.

    cp_inductor.config.strategy = "rign"  =>  UnsupportedStrategy: cp_inductor.config.strategy: ...
    CP_INDUCTOR_STRATGY=ring              =>  InvalidArgument: ... use CP_INDUCTOR_STRATEGY

What depends on an attention, such as whether a strategy fits its heads, is checked when that
attention is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from cp_inductor import config
from cp_inductor.errors import InvalidArgument, UnsupportedStrategy
from cp_inductor.plan.checks import MAX_BYTES, check_count, check_speed, check_type
from cp_inductor.plan.machine import CALIBRATED, Machine
from cp_inductor.plan.planner import MAX_STAGES
from cp_inductor.plan.strategies import parse_strategy

PLANS = ("auto", "static", "runtime")
SCHEDULES = ("none", "local", "global")
AUTO = "auto"
# What is read outside of compiles as well, and so is no option of one.
FLAGS_ONLY = ("enabled", "check_agreement", "check_tables_every")


def check_flags() -> None:
    """Check all flags, now and whenever they are set, and the names in the environment.

    Raises:
        UnsupportedStrategy: there is no such strategy, plan or schedule.
        InvalidArgument: a number or a switch is impossible, or the environment has an unknown name.
    """
    known = [f"CP_INDUCTOR_{name.upper()}" for name in _CHECKS]
    for name in config.names_of_environment():
        if name not in known:
            _refuse_name(name, known)
    config.check_with({name: partial(check, name) for name, check in _CHECKS.items()})


def check_options(options: Mapping[str, Any]) -> None:
    """Check options of a compile that are flags, as these are; not the machine, which may be one.

    Raises:
        UnsupportedStrategy, InvalidArgument: as `check_flags` does.
    """
    for name, check in _CHECKS.items():
        if name in options and name not in ("machine", *FLAGS_ONLY):
            check(name, options[name])


def _refuse_name(name: str, known: Sequence[str]) -> None:
    nearest = get_close_matches(name, known, n=1, cutoff=0)[0]
    raise InvalidArgument(
        site="the environment",
        expected=f"one of {', '.join(known)}",
        got=name,
        remedy=f"use {nearest}, or unset {name}",
    )


def _site(name: str) -> str:
    of_compile = "" if name in FLAGS_ONLY else f", or options['{name}']"
    return f"cp_inductor.config.{name} (CP_INDUCTOR_{name.upper()}){of_compile}"


def _switch(name: str, value: object) -> None:
    check_type(name, value, bool, site=_site(name))


def _count(least: int, most: int, name: str, value: object) -> None:
    check_count(name, value, least, most, site=_site(name))


def _speed(name: str, value: object) -> None:
    check_speed(name, value, site=_site(name), is_zero_allowed=True)


def _one_of(choices: Sequence[str], name: str, value: object) -> None:
    if value not in choices:
        raise UnsupportedStrategy(
            site=_site(name),
            expected=f"one of {', '.join(choices)}",
            got=repr(value),
            remedy="use one of these",
        )


def _strategy(name: str, value: Any) -> None:
    check_type(name, value, str, site=_site(name))
    if value != AUTO:
        parse_strategy(value, site=_site(name))


def _machine(name: str, value: Any) -> None:
    check_type(name, value, str, site=_site(name))
    if value not in ("", AUTO, CALIBRATED):
        Machine.parse(value, site=_site(name))


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "enabled": _switch,
    "strategy": _strategy,
    "plan": partial(_one_of, PLANS),
    "stages": partial(_count, 0, MAX_STAGES),
    "keep_bytes": partial(_count, 0, MAX_BYTES),
    "check_sequence": _switch,
    "schedule": partial(_one_of, SCHEDULES),
    "memory_budget_bytes": partial(_count, -1, MAX_BYTES),
    "link_bytes_per_s": _speed,
    "device_flops_per_s": _speed,
    "machine": _machine,
    "check_agreement": _switch,
    "check_tables_every": partial(_count, 0, MAX_BYTES),
}

check_flags()
