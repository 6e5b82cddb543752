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
    """Check all flags, and the names in the environment.

    Raises:
        UnsupportedStrategy: there is no such strategy, plan or schedule.
        InvalidArgument: a number or a switch is impossible, or the environment has an unknown name.
    """
    known = [f"CP_INDUCTOR_{name.upper()}" for name in _CHECKS]
    for name in config.names_of_environment():
        if name not in known:
            _refuse_name(name, known)
    for name in _CHECKS:
        check_flag(name, getattr(config, name))


def check_options(options: Mapping[str, Any]) -> None:
    """Check options of a compile that are flags, as these are; not the machine, which may be one.

    Raises:
        UnsupportedStrategy, InvalidArgument: as `check_flags` does.
    """
    for name in _CHECKS:
        if name in options and name not in ("machine", *FLAGS_ONLY):
            check_flag(name, options[name])


def _refuse_name(name: str, known: Sequence[str]) -> None:
    nearest = get_close_matches(name, known, n=1, cutoff=0)[0]
    raise InvalidArgument(
        site="the environment",
        expected=f"one of {', '.join(known)}",
        got=name,
        remedy=f"use {nearest}, or unset {name}",
    )


def check_flag(name: str, value: object) -> None:
    """Check the value of a flag; other names are no flags."""
    of_compile = "" if name in FLAGS_ONLY else f", or options['{name}']"
    site = f"cp_inductor.config.{name} (CP_INDUCTOR_{name.upper()}){of_compile}"
    if name in _CHECKS:
        _CHECKS[name](name, value, site=site)


def _one_of(name: str, value: object, choices: Sequence[str], *, site: str) -> None:
    if value not in choices:
        raise UnsupportedStrategy(
            site=site,
            expected=f"one of {', '.join(choices)}",
            got=repr(value),
            remedy="use one of these",
        )


def _strategy(name: str, value: Any, *, site: str) -> None:
    check_type(name, value, str, site=site)
    if value != AUTO:
        parse_strategy(value, site=site)


def _machine(name: str, value: Any, *, site: str) -> None:
    check_type(name, value, str, site=site)
    if value not in ("", AUTO, CALIBRATED):
        Machine.parse(value, site=site)


_SWITCH, _BYTES = partial(check_type, kind=bool), partial(check_count, least=0, most=MAX_BYTES)
_SPEED = partial(check_speed, is_zero_allowed=True)
_CHECKS: dict[str, Callable[..., None]] = {
    "enabled": _SWITCH,
    "strategy": _strategy,
    "plan": partial(_one_of, choices=PLANS),
    "stages": partial(check_count, least=0, most=MAX_STAGES),
    "keep_bytes": _BYTES,
    "check_sequence": _SWITCH,
    "schedule": partial(_one_of, choices=SCHEDULES),
    "memory_budget_bytes": partial(check_count, least=-1, most=MAX_BYTES),
    "link_bytes_per_s": _SPEED,
    "device_flops_per_s": _SPEED,
    "machine": _machine,
    "check_agreement": _SWITCH,
    "check_tables_every": _BYTES,
}

check_flags()
