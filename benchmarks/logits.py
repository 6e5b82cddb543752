"""The largest tensors of one rank's program when a language model is trained on long sequences.

    python benchmarks/logits.py
    python benchmarks/logits.py --tokens 262144 --ranks 4 --vocabulary 128256 --target cuda:b200

An embedding, one layer of attention, a head and a cross-entropy, in the sizes of Qwen3-8B and in
bfloat16, are cross-compiled with and without Inductor's chunker, which the backend turns on for
large logits. The largest buffers that the generated code allocates are read from it.

Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Iterator
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from cp_inductor import cross_compile

ALLOCATION = re.compile(r"empty_strided_\w+\(\(([\d, ]*)\), \([^)]*\), torch\.(\w+)\)")


class LanguageModel(nn.Module):
    """Embedding, attention, head, and the loss of shifted labels."""

    def __init__(self, vocabulary: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        dim = heads * head_dim
        self.head_dim, self.parts = head_dim, [dim, kv_heads * head_dim, kv_heads * head_dim]
        self.embedding = nn.Embedding(vocabulary, dim)
        self.qkv = nn.Linear(dim, sum(self.parts), bias=False)
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.qkv(x).split(self.parts, -1)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        logits = self.head(x + out.transpose(1, 2).flatten(2)).float()
        labels = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def allocated(code: str) -> Iterator[int]:
    """Yield the bytes of each buffer that generated code allocates."""
    for shape, dtype in ALLOCATION.findall(code):
        size = torch.Size(int(length) for length in shape.split(",") if length.strip())
        yield size.numel() * getattr(torch, dtype).itemsize


def measure(args: argparse.Namespace, options: dict[str, Any], name: str) -> dict[str, Any]:
    """Cross-compile, and return the largest buffers of forward and backward in GiB."""
    with torch.device("meta"):
        model = LanguageModel(args.vocabulary, args.heads, args.kv_heads, args.head_dim).bfloat16()

    def tokens(mesh: DeviceMesh) -> tuple[Tensor]:
        ids = torch.empty(1, args.tokens, dtype=torch.int64, device="meta")
        return (distribute_tensor(ids, mesh, [Shard(1)]),)

    where = {"world_size": args.ranks, "rank": args.ranks // 2, "target": args.target}
    code = cross_compile(model, tokens, options=options, **where).code
    largest = {kind: max(allocated(text)) / 2**30 for kind, text in code.items()}
    return {"logits": name} | {f"largest of {kind}, GiB": round(largest[kind], 2) for kind in code}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1_048_576, help="of the whole sequence")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--target", default="cuda:sm_90")
    args = parser.parse_args()
    rows = [
        measure(args, {}, "as the backend has it"),
        measure(args, {"auto_chunker.enable": False}, "whole"),
    ]
    print(tabulate(rows, headers="keys", tablefmt="github"))
    about = {"date": str(date.today()), "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps(about | {"arguments": vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
