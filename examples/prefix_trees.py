"""Prompts with several answers, and trees of turns: every token is stored once, in one packed row.

    torchrun --standalone --nproc-per-node 2 examples/prefix_trees.py

([p1 p2 p3], [([a1 a2], []), ([b1], [])])       a prompt and its answers a and b
  =>
input_ids     p1 p2 p3 a1 a2 p3 b1      p3 heads each branch: from it, a1 and b1 are predicted
position_ids   0  1  2  3  4  2  3      as in (p1 p2 p3 a1 a2) and (p1 p2 p3 b1)
enter          0  0  1  1  1  2  2      the node of a token, in a depth-first walk
leave          3  3  2  2  2  3  3      the first node behind all that grows from that node
labels         .  . a1 a2  . b1  .      the next token, where it counts
weights        2  2  1  1  1  1  1      how many unpacked rows hold the token

Two tables are the tree: key k is visible to query q if k <= q and enter[k] <= enter[q] < leave[k].
The last token of a node has several successors, and a row of logits has one label. So a node ends
before its last token, and a copy of that heads each child. The model of transformers is unmodified:
it takes a mask of four dims, and the compiler reads how that was computed.

Every step is compared with the same step on unpacked rows, in which each answer has its own copy of
all that is before it, on one process.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import cp_inductor

IGNORED = -100
PADDING = {"enter": 1 << 20, "leave": 1 << 21, "weights": 0}  # one more tree
Node = tuple[list[int], list[Any]]  # at least one token, and children


def collate(trees: list[Node]) -> dict[str, Tensor]:
    """Pack trees into one row, (1, S). The tokens of a root have no labels."""
    row: dict[str, list[int]] = {"input_ids": [], "position_ids": [], "enter": [], "labels": []}
    leave, weights = list[int](), list[int]()  # of each node

    def add(tokens: list[int], children: list[Node], position: int, is_root: bool) -> int:
        """Add a node, headed by its parent's last token; return how many answers end below."""
        number, stored = len(leave), len(tokens) - bool(children)
        leave.append(0)
        weights.append(0)
        row["input_ids"] += tokens[:stored]
        row["position_ids"] += range(position, position + stored)
        row["enter"] += [number] * stored
        row["labels"] += ([IGNORED] * len(tokens) if is_root else [*tokens[1:], IGNORED])[:stored]
        for own, below in children:
            weights[number] += add([tokens[-1], *own], below, position + stored, False)
        leave[number], weights[number] = len(leave), weights[number] or 1
        return weights[number]

    for tokens, children in trees:
        add(tokens, children, 0, True)
    batch = {name: torch.tensor([values]) for name, values in row.items()}
    nodes = batch["enter"]
    return {**batch, "leave": torch.tensor(leave)[nodes], "weights": torch.tensor(weights)[nodes]}


def unpack(tree: Node, before: list[int], length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and labels, (1, S), of each answer; no label is one of the first tokens."""
    tokens, children = before + tree[0], tree[1]
    for child in children:
        yield from unpack(child, tokens, length)
    if not children:
        labels = [IGNORED] * (length - 1) + [*tokens[length:], IGNORED]
        yield torch.tensor([tokens]), torch.tensor([labels])


class OfTrees(nn.Module):
    """A model of transformers, and the sum of the losses of unpacked rows, from a packed one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, enter: Tensor, leave: Tensor, weights: Tensor, labels: Tensor, **batch: Tensor
    ) -> Tensor:
        place = torch.arange(enter.shape[1])
        of_query, of_key = enter[:, None, :, None], enter[:, None, None]
        mask = (of_key <= of_query) & (of_query < leave[:, None, None]) & (place <= place[:, None])
        logits = self.model(attention_mask=mask, use_cache=False, **batch).logits.flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        return (losses * weights.flatten()).sum()


def draw_trees(step: int) -> list[Node]:
    """Return three prompts with answers, some of which are answered again."""
    draw = torch.Generator().manual_seed(step)

    def node(most: int, depth: int) -> Node:
        length, count = torch.randint(1, most, (2,), generator=draw).tolist()
        tokens = torch.randint(256, (length,), generator=draw).tolist()
        return tokens, [node(12, depth - 1) for _ in range(count % 4 if depth else 0)]

    return [node(60, 2) for _ in range(3)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", default="cp_inductor")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}
    whole = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads))
    model = cp_inductor.parallelize(OfTrees(copy.deepcopy(whole)), mesh)
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)
    optimizer = torch.optim.SGD([*model.parameters(), *whole.parameters()], lr=1e-3, foreach=False)
    worst = [0.0, 0.0]
    for step in range(args.steps):
        trees = draw_trees(step)
        batch = cp_inductor.pad_packed(collate(trees), values=PADDING)  # to share graphs
        loss = compiled(**batch)
        loss.backward()
        rows = [row for tree in trees for row in unpack(tree, [], len(tree[0]))]
        logits = [(whole(ids).logits[0], labels[0]) for ids, labels in rows]
        expected = sum(F.cross_entropy(*one, reduction="sum") for one in logits)
        expected.backward()
        both = zip(model.parameters(), whole.parameters(), strict=True)
        of_weights = [(p.grad - q.grad).norm() / q.grad.norm() for p, q in both]
        differences = [abs(loss.item() / expected.item() - 1), max(of_weights).item()]
        worst = list(map(max, worst, differences))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            tokens = int((batch["weights"] > 0).sum())
            unpacked = sum(ids.numel() for ids, _ in rows)
            print(f"step {step}  loss {loss.item():.4f}  tokens {tokens}, unpacked {unpacked}")
    if dist.get_rank() == 0:
        print("largest difference of loss {:.1e} and of gradients {:.1e}".format(*worst))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
