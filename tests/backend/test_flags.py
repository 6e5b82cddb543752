"""Flags: what means nothing is refused by name when it is set, and all flags stay as they were."""

from __future__ import annotations

from typing import Any

import pytest

from cp_inductor import CPError, config
from cp_inductor.flags import _CHECKS
from tests.support.processes import run_python

WRONG: list[tuple[str, Any, str]] = [
    ("strategy", "x", "strategy='auto'"),
    ("strategy", "heads2", "heads2\\+blocks"),
    ("strategy", None, "to be a str"),
    ("plan", "later", "auto, static, runtime"),
    ("schedule", "all", "none, local, global"),
    ("stages", 9, "from 0 to 8"),
    ("keep_bytes", -1, "from 0 to"),
    ("memory_budget_bytes", -2, "from -1 to"),
    ("check_tables_every", 1.5, "from 0 to"),
    ("link_bytes_per_s", float("inf"), "finite number"),
    ("device_flops_per_s", "fast", "finite number"),
    ("machine", "8xh100", "a device and a link"),
    ("enabled", "no", "to be a bool"),
    ("check_sequence", 2, "to be a bool"),
    ("check_agreement", None, "to be a bool"),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG)
def test_a_value_that_means_nothing(name: str, value: Any, text: str) -> None:
    before = config.get_config_copy()
    with pytest.raises(CPError, match=rf"cp_inductor\.config\.{name} .*{text}"):
        setattr(config, name, value)
    with pytest.raises(CPError, match=text):
        config.patch(name, value)
    other = "stages" if name != "stages" else "keep_bytes"
    for changes in ({other: 1, name: value}, {name: value, other: 1}):
        with pytest.raises(CPError, match=text), config.patch(changes):
            pass
        with pytest.raises(CPError, match=text), config.patch(**changes):
            pass
    assert config.get_config_copy() == before


def test_every_flag_is_checked() -> None:
    assert (
        set(_CHECKS)
        == set(config.get_config_copy()) - {"TYPE_CHECKING"}
        == {name for name, _, _ in WRONG}
    )


ENVIRONMENTS = {
    "CP_INDUCTOR_STRATGY=ring": "use CP_INDUCTOR_STRATEGY, or unset CP_INDUCTOR_STRATGY",
    "CP_INDUCTOR_STAGES=two": "stages to be an integer from 0 to 8, got 'two'",
    "CP_INDUCTOR_ENABLED=maybe": "enabled to be a bool, got 'maybe'",
}
IMPORTED = """
import os, sys, torch
for variable in sys.argv[1:]:
    if not os.fork():
        os.environ.update([variable.split("=")])
        try:
            import cp_inductor
        except Exception as error:
            print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_environment() -> None:
    """Of processes that have imported torch, and not the package."""
    said = run_python("-c", IMPORTED, *ENVIRONMENTS).splitlines()
    for line, text in zip(said, ENVIRONMENTS.values(), strict=True):
        assert line.startswith("InvalidArgument: ") and text in line
