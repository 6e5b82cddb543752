"""Rehearse a model that a function makes; print the report.

    python -m tests.rehearsal model.py:build --world-size 4
    python -m tests.rehearsal package.module:build --world-size 2 --target cuda:h200

`build(mesh)` or `build()` returns (model, args), optionally followed by kwargs and options. The
exit code is 0 if nothing was found and all numbers are near those of one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cp_inductor.errors import CPError
from tests.rehearsal.rank import Job
from tests.rehearsal.rehearse import rehearse


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal", description=__doc__)
    parser.add_argument("model", help="module:function or file.py:function")
    parser.add_argument("--world-size", type=int, required=True, help="number of ranks")
    parser.add_argument("--target", default="cuda:sm_90", help="cuda:sm_90, cuda:h200, ...")
    args = parser.parse_args(arguments)
    job = Job(named=args.model, world_size=args.world_size, target=args.target)
    try:
        report = rehearse(job).report
    except CPError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0 if report.is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
