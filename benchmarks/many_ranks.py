"""Compile one block on every rank of a large world, a process each, and compare the collectives.

    python benchmarks/many_ranks.py                            all of 64 ranks, two at a time
    python benchmarks/many_ranks.py --ranks 0 1 31 32 63       some of them

Each process is an interpreter of its own, with another seed of its hashes, in a process group that
moves nothing. It plans and compiles a small transformer block over DTensors with cp_aot_eager,
forward and backward, and says which collectives its graphs issue, in their order. These must be as
many on all ranks, of the same kinds on the same groups; and in each all-to-all a rank must send
another as much as that receives from it. Printed are the disagreements, the most memory of a
process and its time; the command ends with 1 if there is any disagreement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests: a fake process group, and graphs

TOKENS, HEADS, DIM = 4, 4, 32
KINDS = ("forward", "backward")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.project = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.project(self.norm(x)).unflatten(-1, (3, HEADS, DIM // HEADS))
        query, key, value = pieces.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return (x + self.mlp(x)).square().mean()


def be_rank(rank: int, world_size: int, strategy: str, stages: int) -> dict[str, Any]:
    """Compile the block as one rank; return its collectives, and what it has cost."""
    import cp_inductor
    from tests.support.graphs import collectives_of, lowered_graphs
    from tests.support.ranks import fake_rank

    start = time.process_time()
    with fake_rank(rank, world_size):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
        model = cp_inductor.distribute(Block(), mesh)
        x = distribute_tensor(torch.randn(1, TOKENS * world_size, DIM), mesh, [Shard(1)])
        graphs = lowered_graphs(model, x, options={"strategy": strategy, "stages": stages})
    return {
        **{kind: collectives_of(graphs[kind]) for kind in KINDS},
        "seconds": time.process_time() - start,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def start_rank(rank: int, given: argparse.Namespace) -> dict[str, Any]:
    """Be a rank in a process of its own."""
    command = [sys.executable, __file__, "--be-rank", str(rank)]
    command += ["--world-size", str(given.world_size)]
    command += ["--strategy", given.strategy, "--stages", str(given.stages)]
    environment = {**os.environ, "PYTHONHASHSEED": str(rank + 1), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"rank {rank} ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--ranks", type=int, nargs="+", help="all, if not given")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--strategy", default="blocks")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--be-rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.be_rank is not None:
        found = be_rank(given.be_rank, given.world_size, given.strategy, given.stages)
        print(json.dumps(found))
        return
    from tests.support.graphs import disagreements

    ranks: Sequence[int] = given.ranks or range(given.world_size)
    started = time.monotonic()
    with ThreadPoolExecutor(given.at_once) as pool:
        results = list(pool.map(lambda rank: start_rank(rank, given), ranks))
    told = [
        f"{kind}: {text}"
        for kind in KINDS
        for text in disagreements(dict(zip(ranks, (one[kind] for one in results), strict=True)))
    ]
    print(*told, sep="\n", end="\n" * bool(told))
    counts = ", ".join(f"{len(results[0][kind])} {kind}" for kind in KINDS)
    seconds = [one["seconds"] for one in results]
    peak_mib, whole_s = max(one["peak_mib"] for one in results), time.monotonic() - started
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores")
    print(
        f"{len(results)} of {given.world_size} ranks, strategy {given.strategy}, {given.stages}"
        f" stages: {len(told)} disagreements in collectives: {counts}"
    )
    print(
        f"a process: at most {peak_mib:.0f} MiB, {min(seconds):.1f} to {max(seconds):.1f} CPU"
        f" seconds to plan and compile; all, {given.at_once} at a time: {whole_s:.0f} s"
    )
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
