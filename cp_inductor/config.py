"""Flags, read once per compile and handed down as one frozen value.

    cp_inductor.config.enabled = False
    with cp_inductor.config.patch(enabled=False): ...
    CP_INDUCTOR_ENABLED=0 python train.py

The environment sets the default of a flag, and the program may overwrite it. docs/options.md lists
all flags. `cp_inductor.flags` refuses values that mean nothing when they are set.
"""

import os
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils._config_module import Config, install_config_module


def _number(name: str, default: Any) -> Any:
    """Return a number from the environment, or its text, which `flags` then refuses."""
    text = os.environ.get(name)
    try:
        return default if text is None else type(default)(text)
    except ValueError:
        return text


# Rewrite attentions in the compiled graph into collectives, waits and tiles. If off, graphs keep
# cp_inductor::attention (or DTensor's attention), whose eager kernel computes the same numbers.
enabled: bool = Config(default=True, env_name_default="CP_INDUCTOR_ENABLED", value_type=bool)

# Who computes what: "auto", "ring", "allgather", "rows", "blocks", "heads", "heads2+blocks", ...
strategy: str = Config(default="auto", env_name_default="CP_INDUCTOR_STRATEGY", value_type=str)

# When to plan: "static", when the graph is compiled; "runtime", once per batch, from the tables
# that the mask reads, with one graph for all batches and ranks; "auto": at run time, if it reads
# any.
plan: str = Config(default="auto", env_name_default="CP_INDUCTOR_PLAN", value_type=str)

# Number of exchanges in the forward pass of an attention, at most 8; 0 chooses by estimated cost.
stages: int = _number("CP_INDUCTOR_STAGES", 0)

# Bytes that an attention may keep of what it fetched from other ranks, for its backward. The rest
# is fetched again.
keep_bytes: int = _number("CP_INDUCTOR_KEEP_BYTES", 0)

# Refuse operations other than attention that mix tokens of plain shards, such as a convolution
# along the sequence, and positions that every rank counts from 0. Turn it off for models that are
# written to run on shards.
check_sequence: bool = Config(
    default=True, env_name_default="CP_INDUCTOR_CHECK_SEQUENCE", value_type=bool
)

# What may hide an exchange: "none", "local" (tiles of the same attention), or "global" (everything
# in the graph that depends neither on what is sent nor on what arrives).
schedule: str = Config(default="global", env_name_default="CP_INDUCTOR_SCHEDULE", value_type=str)

# Bytes by which the schedule may raise peak memory; -1: as much as two exchanges bring.
memory_budget_bytes: int = _number("CP_INDUCTOR_MEMORY_BUDGET_BYTES", -1)

# How fast a rank receives and computes; decides strategy, stages and schedule. 0: the usual speed
# for the device type. Must be the same on all ranks.
link_bytes_per_s: float = _number("CP_INDUCTOR_LINK_BYTES_PER_S", 0.0)
device_flops_per_s: float = _number("CP_INDUCTOR_DEVICE_FLOPS_PER_S", 0.0)

# What plans are made for: a machine as text, such as "8xh100:nvlink4 x 8:ib400"; or "calibrated",
# the one that `cp_inductor.calibrate` measured; "auto": what is known of this device, and of the
# nodes that a launcher tells of; "": 500 TFLOP/s and one link of 400 Gbit/s. Must be the same on
# all ranks.
machine: str = Config(default="auto", env_name_default="CP_INDUCTOR_MACHINE", value_type=str)

# Let all ranks of a sequence compare what they are about to run, before they run it for the first
# time and again when lengths or batch size change. Graphs compiled while it is off do not compare.
check_agreement: bool = Config(
    default=True, env_name_default="CP_INDUCTOR_CHECK_AGREEMENT", value_type=bool
)

# Compare the tables that masks are made from, the dropout seeds, and plain random numbers beside
# DTensors, in every N-th run of them; 0: in the first runs only. Must be the same on all ranks.
check_tables_every: int = _number("CP_INDUCTOR_CHECK_TABLES_EVERY", 0)

if TYPE_CHECKING:

    def patch(*args: Any, **kwargs: Any) -> Any:
        """Set flags for a ``with`` block or a decorated function."""

    def get_config_copy() -> dict[str, Any]:
        """Return all flags by their names."""


install_config_module(sys.modules[__name__])


class _Checked(type(sys.modules[__name__])):  # type: ignore[misc]
    """Flags whose values are checked before they are set."""

    check: ClassVar[Callable[[str, object], None]]

    def __setattr__(self, name: str, value: object) -> None:
        _Checked.check(name, value)
        super().__setattr__(name, value)

    def patch(self, arg1: Any = None, arg2: Any = None, **kwargs: Any) -> Any:
        """Set flags for a ``with`` block or a decorated function; all or none of them."""
        changes = {arg1: arg2} if isinstance(arg1, str) else {**(arg1 or {}), **kwargs}
        for name, value in changes.items():
            _Checked.check(name, value)
        return super().patch(arg1, arg2, **kwargs)


types.ModuleType.__setattr__(sys.modules[__name__], "__class__", _Checked)


def check_by(check: Callable[[str, object], None]) -> None:
    """Call `check` with the name and the value of a flag before it is set."""
    _Checked.check = staticmethod(check)


def names_of_environment() -> list[str]:
    """Return the names in the environment that begin like those of flags."""
    return sorted(name for name in os.environ if name.startswith("CP_INDUCTOR_"))


def ranks_of_this_host() -> int:
    """Return how many ranks the launcher has started here, as it says; 0 if none says it."""
    # torchrun, accelerate and others; Open MPI; srun, which writes "8(x4)" for 4 nodes of 8.
    names = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")
    told = (os.environ.get(name, "").partition("(")[0] for name in names)
    return next((int(text) for text in told if text.isdecimal()), 0)
