"""What generated code depends on besides the graph, which Inductor hashes itself."""

from __future__ import annotations

import torch.distributed as dist

from cp_inductor.passes.settings import Settings
from cp_inductor.source import source_hash


def cache_key(settings: Settings) -> str:
    """Return it as text: this rank, the options, and the source of this library."""
    rank = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    asked_for = (settings.enabled, settings.plan_options, settings.check_agreement)
    return repr((rank, settings.axis, source_hash(), *asked_for))
