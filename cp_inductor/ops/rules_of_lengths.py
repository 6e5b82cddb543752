"""Make sure that a rule that was read when a graph was compiled holds for the lengths of a call.

    arange(s0) < 512        at 300 tokens, all keys; at 600 tokens, not all

A graph whose lengths are symbols computes with the rule of one length. Before it plans for another,
its mask is read there, once per length and process; if it is another rule there, the call is
refused. Graphs find their mask by its name, in whichever process they were compiled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cp_inductor.errors import UnsupportedAttention

# Masks that are remembered; the oldest are forgotten. Lengths that are remembered of each.
NUM_MASKS, NUM_LENGTHS = 256, 4096

REMEDY = "compile with dynamic=False: then each length has a graph of its own"


@dataclass(slots=True)
class _Mask:
    site: str
    holds: Callable[[int, int], bool]
    lengths: set[tuple[int, int]] = field(default_factory=set)


_masks: OrderedDict[str, _Mask] = OrderedDict()


def remember_mask(
    name: str, site: str, holds: Callable[[int, int], bool], lengths: tuple[int, int]
) -> None:
    """Remember a mask of a graph that is compiled.

    Args:
        name: of the mask.
        site: for messages.
        holds: whether its rule holds for these lengths of queries and keys.
        lengths: for which it was read.
    """
    known = _masks[name].lengths if name in _masks else set()
    _masks[name] = _Mask(site, holds, known | {lengths})
    _masks.move_to_end(name)
    while len(_masks) > NUM_MASKS:
        _masks.popitem(last=False)


def check_lengths(name: str, lengths: tuple[int, int]) -> None:
    """Check that the rule of a mask holds for the lengths of a call.

    Raises:
        UnsupportedAttention: it does not, or that cannot be known.
    """
    mask = _masks.get(name)
    if mask is None:
        raise UnsupportedAttention(
            site="an attention under a mask, in a graph with lengths that change",
            expected="a mask that this process has traced, so that it can be read at each length",
            got=f"a graph of another process, or one of the oldest of {NUM_MASKS}",
            remedy=REMEDY,
        )
    if lengths in mask.lengths:
        return
    # In a thread of its own, which has no modes: graphs call this below autograd, where the same
    # functions are other ops. It was read above it.
    with ThreadPoolExecutor(1, thread_name_prefix="cp_inductor_lengths") as thread:
        holds = thread.submit(mask.holds, *lengths).result()
    if not holds:
        first = next(iter(mask.lengths))
        raise UnsupportedAttention(
            site=mask.site,
            expected=f"a mask that is the same function of indices at all lengths, as of {first[0]}"
            f" queries and {first[1]} keys, for which it was compiled",
            got=f"another one at {lengths[0]} queries and {lengths[1]} keys",
            remedy=REMEDY,
        )
    if len(mask.lengths) >= NUM_LENGTHS:
        mask.lengths.clear()
    mask.lengths.add(lengths)
