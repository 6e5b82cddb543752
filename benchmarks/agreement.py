"""What it costs that ranks compare what they run: the first time, when lengths change, and else.

    python benchmarks/agreement.py
    python benchmarks/agreement.py --ranks 2 4 8 --layers 32

Processes on this machine, with a TCPStore, whose ranks come at the same time. Microseconds of a
call, the slowest rank's median: "the same" is an attention that was agreed on, which is noted for
the thread that compares the ranks' ways; "changed" is one whose length has changed, which all ranks
compare; "a graph" is a compiled graph of some layers in which nothing, or every length, has
changed; "tables" is the digest of the document ids of one attention and its comparison, and "no
tables" the op that a compiled graph has for them where they are not compared.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parents[1]))

from cp_inductor.plan import Recipe, resolve
from cp_inductor.run.attention import Attention
from cp_inductor.trust import agreement, graph_agreement
from cp_inductor.trust.course import FIRST_EVENTS

CASES = ("the same", "changed", "a graph, the same", "a graph, changed", "tables", "no tables")


def attention_of(rank: int, world_size: int, per_rank: int) -> Attention:
    """Return a causal attention, all of whose plans are known afterwards."""
    length = per_rank * world_size
    recipe = Recipe(world_size, length, length, 32, 8, 128, 2, "causal", strategy="rows", stages=1)
    return Attention(resolve(recipe, site="a benchmark"), rank, None, "flash_cpu", "0")


def measure(run: Callable[[int], None], repetitions: int) -> float:
    """Return microseconds of a call, the median; ranks start together."""
    spent = []
    for index in range(repetitions):
        dist.barrier()
        start = time.perf_counter()
        run(index)
        spent.append(time.perf_counter() - start)
    return 1e6 * statistics.median(spent)


def run_rank(rank: int, args: argparse.Namespace, world_size: int, port: int) -> None:
    """Measure as one rank; rank 0 prints what the slowest of each took."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    attentions = [attention_of(rank, world_size, per_rank) for per_rank in (128, 160)]
    shards = [torch.empty(1, 32, per_rank, 128) for per_rank in (128, 160)]
    ids = torch.zeros(1, args.tokens, dtype=torch.int64)
    graphs = [
        graph_agreement.agreed_graph(
            [graph_agreement.Planned(one, torch.float32, (1, 128 + 32 * i, 128 + 32 * i), "here")]
            * args.layers,
            (),
            "gpu:ib400",
            is_whole=True,
            shards={},
        )
        for i, one in enumerate(attentions)
    ]

    def attend(place: int) -> None:
        with agreement.agreed(attentions[place], shards[place], shards[place], site="here"):
            pass

    def call(place: int) -> None:
        with graphs[place](()):
            pass

    note = partial(agreement.NOTE_TABLES, torch.empty(1), [ids], "a kind", "here", False, "0")

    def compare_tables(_: int) -> None:
        agreement.agreed_of("0").num_runs.clear()  # type: ignore[union-attr]
        with graphs[0](()):
            note()

    def pass_over_tables(_: int) -> None:
        note()

    for run in (attend, call):  # plans, and what else is made once
        run(0), run(1), run(0)
    for _ in range(FIRST_EVENTS):  # the first attentions are waited for
        attend(0)
    spent = {
        "the same": measure(lambda _: attend(0), args.repetitions),
        "changed": measure(lambda index: attend((index + 1) % 2), args.repetitions),
        "a graph, the same": measure(lambda _: call(0), args.repetitions),
        "a graph, changed": measure(lambda index: call((index + 1) % 2), args.repetitions),
    }
    call(0)
    spent["tables"] = measure(compare_tables, args.repetitions)
    with mock.patch.object(agreement, "FIRST_RUNS", 0):
        spent["no tables"] = measure(pass_over_tables, args.repetitions)
    slowest = torch.tensor([spent[name] for name in CASES])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps(dict(zip(CASES, slowest.tolist(), strict=True))), file=args.out.open("w"))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=131072, help="document ids")
    parser.add_argument("--repetitions", type=int, default=200)
    args = parser.parse_args()
    figures = {}
    for world_size in args.ranks:
        args.out = Path(f"/tmp/agreement_{free_port()}.json")
        mp.spawn(run_rank, (args, world_size, free_port()), nprocs=world_size)
        figures[world_size] = json.loads(args.out.read_text())
        args.out.unlink()
    rows = [[size, *(f"{spent[name]:.0f}" for name in CASES)] for size, spent in figures.items()]
    print(tabulate(rows, ["ranks", *(f"{name} us" for name in CASES)]))
    print(
        json.dumps(
            {
                "figures": figures,
                "layers": args.layers,
                "tokens": args.tokens,
                "torch": torch.__version__,
                "machine": platform.processor() or platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
