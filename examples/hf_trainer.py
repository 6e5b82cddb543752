"""A training loop like that of Hugging Face's Trainer, over sharded sequences.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py

The loop has the usual parts: a dataset and a collator, gradients accumulated over batches and
divided by the tokens of all of them, clipping, warm-up, and a checkpoint in the model's own format.
Context parallelism adds `cp_inductor.parallelize` and the backend. Documents are padded at the end,
and the loss counts no padding.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from hf_long_context import make_model
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

import cp_inductor


class Documents(Dataset):
    """The sources of Python's standard library, as bytes."""

    def __init__(self, max_len: int) -> None:
        self.files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.max_len = max_len

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        data = bytearray(self.files[index].read_bytes()[: self.max_len - 10 * (index % 7)])
        return torch.frombuffer(data, dtype=torch.uint8).long()


def collate(max_len: int, documents: list[Tensor]) -> dict[str, Tensor]:
    """Pad on the right: the same length on all ranks, whatever the documents."""
    ids = torch.zeros(len(documents), max_len, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = document
        mask[row, : len(document)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def accumulate(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Run forward and backward of some batches; return their loss per token.

    The sum of the loss over a batch by the number of targets in all of them: `num_items_in_batch`
    is how Trainer has a model's own loss do so.
    """
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    losses = []
    for batch in batches:
        loss = model(**batch, num_items_in_batch=targets, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = make_model(args)
    witness = copy.deepcopy(model)
    cp_inductor.parallelize(model, mesh)
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)
    loader = DataLoader(
        Documents(args.seq_len),
        batch_size=2,
        collate_fn=lambda documents: collate(args.seq_len, documents),
    )
    runs = compiled, witness
    optimizers = [torch.optim.AdamW(each.parameters(), lr=args.lr) for each in (model, witness)]
    schedules = [get_linear_schedule_with_warmup(o, 2, args.steps + 2) for o in optimizers]
    batches = iter(loader)
    rows = []
    for step in range(args.steps):
        some = [next(batches) for _ in range(args.accumulate)]
        losses = []
        for run, optimizer, schedule in zip(runs, optimizers, schedules, strict=True):
            losses.append(accumulate(run, some).item())
            nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        rows.append((step, *losses, abs(losses[0] - losses[1]) / losses[1]))
    with tempfile.TemporaryDirectory() as folder:
        path = [folder]
        dist.broadcast_object_list(path)
        if dist.get_rank() == 0:
            model.save_pretrained(path[0])
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(path[0])
        pairs = zip(loaded.parameters(), witness.parameters(), strict=True)
        drift = max((a - b).abs().max().item() for a, b in pairs)
        dist.barrier()
    if dist.get_rank() == 0:
        headers = ["step", "loss", "loss, 1 process", "difference"]
        print(tabulate(rows, headers, floatfmt=("", ".6f", ".6f", ".1e")))
        print(f"largest difference of loss  {max(row[-1] for row in rows):.1e}")
        print(f"largest drift of a weight   {drift:.1e}, saved and loaded again")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["llama", "mistral", "qwen2"], default="llama")
    parser.add_argument("--pretrained", help="name of a causal LM on the Hub, instead")
    parser.add_argument("--window", type=int, default=256, help="of mistral, in tokens")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--backend", default="cp_inductor")
    return parser.parse_args()


if __name__ == "__main__":
    main()
