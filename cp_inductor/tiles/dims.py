"""The dims of query, key, value and out: (B, H, S, D)."""

from __future__ import annotations

BATCH_DIM, HEADS_DIM, SEQUENCE_DIM = 0, 1, 2
