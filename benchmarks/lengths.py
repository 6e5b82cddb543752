"""Lengths that change: graphs, seconds to compile them, and to read a mask at a new length.

    python benchmarks/lengths.py --lengths 96 97 128 301 512 --layers 2

A Llama of transformers on packed documents, forward and backward, as one rank of two under a fake
process group, through cp_aot_eager: once with a graph for each length, once with symbols. Seconds
are of the process's CPU, for all lengths together; what is read at a new length is timed alone.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def run_lengths(args: argparse.Namespace, is_dynamic: bool) -> dict[str, Any]:
    """Train one step of each length in this process."""
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    import cp_inductor  # noqa: F401
    from cp_inductor.ops import plan_batch as plan_op
    from tests.support.models import make
    from tests.support.packed import make_batch
    from tests.support.ranks import fake_rank

    read_s = []

    def check_lengths(*args: Any) -> None:
        started = time.process_time()
        check(*args)
        read_s.append(time.process_time() - started)

    check, plan_op.check_lengths = plan_op.check_lengths, check_lengths
    with fake_rank(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        sizes = {"num_hidden_layers": args.layers, "max_position_embeddings": 512}
        model = make("Llama", **sizes)
        compiled = torch.compile(model, backend="cp_aot_eager", fullgraph=True, dynamic=False)
        seconds = []
        for step, length in enumerate(args.lengths):
            batch = make_batch(step, length)
            sharded = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in batch.items()}
            for tensor in sharded.values() if is_dynamic else ():
                torch._dynamo.mark_dynamic(tensor, 1)
            started = time.process_time()
            with implicit_replication():
                compiled(**sharded, use_cache=False).loss.backward()
            seconds.append(time.process_time() - started)
    return {
        "lengths": "symbols" if is_dynamic else "numbers",
        "graphs": counters["stats"]["unique_graphs"],
        "first_s": seconds[0],
        "total_s": sum(seconds),
        # The first lengths of a graph need no reading.
        "read_s": statistics.median(read_s[2:]) if len(read_s) > 2 else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[96, 97, 128, 301, 512, 411])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kind", choices=("numbers", "symbols"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kind is not None:
        print(json.dumps(run_lengths(args, args.kind == "symbols")))
        return
    rows = []
    for kind in ("numbers", "symbols"):
        command = [sys.executable, __file__, *sys.argv[1:], "--kind", kind]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(out.splitlines()[-1]))
    print(tabulate(rows, headers="keys", floatfmt=".2f"))
    about = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"benchmark": "lengths", **vars(args), **about, "rows": rows}))


if __name__ == "__main__":
    main()
