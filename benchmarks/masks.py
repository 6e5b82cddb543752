"""What masks save, and what reading them takes.

    python benchmarks/masks.py
    python benchmarks/masks.py --ranks 8 --tokens 16384 --window 1024

Of plans under several masks: what the rank that receives most receives, forward and backward, in u
(one rank's keys and values in bfloat16), next to gathering all keys and values, which systems do
that take a mask as a tensor; pairs that the busiest rank computes, over those of a rank's part of
what exists; and balance (busiest rank over mean).

Of Hugging Face models: the processor time that reading all their masks takes, in a compile on fake
ranks, and what they were read as.

Prints tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests.support.ranks: a fake process group

from cp_inductor.mask.rule import describe
from cp_inductor.passes import find_attention
from cp_inductor.plan import plan_attention
from tests.support.ranks import fake_rank


def rules_of(length: int, window: int) -> dict[str, tuple[str, int]]:
    """Return masks, and how many pairs of one head exist under each."""
    causal = length * (length + 1) // 2
    third = length // 3
    parts = (third, length - third)
    beyond = max(0, length - window)
    num_chunks, rest = divmod(length, window)
    prefix = min(window, length)
    return {
        "causal": ("causal", causal),
        f"causal, window {window}": (
            f"(k-q<=0)&(q-k-{window - 1}<=0)",
            causal - beyond * (beyond + 1) // 2,
        ),
        "two documents": (
            f"(k-q<=0)&Eq(Step(q,{third})-Step(k,{third}),0)",
            sum(n * (n + 1) // 2 for n in parts),
        ),
        f"chunks of {window}": (
            f"(k-q<=0)&Eq(floor(q/{window})-floor(k/{window}),0)",
            num_chunks * (window * (window + 1) // 2) + rest * (rest + 1) // 2,
        ),
        f"prefix {window}": (
            f"(k-q<=0)|(k-{window - 1}<=0)",
            causal + prefix * (prefix - 1) // 2,
        ),
        "documents of run time": ("(k-q<=0)&Eq(t0(b,q)-t0(b,k),0)", causal),
    }


def measure_plans(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for world_size in args.ranks:
        length = world_size * args.tokens
        for name, (rule, num_pairs) in rules_of(length, args.window).items():
            start = time.perf_counter()
            plan = plan_attention(
                seq_len=length,
                world_size=world_size,
                num_heads=args.heads,
                num_kv_heads=args.kv_heads,
                head_dim=args.head_dim,
                mask=rule,
            )
            backward = plan.backward()
            planning = time.perf_counter() - start
            unit = 2 * args.tokens * args.kv_heads * args.head_dim * 2
            ranks = range(world_size)
            received = max(plan.bytes_received(r) + backward.bytes_received(r) for r in ranks)
            flops = 4 * args.head_dim * args.heads * num_pairs / world_size
            rows.append(
                {
                    "ranks": world_size,
                    "mask": name,
                    "received, u": received / unit,
                    "all-gather, u": 3.0 * (world_size - 1),
                    "computed / needed": max(map(plan.flops, ranks)) / flops,
                    "balance": plan.balance,
                    "chosen": f"{plan.strategy}, {len(plan.stages) - 1} stages",
                    "planning s": planning,
                }
            )
    return rows


def models() -> dict[str, tuple[Callable[[], nn.Module], bool]]:
    """Return models, and whether they are given packed documents."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "attn_implementation": "sdpa",
    }
    llama = transformers.LlamaConfig(**sizes)
    mistral = transformers.MistralConfig(**sizes, num_key_value_heads=2, sliding_window=100)
    return {
        "Llama": (lambda: transformers.LlamaForCausalLM(llama), False),
        "Llama, packed": (lambda: transformers.LlamaForCausalLM(llama), True),
        "Mistral": (lambda: transformers.MistralForCausalLM(mistral), False),
        "Mistral, packed": (lambda: transformers.MistralForCausalLM(mistral), True),
    }


def measure_reading() -> list[dict[str, Any]]:
    return [measure_model(name, *model) for name, model in models().items()]


def measure_model(name: str, make: Callable[[], nn.Module], is_packed: bool) -> dict[str, Any]:
    seconds, found = 0.0, set()
    original = find_attention.read_mask

    def timed(mask: Any) -> Any:
        nonlocal seconds
        start = time.process_time()
        recognized, trace = original(mask)
        seconds += time.process_time() - start
        found.add(describe(recognized.rule))
        return recognized, trace

    with fake_rank(1, 4), patch.object(find_attention, "read_mask", timed):
        mesh = init_device_mesh("cpu", (4,))
        ids = torch.zeros(1, 1024, dtype=torch.long)
        positions = torch.arange(1024)[None] % 400
        inputs = {"input_ids": ids, **({"position_ids": positions} if is_packed else {})}
        sharded = {n: distribute_tensor(t, mesh, [Shard(1)]) for n, t in inputs.items()}
        model = make()

        def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            from cp_inductor.passes.pipeline import capture
            from cp_inductor.passes.settings import read_settings

            capture(gm, read_settings({}))
            return lambda *_: (None,) * len(gm.graph.output_node().args[0])

        with implicit_replication(), torch.no_grad():
            compiled = torch.compile(model, backend=backend, fullgraph=True)
            compiled(**sharded, use_cache=False)
    return {"model": name, "attentions": 8, "seconds": seconds, "masks": "; ".join(sorted(found))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--tokens", type=int, default=16384, help="of one rank")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    args = parser.parse_args()
    plans, reading = measure_plans(args), measure_reading()
    print(tabulate(plans, headers="keys", floatfmt=".3g", tablefmt="github"))
    print()
    print(tabulate(reading, headers="keys", floatfmt=".3f", tablefmt="github"))
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "arguments": vars(args),
        "plans": plans,
        "reading": reading,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
