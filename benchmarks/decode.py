"""What generation over a sharded prompt costs, beside one process that holds the whole cache.

    python benchmarks/decode.py
    python benchmarks/decode.py --tokens 32768 131072 --prefill 16384 32768

A Llama with random weights, on CPUs. Ranks and the one process have a thread each, so a rank stands
for a device. One process and the ranks take turns, one run of each after the other, so that all see
the same machine; times are the least of the repetitions, ratios are of one run of this script. CPU
seconds are those of the first rank, all its threads; they do not depend on who else uses the
machine.

* decode: `generate` goes on behind a cache that was filled with random keys. A step is a new token,
  with a DynamicCache and with a StaticCache.
* memory: the bytes of the cache's tensors on a rank.
* traffic: bytes that a rank sends per new token and layer, counted from the collectives that run.
* prefill: `generate` of one token behind a prompt.

Prints tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from tabulate import tabulate
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache, DynamicCache, StaticCache

sys.path.insert(0, str(Path(__file__).parents[1]))

import cp_inductor
from cp_inductor.integrations.spread_cache import Ranks, SpreadLayer, spread

NEW = 8  # tokens that are generated for one time
KINDS = ("dynamic", "static")


def make_model(args: argparse.Namespace, most: int) -> Any:
    """Return a Llama with random weights, the same on every rank."""
    torch.manual_seed(0)
    width = args.heads * args.head_dim
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=most,
    )
    return transformers.LlamaForCausalLM(config).eval()


def filled(model: Any, tokens: int, kind: str, ranks: Ranks | None) -> Cache:
    """Return a cache of random keys, this rank's part of it if ranks share it."""
    config = model.config
    most = tokens + NEW + 1
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config, most)
    count = tokens
    if ranks is not None:
        spread(cache, ranks)
    for layer in cache.layers:
        if isinstance(layer, SpreadLayer):
            layer.number_slots(tokens, tokens, torch.device("cpu"))
            count = int((layer.own < tokens).sum())
        shape = (1, config.num_key_value_heads, count, config.head_dim)
        keys, values = torch.randn(shape), torch.randn(shape)
        if isinstance(layer, SpreadLayer):
            layer.lazy_initialization(keys, values)
            layer.keys[:, :, :count], layer.values[:, :, :count] = keys, values
            layer.length += tokens
        else:
            layer.update(keys, values)
    return cache


def num_bytes(cache: Cache) -> int:
    """Return the bytes of keys and values."""
    return sum(one.nbytes for layer in cache.layers for one in (layer.keys, layer.values))


class Cost(NamedTuple):
    """Seconds, CPU seconds, and the bytes of a cache."""

    wall_s: float
    cpu_s: float
    held_bytes: int = 0

    def least(self, other: Cost) -> Cost:
        """Return the less of each."""
        return Cost(*map(min, self, other))


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_wait = func is torch.ops._c10d_functional.wait_tensor.default
        if func.namespace in ("_c10d_functional", "c10d") and not is_wait:
            self.num_bytes += sum(one.nbytes for one in args if isinstance(one, Tensor))
        return func(*args, **(kwargs or {}))


def decode(model: Any, tokens: int, kind: str, ranks: Ranks | None) -> Cost:
    """Return what a new token costs behind so many, and the bytes of the cache."""
    cache = filled(model, tokens, kind, ranks)
    ids = torch.ones(1, tokens + 1, dtype=torch.int64)
    times: list[tuple[float, float]] = []

    class Clock(transformers.StoppingCriteria):
        def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
            times.append((time.perf_counter(), time.process_time()))
            return torch.zeros(1, dtype=torch.bool)

    model.generate(
        ids, past_key_values=cache, max_new_tokens=NEW, stopping_criteria=[Clock()], **HOW
    )
    wall_s, cpu_s = (min(late[at] - early[at] for early, late in pairwise(times)) for at in (0, 1))
    return Cost(wall_s, cpu_s, num_bytes(cache))


HOW: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prefill(model: Any, tokens: int) -> Cost:
    """Return what a prompt and the first token behind it cost."""
    ids = torch.ones(1, tokens, dtype=torch.int64)
    start, start_cpu = time.perf_counter(), time.process_time()
    model.generate(ids, max_new_tokens=1, **HOW)
    return Cost(time.perf_counter() - start, time.process_time() - start_cpu)


def run_rank(rank: int, args: argparse.Namespace, port: int) -> None:
    """Measure as one rank. The first also plays the one process, while the others wait."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    store = dist.TCPStore("127.0.0.1", port, args.ranks, is_master=rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks, store=store)
    mesh = init_device_mesh("cpu", (args.ranks,), mesh_dim_names=("cp",))
    most = max(*args.tokens, *args.prefill) + NEW + 1
    alone = make_model(args, most)
    model = cp_inductor.distribute(make_model(args, most), mesh)
    ranks = Ranks(mesh.get_group().group_name, rank, args.ranks)
    found: dict[str, Any] = {"decode": [], "prefill": []}
    players = (("one", alone, None), ("ranks", model, ranks))

    def take_turns(measure: Callable[[Any, Ranks | None], Cost]) -> dict[str, Cost]:
        least: dict[str, Cost] = {}
        for _ in range(args.repetitions):
            for name, player, of in players:
                dist.barrier()
                if name == "ranks" or rank == 0:
                    now = measure(player, of)
                    least[name] = now.least(least.get(name, now))
        return least

    for tokens in args.tokens:
        for kind in KINDS:
            costs = take_turns(lambda player, of, n=tokens, k=kind: decode(player, n, k, of))
            found["decode"].append({"tokens": tokens, "cache": kind, **costs})
    for tokens in args.prefill:
        costs = take_turns(lambda player, of, n=tokens: prefill(player, n))
        found["prefill"].append({"tokens": tokens, **costs})
    found["sent_bytes"] = sent_per_token_and_layer(model, ranks)
    if rank == 0:
        show(args, found)
    dist.barrier()
    dist.destroy_process_group()


def sent_per_token_and_layer(model: Any, ranks: Ranks) -> float:
    """Count what a rank sends between two numbers of new tokens."""
    sent = []
    for count in (2, 6):
        cache = filled(model, 64, "dynamic", ranks)
        with Sent() as mode:
            model.generate(
                torch.ones(1, 65, dtype=torch.int64),
                past_key_values=cache,
                max_new_tokens=count,
                **HOW,
            )
        sent.append(mode.num_bytes)
    return (sent[1] - sent[0]) / 4 / model.config.num_hidden_layers


def show(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print tables, and JSON."""
    for title in ("decode", "prefill"):
        rows = []
        for row in found[title]:
            one, ranks = row["one"], row["ranks"]
            row["ratio"], row["cpu_ratio"] = (ranks[at] / one[at] for at in (0, 1))
            times = [f"{1e3 * cost[at]:.1f}" for at in (0, 1) for cost in (one, ranks)]
            ratios = [f"{row['ratio']:.2f}", f"{row['cpu_ratio']:.2f}"]
            cells = [title, row["tokens"], row.get("cache", ""), *times[:2], ratios[0]]
            cells += [*times[2:], ratios[1]]
            if one.held_bytes:
                row["memory"] = ranks.held_bytes / one.held_bytes
                cells.append(f"{row['memory']:.3f}")
            rows.append(cells)
        several = f"{args.ranks} ranks"
        heads = ["", "tokens", "cache", "one process ms", f"{several} ms", "ratio"]
        heads += ["one process CPU ms", f"{several} CPU ms", "CPU ratio", "memory"]
        print(tabulate(rows, heads), end="\n\n")
    row = 4 * args.heads * (args.head_dim + 1)
    print(f"sent per token and layer: {found['sent_bytes']:.0f} bytes; out and lse take {row}")
    names = ("ranks", "layers", "heads", "kv_heads", "head_dim", "repetitions")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"machine": platform.processor() or platform.machine()}
    print(json.dumps({**found, **{n: getattr(args, n) for n in names}, **versions, **machine}))


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], help="decode")
    parser.add_argument("--prefill", type=int, nargs="+", default=[16384])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2)
    args = parser.parse_args()
    mp.spawn(run_rank, (args, free_port()), nprocs=args.ranks)


if __name__ == "__main__":
    main()
