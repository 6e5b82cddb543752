"""Flags, read once per compile and handed down as one frozen value.

    cp_inductor.config.enabled = False
    with cp_inductor.config.patch(enabled=False): ...
    CP_INDUCTOR_ENABLED=0 python train.py

The environment gives the default of a flag; what the program sets afterwards wins.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

from torch.utils._config_module import Config, install_config_module

# Rewrite attentions into collectives, waits and tiles in the compiled graph. When off, graphs
# keep the semantic op (or DTensor's own attention), whose eager kernel computes the same numbers.
enabled: bool = Config(default=True, env_name_default="CP_INDUCTOR_ENABLED", value_type=bool)

# Who computes what: "auto", "ring", "allgather", "rows", "blocks", "heads", "heads2+blocks", ...
strategy: str = Config(default="auto", env_name_default="CP_INDUCTOR_STRATEGY", value_type=str)

# Exchanges of an attention's forward pass, at most 8; 0 chooses by estimated cost.
stages: int = int(os.environ.get("CP_INDUCTOR_STAGES", "0"))

# How the ranks hold a sequence: "contiguous", or "zigzag" for batches from cp_inductor.shard;
# "auto" is contiguous, or what a context_parallel around, also torch's, has made of its buffers.
layout: str = Config(default="auto", env_name_default="CP_INDUCTOR_LAYOUT", value_type=str)

# Of what an attention fetched from other ranks, how much is kept for its backward instead of
# fetched again.
keep_bytes: int = int(os.environ.get("CP_INDUCTOR_KEEP_BYTES", "0"))

# Refuse what mixes the tokens of plain shards and is not attention, such as a convolution along the
# sequence, and positions that every rank counts from 0. Off for models that know that they run on
# shards.
check_sequence: bool = Config(
    default=True, env_name_default="CP_INDUCTOR_CHECK_SEQUENCE", value_type=bool
)

# What exchanges may hide behind: "none", "local" (the attention itself), "global" (all compute
# of the graph that depends on neither what is sent nor what arrives).
schedule: str = Config(default="global", env_name_default="CP_INDUCTOR_SCHEDULE", value_type=str)

# Bytes by which the schedule may raise what is alive at once; -1: what two exchanges bring.
memory_budget_bytes: int = int(os.environ.get("CP_INDUCTOR_MEMORY_BUDGET_BYTES", "-1"))

# How fast a rank receives, and computes, for the choice of strategy, stages and schedule; 0: as its
# device usually does. The same on all ranks.
link_bytes_per_s: float = float(os.environ.get("CP_INDUCTOR_LINK_BYTES_PER_S", "0"))
device_flops_per_s: float = float(os.environ.get("CP_INDUCTOR_DEVICE_FLOPS_PER_S", "0"))

# Compare what all ranks of a sequence are about to run, before they run it for the first time, and
# again when lengths or batch change. Graphs compiled while it is off are not compared.
check_agreement: bool = Config(
    default=True, env_name_default="CP_INDUCTOR_CHECK_AGREEMENT", value_type=bool
)

# Compare the tables that masks are made from, and the seeds of dropout, of every so many runs of an
# attention; 0: of the first only. The same on all ranks.
check_tables_every: int = int(os.environ.get("CP_INDUCTOR_CHECK_TABLES_EVERY", "0"))

if TYPE_CHECKING:

    def patch(*args: Any, **kwargs: Any) -> Any:
        """Set flags for the duration of a ``with`` block or of a decorated function."""


install_config_module(sys.modules[__name__])
