"""Attention on two "nodes": plans for nodes beside plans that know none, causal and packed.

    python benchmarks/node_steps.py                  2 nodes of 2 ranks, 200 Mbit/s between them

Each node is a network namespace; ranks of one talk over its loopback, and the nodes over a pair of
virtual interfaces behind a token bucket in each direction. Forward and backward of one attention,
eager, in float32; all plans take turns, in one run: of packed documents, of which both plans take
the same batches, and causal, where "auto" chooses for one level of links and for two.

step s     median of the batches, of the slowest rank
between    MB that crossed between the nodes in both directions, by the interface's own counters,
           mean per step
balance    the busiest rank's work over the mean, mean of the batches

Prints a table and, as its last line, one JSON object. Needs Linux with `unshare`, `ip` and `tc`,
and root.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tabulate import tabulate

from benchmarks.packed import KINDS, pack
from cp_inductor.batches.plans import batch_plans
from cp_inductor.ops.attention import attention
from cp_inductor.ops.plan_batch import plan_batch
from cp_inductor.plan import Machine, Recipe, forward_plan, resolve
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.run.attention import ANY_RANK, Attention, PerBatch

INSIDE = "NODE_STEPS_NAMESPACE"
RULE = "(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)"
NODES, SIZE, HEADS, HEAD_DIM = 2, 2, (8, 4), 64
STAGES = 2
MACHINES = {
    "flat": "cpu[hidden=0,at_once=2]:tcp",
    "nodes": f"{SIZE}xcpu[hidden=0,at_once=2]:tcp x {NODES}:tcp[bytes_per_s={{}}]",
}


def shell(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_nodes(rate: str) -> None:
    """Make two namespaces that are joined by a slow link."""
    shell("mount -t tmpfs none /run && mkdir -p /run/netns")
    for node in range(NODES):
        shell(f"ip netns add node{node}; ip -n node{node} link set lo up")
    shell("ip -n node0 link add link0 type veth peer name link1 netns node1")
    for node in range(NODES):
        inside = f"ip -n node{node}"
        shell(f"{inside} addr add 10.0.0.{node + 1}/24 dev link{node}")
        shell(f"{inside} link set link{node} up")
        bucket = f"tbf rate {rate} burst 256kb limit 256mb"
        shell(f"tc -n node{node} qdisc add dev link{node} root {bucket}")


def bits_per_s(rate: str) -> float:
    """Return a rate as tc reads it, such as 200mbit."""
    return float(rate.removesuffix("mbit")) * 1e6


def bytes_between() -> int:
    """Return what has crossed the link, as its end in this namespace counts it."""
    (link,) = json.loads(shell("ip -j -s link show link0"))
    return sum(link["stats64"][way]["bytes"] for way in ("rx", "tx"))


def run_rank(rank: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NODES * SIZE)
    dist.init_process_group("gloo", rank=rank, world_size=NODES * SIZE, store=store)
    name = dist.group.WORLD.group_name
    length = args.tokens * NODES * SIZE
    generator = torch.Generator().manual_seed(rank)
    shapes = [(1, heads, args.tokens, HEAD_DIM) for heads in (*HEADS, HEADS[1], HEADS[0])]
    query, key, value, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    leaves = [one.requires_grad_() for one in (query, key, value)]
    rows: dict[str, dict[str, list[float]]] = {}

    def run(name: str, balance: float, this: Attention, extras: list[torch.Tensor]) -> None:
        """Make a step, and note it, unless it is the first of its name."""
        dist.barrier()
        before, start = bytes_between() if rank == 0 else 0, time.perf_counter()
        out = attention(*leaves, extras, *this.arguments)[0]
        torch.autograd.grad(out, leaves, grad)
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if rank == 0 and name not in rows:
            rows[name] = {"step s": [], "between": [], "balance": []}
        elif rank == 0:
            rows[name]["step s"].append(float(seconds))
            rows[name]["between"].append((bytes_between() - before) / 1e6)
            rows[name]["balance"].append(balance)

    whole = Recipe(NODES * SIZE, length, length, *HEADS, HEAD_DIM, 4, "causal")
    bytes_per_s = bits_per_s(args.rate) / 8 / SIZE
    machines = {plan: Machine.parse(text.format(bytes_per_s)) for plan, text in MACHINES.items()}
    for number in range(args.steps + 1):
        lengths = pack(args.documents, length, number, args.scale)
        table = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)[None].copy())
        for plan, machine in machines.items():
            nodes = Nodes.of(machine, NODES * SIZE, whole.shape)
            nodes = nodes.format() if nodes else ""
            where = (torch.device("cpu"), name)
            found = plan_batch(
                [table], RULE, 1, length, length, *HEADS, STAGES, *where, nodes=nodes
            )
            this = Attention(PerBatch(RULE, STAGES, nodes), ANY_RANK, None, "flash_cpu", name)
            run(f"packed, {plan}", batch_plans()[-1].balance, this, [table, *found])
        for plan, machine in machines.items():
            recipe = resolve(whole, site=plan, machine=machine)
            this = Attention(recipe, rank, None, "flash_cpu", name)
            balance = forward_plan(recipe).balance
            run(f"causal, {plan}: {recipe.strategy}, {recipe.stages}", balance, this, [])
    if rank == 0:
        Path(f"{folder}/rows").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def summarize(rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "plan": plan,
            "step s": statistics.median(of["step s"]),
            "between": statistics.mean(of["between"]),
            "balance": statistics.mean(of["balance"]),
        }
        for plan, of in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of one rank")
    parser.add_argument("--documents", choices=[*KINDS], default="short")
    parser.add_argument("--scale", type=float, default=0.25, help="of the documents' lengths")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rate", default="200mbit", help="in mbit")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.folder, args)
        return
    if INSIDE not in os.environ:
        command = ["unshare", "--net", "--mount", sys.executable, *sys.argv]
        os.execvpe("unshare", command, {**os.environ, INSIDE: "1"})
    make_nodes(args.rate)
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(NODES * SIZE):
            node = rank // SIZE
            command = ["ip", "netns", "exec", f"node{node}", sys.executable, *sys.argv]
            command += ["--rank", str(rank), "--folder", folder]
            interface = {"GLOO_SOCKET_IFNAME": f"link{node}"}
            ranks.append(subprocess.Popen(command, env={**os.environ, **interface}))
        codes = [process.wait() for process in ranks]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        batches = json.loads(Path(f"{folder}/rows").read_text())
    rows = summarize(batches)
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"))
    about = {"date": time.strftime("%Y-%m-%d"), "cp_inductor": version("cp_inductor")}
    about |= {"torch": torch.__version__, "python": platform.python_version()}
    print("\n" + json.dumps({**about, "arguments": vars(args), "rows": rows, "batches": batches}))


if __name__ == "__main__":
    main()
