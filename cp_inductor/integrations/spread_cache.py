"""Layers of a cache of transformers whose keys and values lie on all ranks.

    prompt, 12 tokens on 2 ranks    rank 0: 0 1 2 3 4 5         rank 1: 6 7 8 9 10 11
    then tokens 12, 13, 14          rank 0: 0 1 2 3 4 5 12 14   rank 1: 6 7 8 9 10 11 13
    under a window of 4 tokens      rank 0: 12 14               rank 1: 11 13

The keys of a prompt stay where they were computed. Every rank computes those of each new token, and
one rank keeps them: the one with the fewest, then one after the other. A layer with a window holds
the last tokens alone, token p on rank p mod P. It takes them from all ranks once, at the end of the
prompt.

`update` returns this rank's keys, in the order of their slots; `positions` says which tokens these
are. A layer of a StaticCache has all its slots from the beginning, and its length is a tensor, so
one compiled graph serves all fill levels: what a rank does not keep it writes to a slot that nobody
reads.

Read in transformers 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from cp_inductor.errors import UnsupportedAttention
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.run.spread_keys import sum_over_ranks
from cp_inductor.tiles.dims import SEQUENCE_DIM

# A prompt with fewer tokens for each rank is computed whole on every rank.
SHORTEST_SHARD = 4

# A layer that grows makes room for so many tokens at a time.
ROOM = 256

GROWING = (DynamicLayer, DynamicSlidingWindowLayer)
FIXED = (StaticLayer, StaticSlidingWindowLayer)
SITE = "a cache of keys on all ranks"


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that share a cache.

    Attributes:
        group_name: c10d name of their group.
        rank: this one's place among them.
        world_size: how many they are.
    """

    group_name: str
    rank: int
    world_size: int


def own_tokens(prompt: int, total: int, ranks: Ranks) -> tuple[range, ...]:
    """Return which of the first tokens a rank keeps, in the order of its slots.

    Args:
        prompt: how many tokens lie on the ranks as `Shard` cuts them.
        total: of how many tokens.
        ranks: of which one is this.
    """
    held, rank = shard_lengths(prompt, ranks.world_size), ranks.rank
    missing = [max(held) - count for count in held]
    start, refill = sum(held[:rank]), prompt + sum(missing[:rank])
    level = prompt + sum(missing)  # from here on, ranks hold equally many
    return (
        range(start, min(start + held[rank], total)),
        range(refill, min(refill + missing[rank], total)),
        range(level + rank, total, ranks.world_size),
    )


class SpreadLayer(CacheLayerMixin):
    """The keys and values of one layer that this rank keeps.

    Attributes:
        ranks: that share them.
        window: how many tokens the layer remembers; None is all.
        most: how many tokens there will be, if that is fixed.
        length: how many there were so far, a tensor if `most` is fixed.
        prompt: how many of these lie as `Shard` cuts them.
    """

    def __init__(self, ranks: Ranks, window: int | None, most: int | None) -> None:
        super().__init__()
        self.ranks, self.window, self.most = ranks, window, most
        self.is_sliding, self.is_compileable = window is not None, most is not None
        self.length: Any = 0
        self.prompt = self.slots = self.num_own = 0
        self.slot_of: Any = None  # of each token; `slots`, which nobody reads, of others'

    def number_slots(self, prompt: int, total: int, device: torch.device) -> None:
        """Say which slot each token has, before the first comes.

        Args:
            prompt: how many tokens come as `Shard` cuts them.
            total: how many there is to be room for, if that is not fixed.
            device: of the layer.
        """
        size = self.ranks.world_size
        self.prompt, self.device = prompt, device
        self.slots = -(-(self.window or self.most or total) // size)  # of a window: a ring
        if self.window is not None:
            return
        if self.most is None:
            self.slots += ROOM
        total = self.most or self.slots * size
        spans = own_tokens(prompt, total, self.ranks)
        parts = [torch.arange(s.start, max(s.start, s.stop), s.step, device=device) for s in spans]
        self.own = torch.cat(parts)
        self.num_own = len(self.own)
        self.slot_of = torch.full((total,), self.slots, device=device)
        self.slot_of[self.own] = torch.arange(self.num_own, device=device)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for the first tokens, given as `update` is."""
        self.dtype = key_states.dtype
        if not self.slots:
            count = key_states.shape[SEQUENCE_DIM]
            prompt = count if isinstance(key_states, DTensor) else 0
            self.number_slots(prompt, count, key_states.device)
        shape = (*key_states.shape[:SEQUENCE_DIM], self.slots + 1)
        self.keys, self.values = (
            torch.zeros((*shape, one.shape[-1]), dtype=one.dtype, device=self.device)
            for one in (key_states, value_states)
        )
        if self.most is not None:
            self.length = torch.zeros((), dtype=torch.int64, device=self.device)
            if not torch.compiler.is_compiling():
                for tensor in (self.keys, self.values, self.length):
                    torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep this rank's part of new tokens.

        Args:
            key_states, value_states: (B, G, S, D), (B, G, S, E): of a prompt, DTensors that are
                sharded along the sequence; of later tokens, the same on every rank.

        Returns:
            Of a prompt, the arguments. Later, this rank's keys and values, (B, G, T, D) and
            (B, G, T, E), the new ones included.
        """
        is_first = not self.is_initialized
        if is_first:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[SEQUENCE_DIM]
        if isinstance(key_states, DTensor) and isinstance(value_states, DTensor):
            if not is_first:
                _refuse_shards()
            # DTensor may have gathered them, where it has no rule.
            parts = [one.redistribute(placements=[Shard(2)]) for one in (key_states, value_states)]
            self._fill(parts[0].to_local(), parts[1].to_local(), count)
            self.length += count
            return parts[0], parts[1]
        self._append(key_states, value_states, count)
        self.length += count
        num_read = self._num_read(0)
        return self.keys[:, :, :num_read], self.values[:, :, :num_read]

    def _fill(self, keys: Tensor, values: Tensor, count: int) -> None:
        for held, part in ((self.keys, keys), (self.values, values)):
            if self.window is None:
                held[:, :, : part.shape[SEQUENCE_DIM]] = part
            else:
                self._fill_ring(held, part, count)

    def _fill_ring(self, held: Tensor, part: Tensor, count: int) -> None:
        """Take this rank's share of the last tokens of a prompt, which lie on the last ranks."""
        lengths, rank = shard_lengths(count, self.ranks.world_size), self.ranks.rank
        start, ring = sum(lengths[:rank]), self.slots * self.ranks.world_size
        first = max(0, count - ring)  # of the tokens that stay
        tail = part.new_zeros((*part.shape[:SEQUENCE_DIM], count - first, part.shape[-1]))
        if start + lengths[rank] > first:
            here = part[:, :, max(0, first - start) :]
            at = max(start, first) - first
            tail[:, :, at : at + here.shape[SEQUENCE_DIM]] = here
        tail = sum_over_ranks(tail, group_name=self.ranks.group_name)  # of one number, and zeros
        positions = torch.arange(first, count, device=self.device)
        held.index_copy_(SEQUENCE_DIM, self._slots_in_ring(positions), tail)

    def _append(self, keys: Tensor, values: Tensor, count: int) -> None:
        positions = torch.arange(count, device=self.device) + self.length
        if self.window is not None:
            if count > 1 and int(self.length) + count > self.slots * self.ranks.world_size:
                shortest = SHORTEST_SHARD * self.ranks.world_size
                remedies = (
                    f"generate from {shortest} tokens or more, or from no more than the window",
                    "generate from the whole conversation, with a new cache, and without"
                    " prefill_chunk_size",
                )
                raise UnsupportedAttention(
                    site=SITE,
                    expected=f"one new token at a time behind a window of {self.window}",
                    got=f"{count} tokens behind {int(self.length)}",
                    remedy=remedies[int(self.length) > 0],
                )
            slots = self._slots_in_ring(positions)
        else:
            if self.most is None and self.length + count > len(self.slot_of):
                self._grow(self.length + count)
            slots = self.slot_of.index_select(0, positions)
        self.keys.index_copy_(SEQUENCE_DIM, slots, keys)
        self.values.index_copy_(SEQUENCE_DIM, slots, values)

    def _grow(self, total: int) -> None:
        old = self.slots
        self.number_slots(self.prompt, total, self.device)
        self.keys, self.values = (self._with_room(held, old) for held in (self.keys, self.values))

    def _with_room(self, held: Tensor, old: int) -> Tensor:
        wider = held.new_zeros((*held.shape[:SEQUENCE_DIM], self.slots + 1, held.shape[-1]))
        wider[:, :, :old] = held[:, :, :old]
        return wider

    def _slots_in_ring(self, positions: Tensor) -> Tensor:
        size = self.ranks.world_size
        slots = positions % (self.slots * size) // size
        return slots.masked_fill(positions % size != self.ranks.rank, self.slots)

    def _num_read(self, count: int) -> int:
        """Return how many slots are read once there are `count` more tokens."""
        if self.window is not None:
            return self.slots
        if self.most is not None:
            return self.num_own
        return sum(map(len, own_tokens(self.prompt, self.length + count, self.ranks)))

    def tokens_read(self, count: int) -> tuple[Tensor, Tensor | None]:
        """Return the tokens in the slots that are read once there are `count` more tokens.

        Returns:
            Their positions (T,), and which of these slots hold a token, (T,); None if all do.
        """
        if self.window is None:
            return self.own[: self._num_read(count)], None
        size, last = self.ranks.world_size, self.length + count - 1
        slots = torch.arange(self.slots, device=self.device) * size + self.ranks.rank
        positions = last - (last - slots) % (self.slots * size)
        return positions.clamp(min=0), positions >= 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there will be on all ranks, and the first of them."""
        if self.is_initialized and self.most is not None:
            return self.most, 0
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> Any:
        """Return how many tokens there were so far, on all ranks."""
        return self.length if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return how many tokens there may be; -1 for any number."""
        return -1 if self.most is None else self.most

    def reset(self) -> None:
        """Forget all tokens."""
        self.__dict__.update(keys=None, values=None)
        self.slot_of = None
        self.is_initialized, self.length, self.slots = False, 0, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let each row go on from another's tokens."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch."""
        if self.is_initialized:
            self.keys = self.keys.index_select(0, indices.to(self.device))
            self.values = self.values.index_select(0, indices.to(self.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch."""
        if self.is_initialized:
            self.keys = self.keys.repeat_interleave(repeats, 0)
            self.values = self.values.repeat_interleave(repeats, 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to forget the last tokens."""
        raise UnsupportedAttention(
            site=SITE,
            expected="tokens that stay, once they are generated",
            got=f"crop({tokens_to_remove}), as assisted generation calls it",
            remedy="generate greedily, by sampling, or with beams",
        )


# Dynamo calls it while it traces, and raises what it raises.
@torch.compiler.assume_constant_result
def _refuse_shards() -> None:
    raise UnsupportedAttention(
        site=SITE,
        expected="a sharded prompt in an empty cache, or tokens of generate behind one",
        got="DTensors in a cache that generate has filled",
        remedy="generate from the whole conversation with a new cache; or give this cache to"
        " generate, as past_key_values",
    )


def spread(cache: Cache, ranks: Ranks) -> None:
    """Let the layers of an empty cache keep keys on all ranks, in place.

    Raises:
        UnsupportedAttention: it is filled, offloaded, or has layers of another kind.
    """
    found = [_spread(layer, ranks) for layer in cache.layers]
    is_lazy = not found and cache.layer_class_to_replicate is DynamicLayer
    is_full = any(layer.get_seq_length() for layer in cache.layers if _is_of_keys(layer))
    if cache.offloading or is_full or None in found or not (found or is_lazy):
        kinds = sorted({type(layer).__name__ for layer in cache.layers}) or ["no layers"]
        state = "offloaded" if cache.offloading else "filled" if is_full else "empty"
        raise UnsupportedAttention(
            site=SITE,
            expected="an empty DynamicCache or StaticCache, neither quantized nor offloaded",
            got=f"a {state} {type(cache).__name__} of {', '.join(kinds)}",
            remedy="leave past_key_values and cache_implementation out, or set the latter to"
            " 'static'",
        )
    if is_lazy:
        cache.layer_class_to_replicate = partial(SpreadLayer, ranks, None, None)
    cache.layers = found


def can_spread(cache: Cache) -> bool:
    """Whether keys of all layers of a cache can be kept on all ranks."""
    ranks = Ranks("", 0, 1)
    return all(_spread(layer, ranks) is not None for layer in cache.layers)


def _is_of_keys(layer: Any) -> bool:
    return isinstance(layer, CacheLayerMixin)


def _spread(layer: Any, ranks: Ranks) -> Any:
    kind = type(layer)
    if kind is LinearAttentionLayer:
        return layer  # a state, the same on every rank
    if kind not in (*GROWING, *FIXED):
        return None
    window = getattr(layer, "sliding_window", None)
    if kind is StaticSlidingWindowLayer:
        window = layer.max_cache_len
    return SpreadLayer(ranks, window, layer.max_cache_len if kind in FIXED else None)
