"""What the short examples share: ranks, and the same model on one process to compare with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch._dynamo.utils import counters
from train_text import GPT, Shape, draw_batch, read_text

# A multiple of what tensor parallelism divides: 4 heads, 2 of keys and values.
HEADS, KV_HEADS = 4, 2


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cp_inductor", help="or cp_aot_eager, to debug")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512, help="of the whole sequence")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    return parser.parse_args()


@contextmanager
def local_ranks() -> Iterator[str]:
    """Join the ranks that torchrun started; yield the type of their devices."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    torch.manual_seed(0)  # the same weights on every rank
    try:
        yield device_type
    finally:
        dist.destroy_process_group()


class Witness:
    """The unsharded model, trained on the same batches, and a table of the differences."""

    def __init__(self, args: argparse.Namespace, device_type: str) -> None:
        self.shape = Shape(args.layers, args.dim, HEADS, KV_HEADS, args.seq_len)
        self.device_type = device_type
        self.text = read_text().to(device_type)
        self.model = self.make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.rows: list[tuple[int, float, float, float]] = []

    def make_model(self) -> GPT:
        torch.manual_seed(1)
        return GPT(self.shape).to(self.device_type)

    def draw(self, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return ids and labels (B, S), the same on every rank."""
        batch = draw_batch(self.text, batch_size, self.shape.max_seq_len, step)
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    def watch(self, step: int, ids: Tensor, labels: Tensor, loss: Tensor) -> None:
        """Take the same step, and note both losses.

        Args:
            loss: this rank's mean; every rank counts as many tokens.
        """
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        expected = self.model(ids, labels)
        self.optimizer.zero_grad()
        expected.backward()
        self.optimizer.step()
        difference = ((loss - expected).abs() / expected).item()
        self.rows.append((step, loss.item(), expected.item(), difference))

    def report(self) -> None:
        if dist.get_rank() == 0:
            headers = ["step", "loss", "loss, 1 process", "difference"]
            print(tabulate(self.rows, headers, floatfmt=("", ".6f", ".6f", ".1e")))
            print(f"attentions rewritten        {counters['cp_inductor']['sites_rewritten']}")
            print(f"largest difference of loss  {max(row[-1] for row in self.rows):.1e}")
