"""Find out in which layout ranks hold a sequence: who knows it, and who is believed.

    with context_parallel(mesh, buffers=[ids], ...):    contiguous: it sharded the buffers
    with torch's context_parallel(mesh, ...):           zigzag if its balancer is on, else
        contiguous
    options={"layout": "zigzag"}, config.layout         what the user says
    "auto", and none of these                           contiguous, which is what Shard means

Nothing about a tensor tells the order of its tokens, and a wrong guess gives wrong numbers. A
region and torch's `context_parallel` know what they have sharded, so an option that contradicts
them is refused. torch's `_context_parallel_shard` returns plain tensors and leaves a flag. While
torch's dispatcher is on, torch's own ring goes by that flag, and so does this module. Otherwise
nobody can tell whether shards are torch's, and the user is asked.

Not noticed: a load balancer of torch's other than head-tail (torch's ring does not look either),
and batches that a program has permuted itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch.fx.traceback import get_current_meta

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.torch_private.context_parallel import torchs_context_parallel

AUTO = "auto"

# What marks a node, among its custom metadata, whose region knows the layout.
LAYOUT_MARKS = {layout: {f"cp_inductor_{layout}": True} for layout in ("contiguous", "zigzag")}

REMEDY = (
    "set options={'layout': ...}, cp_inductor.config.layout or ContextParallel(layout=...):"
    " 'zigzag' if torch's head-tail balancer permuted the batch, 'contiguous' otherwise"
)

# The layout of the region that calls an attention in eager code. DTensor's handler, which needs it,
# runs far below the region.
_layout_of_region: ContextVar[str | None] = ContextVar("layout_of_region", default=None)


def agree_on_layout(asked: str, of_region: str | None, *, site: str, remedy: str = REMEDY) -> str:
    """Return the layout in which the ranks hold the tokens of an attention.

    Args:
        asked: the flag or option; "auto" if there is none.
        of_region: the layout in which the enclosing region sharded the tokens; None if it did not,
            or if there is none.
        site: for errors.
        remedy: for the error that nobody can know the layout.

    Raises:
        UnsupportedPlacement: two sources contradict each other, or nobody can know the layout.
    """
    torchs = torchs_context_parallel()
    if of_region is not None:
        if torchs.is_around:
            raise _two_contexts(site)
        return _believe(of_region, asked, "the region has sharded the sequence", site)
    if torchs.is_around:
        told = "zigzag" if torchs.is_balanced else "contiguous"
        return _believe(told, asked, "torch's context_parallel has sharded the sequence", site)
    if asked != AUTO:
        return asked
    layout = layout_of_torch()
    if layout is None:
        raise UnsupportedPlacement(
            site=site,
            expected="a known order of the tokens",
            got="shards that torch's _context_parallel_shard may or may not have permuted by"
            " a load balancer",
            remedy=remedy,
        )
    return layout


def layout_of_torch() -> str | None:
    """Return the layout of what torch's context parallelism has sharded; None if that is unknown.

    It is contiguous if torch has sharded nothing.
    """
    torchs = torchs_context_parallel()
    if not torchs.is_balanced or not (torchs.is_around or torchs.has_shards):
        return "contiguous"
    return "zigzag" if torchs.is_around or torchs.is_dispatching else None


def layout_of_region(*, site: str) -> str | None:
    """Return the layout that the regions around an attention know; None if they know none.

    When another backend traces a graph, these are the regions in which the graph was captured.

    Raises:
        UnsupportedPlacement: the regions know two layouts.
    """
    return _layout_of_region.get() or marked_layout(get_current_meta(), site=site)


def marked_layout(meta: Mapping[str, Any], *, site: str) -> str | None:
    """Return the layout in a node's meta; None if there is none.

    Raises:
        UnsupportedPlacement: there are two.
    """
    custom = meta.get("custom") or {}
    told = [layout for layout, mark in LAYOUT_MARKS.items() if mark.items() <= custom.items()]
    if len(told) > 1:
        raise _refuse_two(site)
    return told[0] if told else None


@contextmanager
def held_as(layout: str | None, *, site: str) -> Iterator[None]:
    """Tell the layout of a region to the attentions that are called inside, in eager code.

    Raises:
        UnsupportedPlacement: an enclosing region has another layout.
    """
    known = _layout_of_region.get()
    if layout is not None and known is not None and known != layout:
        raise _refuse_two(site)
    token = _layout_of_region.set(layout or known)
    try:
        yield
    finally:
        _layout_of_region.reset(token)


def _refuse_two(site: str) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        site=site,
        expected="enclosing regions with the same layout",
        got="a contiguous and a zigzag one",
        remedy="remove one of them, or give both the same layout",
    )


def _two_contexts(site: str) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        site=site,
        expected="one context that shards the sequence",
        got="a region of this library and torch's context_parallel, nested",
        remedy="use only one of the two",
    )


def _believe(known: str, asked: str, why: str, site: str) -> str:
    if asked in (AUTO, known):
        return known
    raise UnsupportedPlacement(
        site=site,
        expected=f"layout='auto' or {known!r}, because {why} that way",
        got=f"layout={asked!r}",
        remedy="remove the layout setting, or pass no buffers but shards in that layout",
    )
