"""How a rank describes an attention that it is about to run, for the other ranks.

    describe_attention(attention, float32, (1, 128, 128))
      =>  Entry(fields: mask = causal, query heads = 8, ..., queries = 128 on each rank, ...)

The kind of an attention tells it from the others of a model by all but its sizes: heads, dtype,
mask, scale and so on. Two ranks run the same attention if all fields are equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import is_of_pairs
from cp_inductor.plan import Grid, Recipe, forward_plan
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
PLANNED = ("plan", "stages", "chunks", "strategy")


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
    if attention.is_per_batch:
        of_plan = {
            "queries": _tokens_of_batch(attention, *lengths[::2]),
            "keys": _tokens_of_batch(attention, *lengths[1::2]),
            "stages": str(attention.source.stages),
            "nodes": attention.nodes or "none",
        }
    else:
        recipe = attention.recipe
        heads = (recipe.num_heads, recipe.num_kv_heads, recipe.head_dim)
        of_plan = {
            "queries": _tokens(recipe, attention.rank, lengths[0], of_keys=False),
            "keys": _tokens(recipe, attention.rank, lengths[1], of_keys=True),
            "strategy": recipe.strategy,
            "stages": str(recipe.stages),
            "stages kept": str(recipe.keep),
            "chunks": str(recipe.chunks),
            "plan": digest(repr(forward_plan(recipe).stages).encode()),
        }
    names = ("query heads", "key-value heads", "head dim")
    fields = {
        "what": "an attention planned once per batch" if attention.is_per_batch else "an attention",
        "mask": attention.source.rule,
        **dict(zip(names, map(str, heads), strict=True)),
        "dtype": str(dtype).removeprefix("torch."),
        "scale": "1 / sqrt(head dim)" if attention.scale is None else repr(attention.scale),
        "kernel": attention.kernel,
        "kernel options": attention.kernel_options or "none",
        "dropout_p": repr(attention.dropout_p),
        "bias with a gradient": "yes" if attention.has_bias else "no",
        **of_plan,
        "batch entries": UNKNOWN if batch is None else str(batch),
        **_versions(),
    }
    if has_grad is not None:
        fields["gradients"] = "on" if has_grad else "off"
    return Entry("", fields, PLANNED, kind=f"{kind_of(attention, dtype)} {has_grad}")


def _tokens_of_batch(attention: Attention, length: int | None, held: int | None) -> str:
    """Say how many tokens a sequence has, and how many this rank has if they are not its part."""
    if length is None or held is None:
        return UNKNOWN if length is None else f"{length} in all"
    group = group_of(attention.group_name)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    grid = Grid(world_size, 1, length, length)
    return _compare_held(held, length, grid.local_length(rank, of_keys=False), rank)


def _tokens(recipe: Recipe, rank: int, held: int | None, *, of_keys: bool) -> str:
    if held is None:
        return UNKNOWN
    length = recipe.key_length if of_keys else recipe.query_length
    if length % recipe.world_size == 0:
        # Whatever length the plan was made for: all ranks hold as many.
        return f"{held} on each rank"
    return _compare_held(held, length, recipe.grid.local_length(rank, of_keys=of_keys), rank)


def _compare_held(held: int, length: int, planned: int, rank: int) -> str:
    if held == planned:
        return f"{length} in all"
    return f"{held} where the plan of {length} has {planned}, at position {rank},"


def kind_of(attention: Attention, dtype: torch.dtype) -> str:
    """Say of what kind an attention is: all that tells it from others of a model but its sizes."""
    of_recipe: tuple[Any, ...] = ()
    if not attention.is_per_batch:
        recipe = attention.recipe
        is_cross = recipe.query_length != recipe.key_length
        of_recipe = (is_cross, recipe.num_heads, recipe.num_kv_heads, recipe.head_dim)
    # A mask may be written with lengths.
    rule = re.sub(r"\d+", "#", attention.source.rule)
    rest = (
        dtype,
        attention.scale,
        attention.kernel,
        attention.dropout_p,
        attention.has_bias,
        attention.kernel_options,
    )
    return repr((rule, of_recipe, *rest))


@lru_cache(maxsize=1)
def _versions() -> Mapping[str, str]:
    return {"torch": str(torch.__version__), "source of cp_inductor": source_hash()[:NUM_DIGITS]}


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
