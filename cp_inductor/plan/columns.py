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
