"""Transfers as columns of integers, in which all of an exchange is counted and checked at once.

    kv[1:2] h[0:4] 0 -> 1   =>   0  1  1  2  1  0  4      source, destination, span, payload, heads

A plan of a thousand ranks has half a million transfers. The columns stand in the order in which
transfers are sorted within an exchange (`transfers.message_order`).
"""

from __future__ import annotations

import numpy as np

SOURCE, DESTINATION, START, STOP, PAYLOAD, FIRST_HEAD, LAST_HEAD = range(7)


def are_in_order(columns: np.ndarray) -> bool:
    """Whether every transfer comes after the one before it in the order of messages."""
    steps = np.diff(columns[:, :LAST_HEAD], axis=0)
    if not len(steps):
        return True
    first = (steps != 0).argmax(1)
    return bool((steps[np.arange(len(steps)), first] > 0).all())


def cells_of_columns(columns: np.ndarray, end: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the chunks and heads of transfers as places in a table (rank, chunk, head).

    Args:
        columns: of transfers.
        end: SOURCE or DESTINATION, whose place is meant.
        shape: of the table.
    """
    heads = columns[:, LAST_HEAD] - columns[:, FIRST_HEAD]
    counts = (columns[:, STOP] - columns[:, START]) * heads
    of = np.repeat(np.arange(len(columns)), counts)
    at = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk = columns[of, START] + at // heads[of]
    head = columns[of, FIRST_HEAD] + at % heads[of]
    return np.ravel_multi_index((columns[of, end], chunk, head), shape)
