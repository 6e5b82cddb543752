"""The neighbour ring: KV blocks pass from rank to rank, gradients go straight home.

    step            rank 0            rank 1            rank 2          (causal)
    0    tile       q0 x kv0 causal   q1 x kv1 causal   q2 x kv2 causal
         rotate     kv0 -> 1          kv1 -> 2
    1    tile                         q1 x kv0          q2 x kv1
         rotate                       kv0 -> 2
         return                       dkv0 -> 0         dkv1 -> 1
    2    tile                                           q2 x kv0
         return                                         dkv0 -> 0

A block stops at the last rank that needs it: under a causal mask rank P-1 forwards nothing. The
collectives are still the same ones, in the same order, on every rank, some with nothing to send:
a collective that one rank leaves out is a hang.

The gradient of a block leaves each rank's kernel in the input dtype and goes straight to the
block's owner, which sums in float32. An accumulator that travels with the block would need as
many collectives, but float32 on the wire and a chain of additions through all ranks.

Counts per attention and rank: forward P-1 collectives, backward 2 (P-1).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

__all__ = ["Exchange", "RingStep", "TileMask", "plan_ring"]


class TileMask(Enum):
    """Which (query, key) pairs of a tile exist."""

    EMPTY = "empty"  # none: the tile is not computed
    FULL = "full"
    CAUSAL = "causal"  # key index <= query index, both counted from the tile's corner


@dataclass(frozen=True, slots=True)
class Exchange:
    """One all_to_all of whole blocks: how many go to, and come from, each rank."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def num_sent(self) -> int:
        """Blocks that this rank gives."""
        return sum(self.sends)

    @property
    def num_received(self) -> int:
        """Blocks that this rank gets."""
        return sum(self.receives)


@dataclass(frozen=True, slots=True)
class RingStep:
    """What one rank does in one step of the ring.

    Attributes:
        owner: rank whose KV block is at hand.
        mask: the tile of the local queries and that block.
        rotate: passes the block at hand to the next rank; starts before the tile and is waited
            for after it. None in the last step.
        give_back: backward only; brings the tile's KV gradient home. None in step 0, whose block
            is home already.
    """

    owner: int
    mask: TileMask
    rotate: Exchange | None
    give_back: Exchange | None


@lru_cache(maxsize=16)
def plan_ring(rank: int, world_size: int, *, is_causal: bool) -> tuple[RingStep, ...]:
    """Plan every step of one rank of the ring.

    Args:
        rank: position on the sequence axis, 0 <= rank < world_size.
        world_size: number of ranks on the sequence axis.
        is_causal: queries see only keys of the same or earlier positions; shards are contiguous.

    Returns:
        world_size steps, step i working on the block of rank - i (modulo world_size).
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size}")
    steps = range(world_size)
    return tuple(_plan_step(rank, step, world_size, is_causal=is_causal) for step in steps)


def _plan_step(rank: int, step: int, world_size: int, *, is_causal: bool) -> RingStep:
    mask = _mask_of(rank, step, is_causal=is_causal)
    rotate = give_back = None
    if step + 1 < world_size:
        next_rank, previous_rank = (rank + 1) % world_size, (rank - 1) % world_size
        rotate = Exchange(
            sends=_one_block(
                next_rank, _is_needed(next_rank, step + 1, is_causal=is_causal), world_size
            ),
            receives=_one_block(
                previous_rank, _is_needed(rank, step + 1, is_causal=is_causal), world_size
            ),
        )
    if step > 0:
        owner, borrower = (rank - step) % world_size, (rank + step) % world_size
        give_back = Exchange(
            sends=_one_block(owner, _is_needed(rank, step, is_causal=is_causal), world_size),
            receives=_one_block(
                borrower, _is_needed(borrower, step, is_causal=is_causal), world_size
            ),
        )
    return RingStep((rank - step) % world_size, mask, rotate, give_back)


def _is_needed(rank: int, step: int, *, is_causal: bool) -> bool:
    """Whether the block that reaches `rank` in `step` holds a key that its queries see."""
    return not is_causal or step <= rank


def _mask_of(rank: int, step: int, *, is_causal: bool) -> TileMask:
    if not _is_needed(rank, step, is_causal=is_causal):
        return TileMask.EMPTY
    return TileMask.CAUSAL if is_causal and step == 0 else TileMask.FULL


def _one_block(peer: int, is_needed: bool, world_size: int) -> tuple[int, ...]:
    return tuple(int(is_needed and other == peer) for other in range(world_size))


def format_ring(steps: tuple[RingStep, ...], *, is_backward: bool) -> str:
    """Return one readable line per step, for logs."""
    lines = []
    for index, step in enumerate(steps):
        line = f"step {index}: kv of rank {step.owner}, {step.mask.value} tile"
        if step.rotate is not None:
            line += f", rotate {_format_exchange(step.rotate)}"
        if is_backward and step.give_back is not None:
            line += f", give back {_format_exchange(step.give_back)}"
        lines.append(line)
    return "\n".join(lines)


def _format_exchange(exchange: Exchange) -> str:
    sent = [f"to {rank}" for rank, count in enumerate(exchange.sends) if count]
    received = [f"from {rank}" for rank, count in enumerate(exchange.receives) if count]
    return " ".join(sent + received) or "nothing"
