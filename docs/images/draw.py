"""Draw the pictures of README.md and of the pages: python docs/images/draw.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.packed import pack  # noqa: E402
from cp_inductor.mask.rule import Rule  # noqa: E402
from cp_inductor.plan import plan_attention  # noqa: E402
from cp_inductor.plan.batch import plan_batch  # noqa: E402

SIZES = {"num_heads": 32, "head_dim": 128}
DOCUMENTS = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"


def main(folder: Path = HERE) -> None:
    """Write all pictures to a folder."""
    plan_attention(seq_len=16384, world_size=4, strategy="blocks", **SIZES).draw(
        folder / "plan.svg"
    )
    plan_attention(seq_len=32768, world_size=8, strategy="heads4+blocks", **SIZES).draw(
        folder / "heads.svg"
    )
    ranks, tokens = 4, 8192
    lengths = pack("long", ranks * tokens, 1)
    plan_batch(
        Rule.parse(DOCUMENTS),
        {0: np.repeat(np.arange(len(lengths)), lengths)[None]},
        batch=1,
        query_lengths=[tokens] * ranks,
        key_lengths=[tokens] * ranks,
        num_heads=32,
        num_kv_heads=8,
        stages=2,
    ).draw(folder / "batch.png")


if __name__ == "__main__":
    main()
