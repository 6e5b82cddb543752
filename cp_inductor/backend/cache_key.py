"""What generated code depends on besides the graph, which Inductor hashes itself."""

from __future__ import annotations

import torch.distributed as dist

from cp_inductor.passes.settings import Settings
from cp_inductor.source import source_hash


def cache_key(settings: Settings) -> str:
    """Return it for graphs in which plans are made for this rank."""
    rank = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None
    return repr((rank, settings.axis, cache_key_of_all(settings)))


def cache_key_of_all(settings: Settings) -> str:
    """Return it for graphs that say themselves what in them depends on the rank."""
    asked_for = (settings.enabled, settings.plan_options, settings.scheduling)
    return repr((source_hash(), *asked_for, settings.check_agreement))
