"""How a rank describes an attention that it is about to run, for the other ranks.

    describe_attention(attention, float32, (1, 128, 128))
      =>  Entry(fields: mask = causal, num_heads = 8, ..., queries = 128 on each rank, ...)

The kind of an attention tells it from the others of a model by all but its sizes: heads, dtype,
mask, scale and so on. Two ranks run the same attention if all fields are equal.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import is_of_pairs
from cp_inductor.plan import Recipe, forward_plan
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.run.attention import Attention
from cp_inductor.source import source_hash
from cp_inductor.torch_private.groups import group_of
from cp_inductor.trust.record import Entry

UNKNOWN = "not known before the graph runs"

# How many are kept: more attentions than a model has, at several lengths each.
NUM_KEPT = 1024

# As many digits of a digest tell texts apart, and can be read aloud.
NUM_DIGITS = 12

# What follows from the other fields.
PLANNED = ("plan", "stages", "chunks", "strategy", "late")

HEADS = ("num_heads", "num_kv_heads", "head_dim")

# What a claim says in other words, or what differs between ranks.
SAID_APART = {
    *("rule", "query_length", "key_length", "itemsize"),
    *("source", "rank", "world_size", "group_name"),
}


@lru_cache(maxsize=NUM_KEPT)
def describe_attention(
    attention: Attention,
    dtype: torch.dtype,
    sizes: tuple[int | None, ...],
    heads: tuple[int, ...] = (),
    *,
    has_grad: bool | None,
) -> Entry:
    """Return the event that an attention is run, at no site yet.

    Args:
        attention: the attention.
        dtype: of its tensors.
        sizes: batch entries, queries and keys that this rank really holds. If the batch decides the
            plan, the queries and keys of the whole sequence stand before the last two. None stands
            for what only the graph knows, while it runs.
        heads: H, G and D, if the batch decides the plan.
        has_grad: whether gradients are on; None where nobody knows it.
    """
    batch, *lengths = sizes
    source = attention.source
    said = {
        "what": "an attention planned once per batch" if attention.is_per_batch else "an attention",
        "mask": source.rule,
        "dtype": str(dtype).removeprefix("torch."),
        **_values_of(attention),
        **_values_of(source),
        **dict(zip(HEADS, map(str, heads), strict=False)),
        "batch entries": UNKNOWN if batch is None else str(batch),
        "torch": str(torch.__version__),
        "source of cp_inductor": source_hash()[:NUM_DIGITS],
    }
    if isinstance(source, Recipe):
        said["plan"] = digest(repr(forward_plan(source).stages).encode())
        lengths = [source.query_length, source.key_length, *lengths]
    for name, length, held in zip(("queries", "keys"), lengths[:2], lengths[2:], strict=True):
        said[name] = _describe_tokens(attention, length, held)
    if has_grad is not None:
        said["gradients"] = "on" if has_grad else "off"
    return Entry("", said, PLANNED, kind=f"{kind_of(attention, dtype)} {has_grad}")


def _values_of(this: Any) -> dict[str, str]:
    """Return what an attention, or the source of its plan, says of itself, by name."""
    named = {field.name: getattr(this, field.name) for field in fields(this)}
    return {n: str(value) or "none" for n, value in named.items() if n not in SAID_APART}


def _describe_tokens(attention: Attention, length: int | None, held: int | None) -> str:
    """Say how many tokens a sequence has, and how many this rank has if they are not its part."""
    if isinstance(attention.source, Recipe):
        rank, world_size = attention.rank, attention.source.world_size
        if held is None:
            return UNKNOWN
        if length is not None and length % world_size == 0:
            # Whatever length the plan was made for: all ranks hold as many.
            return f"{held} on each rank"
    elif length is None or held is None:
        return UNKNOWN if length is None else f"{length} in all"
    else:
        group = group_of(attention.group_name)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    assert length is not None and held is not None
    planned = shard_lengths(length, world_size)[rank]
    if held == planned:
        return f"{length} in all"
    return f"{held} where the plan of {length} has {planned}, at position {rank},"


def kind_of(attention: Attention, dtype: torch.dtype) -> str:
    """Say of what kind an attention is: all that tells it from others of a model but its sizes."""
    source, heads = attention.source, tuple[Any, ...]()
    if isinstance(source, Recipe):
        is_cross = source.query_length != source.key_length
        heads = (is_cross, source.num_heads, source.num_kv_heads, source.head_dim)
    # A mask may be written with lengths.
    rule = re.sub(r"\d+", "#", source.rule)
    return repr((rule, heads, dtype, *_values_of(attention).values()))


def digest(text: bytes) -> str:
    """Return the first digits of a digest, for comparison."""
    return hashlib.sha256(text).hexdigest()[:NUM_DIGITS]


def tables_to_note(attention: Attention) -> list[int]:
    """Return which extras of an attention must be alike on all ranks.

    A table of queries and keys is not compared: a rank has the rows of its own queries.
    """
    if attention.is_per_batch:
        return []  # compared where the batch is planned
    places = sorted(place for place, at in attention.rule.tables.items() if not is_of_pairs(at))
    return places + [attention.num_extras - 1] * (attention.dropout_p > 0)
