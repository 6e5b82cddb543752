"""Rehearse a model that a function makes; print the report.

    python -m tests.rehearsal model.py:build --world-size 4
    python -m tests.rehearsal package.module:build --world-size 2 --target cuda:h200

`build(mesh)` returns (model, args), optionally followed by kwargs and options; args are DTensors.
The exit code is 0 if nothing was found and all numbers are near those of one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tests.rehearsal.rank import Job
from tests.rehearsal.rehearse import rehearse
from tests.support.ranks import RankError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__)
    parser.add_argument("model", help="module:function or file.py:function")
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--target", default="cuda:sm_90", help="cuda:sm_90, cuda:h200, ...")
    args = parser.parse_args(arguments)
    try:
        job = Job(named=args.model, world_size=args.world_size, target=args.target)
        report = rehearse(job).report
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    print(report)
    return 0 if report.is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
