"""Options and flags of one compile, read once and handed down as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from torch._inductor import config as inductor_config

from cp_inductor import config
from cp_inductor.dtensor.axis import SequenceAxis, axis_of_mesh
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.errors import InvalidArgument
from cp_inductor.flags import FLAGS_ONLY, check_options
from cp_inductor.plan.checks import refuse

# Names beside flags (docs/options.md).
NO_FLAGS = ("mesh", "seq_dims", "seq_len")
SITE = "options of torch.compile"


@dataclass(frozen=True, slots=True)
class Settings:
    """Options and flags of one compile (docs/options.md)."""

    enabled: bool  # lower attentions in the graph; otherwise the op computes them at run time
    plan_options: PlanOptions
    axis: SequenceAxis | None  # of the mesh that the user named, on which plain tensors are shards
    inductor_options: Mapping[str, Any]  # all that are not ours
    check_agreement: bool = True
    check_sequence: bool = True
    # The sequence dims of plain inputs, by the names of the model's arguments.
    seq_dims: Mapping[str, int | None] = field(default_factory=dict)
    is_mesh_named: bool = False  # options say what plain tensors are; `{"mesh": None}`: whole


def read_settings(options: Mapping[str, Any] | None) -> Settings:
    """Return the flags and options of a compile; refuse options that mean nothing."""
    if not isinstance(options, Mapping | None):
        refuse("options", "a dict, such as {'mesh': mesh}", options, SITE)
    check_options(options or {})
    plan_options, rest = PlanOptions.read(options or {})
    is_mesh_named = "mesh" in rest
    mesh = rest.pop("mesh", None)
    axis = None if mesh is None else axis_of_mesh(mesh, site='options={"mesh": ...}')
    is_checked = bool(rest.pop("check_sequence", config.check_sequence))
    seq_dims = _seq_dims(rest.pop("seq_dims", None) or {})
    for name in rest:
        _check_is_inductors(name)
    checks = (bool(config.check_agreement), is_checked, seq_dims, is_mesh_named)
    return Settings(bool(config.enabled), plan_options, axis, rest, *checks)


def _seq_dims(dims: object) -> dict[str, int | None]:
    if isinstance(dims, Mapping) and all(
        isinstance(name, str) and (dim is None or type(dim) is int) for name, dim in dims.items()
    ):
        return dict(dims)
    expected = "dims of tokens, or None, by the names of the model's arguments, such as {'ids': 1}"
    refuse("seq_dims", expected, dims, SITE)


def _check_is_inductors(name: str) -> None:
    """Refuse what nobody would read: `cp_aot_eager` has no Inductor to complain."""
    if name in FLAGS_ONLY:
        raise InvalidArgument(
            site=SITE,
            expected="what is read in a compile",
            got=f"{name}, which is read outside of compiles as well",
            remedy=f"set cp_inductor.config.{name}, or CP_INDUCTOR_{name.upper()}",
        )
    if not hasattr(inductor_config, name):
        flags = (name for name in config.get_config_copy() if name.islower())
        ours = [*(flag for flag in flags if flag not in FLAGS_ONLY), *NO_FLAGS]
        near = get_close_matches(name, ours, n=1)
        raise InvalidArgument(
            site=SITE,
            expected=f"an option of Inductor, or one of {', '.join(ours)}",
            got=repr(name),
            remedy=f"{f'use {near[0]}' if near else 'correct its name'}, or leave it out",
        )
