"""Refuse ids that a model has no row for, on all ranks, before one of them alone fails.

    ids 5 70 9 | 3 1 2, a vocabulary of 64       the first rank: IndexError; the others wait for it
      => InvalidArgument on every rank

A rank looks up its own tokens, so ids that are out of range would stop that rank in the embedding,
and the others in the next exchange.

Assumes: plain ids are the same on every rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cp_inductor.errors import InvalidArgument


def check_ids(ids: Tensor, model: Any, site: str) -> None:
    """Refuse ids beyond a model's embedding; a model with an embedding of its own kind takes all.

    It waits for the device once. If the ids are a DTensor, it costs an exchange of one number.

    Raises:
        InvalidArgument: some ids are negative, or too large.
    """
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        # The weight is not read: it may be gathered where it is.
        check_rows(ids, embedding.num_embeddings, site, f"ids of {type(model).__name__}")


def check_rows(ids: Tensor, num_rows: int, site: str, what: str) -> None:
    """Refuse ids that are not from 0 to num_rows - 1, on every rank that has the tensor."""
    beyond: Tensor = ((ids < 0) | (ids >= num_rows)).sum()
    number = int(beyond.full_tensor() if isinstance(beyond, DTensor) else beyond)
    if not number:
        return
    whole = ids.full_tensor() if isinstance(ids, DTensor) else ids
    first = int(whole[(whole < 0) | (whole >= num_rows)][0])
    raise InvalidArgument(
        site=site,
        expected=f"{what} from 0 to {num_rows - 1}",
        got=f"{number} others, the first of which is {first}",
        remedy="tokenize for this model; if you have added tokens, call"
        " model.resize_token_embeddings before distribute",
    )
