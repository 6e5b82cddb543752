"""Flags, read once per compile and handed down as one frozen value.

    cp_inductor.config.enabled = False
    with cp_inductor.config.patch(enabled=False): ...
    CP_INDUCTOR_ENABLED=0 python train.py

The environment sets the default of a flag, and the program may overwrite it. docs/options.md lists
all flags.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from torch.utils._config_module import Config, install_config_module

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
stages: int = int(os.environ.get("CP_INDUCTOR_STAGES", "0"))

# How the ranks hold a sequence: "contiguous", or "zigzag" for batches from cp_inductor.shard.
# "auto" takes the layout of the enclosing context_parallel (ours or torch's), else contiguous.
layout: str = Config(default="auto", env_name_default="CP_INDUCTOR_LAYOUT", value_type=str)

# Bytes that an attention may keep of what it fetched from other ranks, for its backward. The rest
# is fetched again.
keep_bytes: int = int(os.environ.get("CP_INDUCTOR_KEEP_BYTES", "0"))

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
memory_budget_bytes: int = int(os.environ.get("CP_INDUCTOR_MEMORY_BUDGET_BYTES", "-1"))

# How fast a rank receives and computes; decides strategy, stages and schedule. 0: the usual speed
# for the device type. Must be the same on all ranks.
link_bytes_per_s: float = float(os.environ.get("CP_INDUCTOR_LINK_BYTES_PER_S", "0"))
device_flops_per_s: float = float(os.environ.get("CP_INDUCTOR_DEVICE_FLOPS_PER_S", "0"))

# Let all ranks of a sequence compare what they are about to run, before they run it for the first
# time and again when lengths or batch size change. Graphs compiled while it is off do not compare.
check_agreement: bool = Config(
    default=True, env_name_default="CP_INDUCTOR_CHECK_AGREEMENT", value_type=bool
)

# Compare the tables that masks are made from, the dropout seeds, and plain random numbers beside
# DTensors, in every N-th run of them; 0: in the first runs only. Must be the same on all ranks.
check_tables_every: int = int(os.environ.get("CP_INDUCTOR_CHECK_TABLES_EVERY", "0"))

if TYPE_CHECKING:

    def patch(*args: Any, **kwargs: Any) -> Any:
        """Set flags for a ``with`` block or a decorated function."""


install_config_module(sys.modules[__name__])
