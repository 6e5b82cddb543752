"""Packed batches: fill them up to a few lengths, so that few graphs are compiled; number documents.

    input_ids     (1, 301)    =>  (1, 320)   19 x pad_token_id
    labels        (1, 301)    =>  (1, 320)   19 x -100
    position_ids  (1, 301)    =>  (1, 320)   19 x 0: each token is a document of its own
    cu_seqlens 0 3 3 7, T = 9   =>  0 0 0 2 2 2 2 3 3

Padding changes no loss and no gradient: no other token attends to it, and it has no label. If the
plan is made for each batch, attention computes next to nothing for it: one pair per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cp_inductor.errors import InvalidArgument

IGNORED_LABEL = -100
# Capacities between two powers of two. The longest padding is 1 / (PARTS + 1) of a batch.
PARTS = 4
LEAST = 64
# Usual names of inputs: those that tell documents apart, those that are padded with one number, and
# those that are padded with new numbers.
_TELL_APART = ("position_ids", "seq_idx", "document_ids", "attention_mask")
_FIXED = {"labels": IGNORED_LABEL, "position_ids": 0, "attention_mask": 0}
NUMBERED = ("seq_idx", "document_ids")


def capacity_of(length: int) -> int:
    """Return the length that a batch of `length` tokens is filled up to, at least `length`.

    Powers of two, at least 64, and three lengths between each two of them.
    """
    if length <= LEAST:
        return LEAST
    power: int = 1 << ((length - 1).bit_length() - 1)
    step = power // PARTS
    return -(-length // step) * step


def pad_packed(
    batch: Mapping[str, Any],
    length: int | None = None,
    *,
    pad_token_id: int = 0,
    values: Mapping[str, int | float] | None = None,
) -> dict[str, Any]:
    """Fill a packed batch up at its end.

    Args:
        batch: the inputs of the model by name, before they are sharded. Tensors (B, S) are filled
            up, S as in `input_ids`; everything else is left as it is. Labels are filled with -100,
            positions with 0, which begins a document for each token, `attention_mask` with 0,
            document numbers with new numbers.
        length: to fill up to, in tokens. None chooses the next length of `capacity_of`: lengths
            from 256 to 131,072 then compile 37 graphs.
        pad_token_id: for `input_ids`.
        values: for tensors of other names.

    Returns:
        The batch, filled up; tensors that need no filling are the same.

    Raises:
        InvalidArgument: it is longer than `length`; it holds a (B, S) tensor of an unknown name;
            it holds boundaries of sequences, which would have to count the padding; or nothing in
            it tells documents apart, so that tokens would attend to the padding.
    """
    given = {**_FIXED, "input_ids": pad_token_id, **(values or {})}
    if not isinstance(batch, Mapping):
        raise _refusal("inputs by name", _kind(batch), "give a dict, as in {'input_ids': ids}")
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise _refusal("input_ids of shape (B, S)", _kind(tokens), "name the tokens so")
    shape = tokens.shape
    target = capacity_of(shape[1]) if length is None else length
    missing = target - shape[1]
    if missing < 0:
        got = f"{shape[1]} tokens"
        raise _refusal(f"at most length={length} tokens", got, "give a greater length, or None")
    bounds = [name for name in batch if name.startswith(("cu_seq", "max_length"))]
    if bounds:
        remedy = "give position_ids, which begin at 0 in each document, and leave these out"
        raise _refusal("documents by numbers or positions", ", ".join(bounds), remedy)
    if not any(isinstance(batch.get(name), Tensor) for name in (*_TELL_APART, *(values or {}))):
        remedy = "give position_ids; of one document per entry, torch.arange(S)"
        raise _refusal(f"one of {', '.join(_TELL_APART)}", ", ".join(batch), remedy)
    filled = dict(batch)
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor) or tensor.shape != shape or not missing:
            continue
        if name in given:
            end = tensor.new_full((shape[0], missing), given[name])
        elif name in NUMBERED:
            numbers = torch.arange(1, missing + 1, dtype=tensor.dtype, device=tensor.device)
            end = tensor.amax(1, keepdim=True) + numbers
        else:
            remedy = f"say what fills it up: values={{{name!r}: ...}}"
            raise _refusal("tensors that are known by name", name, remedy)
        filled[name] = torch.cat([tensor, end], 1)
    return filled


def document_numbers(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the number of each token's document, (T,) int64, the same on all ranks.

    Args:
        cu_seqlens: (N + 1,), where each document begins, and where the last ends; the same on all
            ranks, or a DTensor.
        length: T, tokens of the whole sequence. Those behind the last document are one more.
    """
    whole = cu_seqlens.full_tensor() if isinstance(cu_seqlens, DTensor) else cu_seqlens
    positions = torch.arange(length, device=whole.device, dtype=whole.dtype)
    return torch.searchsorted(whole[1:].contiguous(), positions, right=True)


def _refusal(expected: str, got: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(site="pad_packed", expected=expected, got=got, remedy=remedy)


def _kind(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
