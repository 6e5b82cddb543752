"""A million tokens: what Qwen3-8B on 8 H100 will take, and the same program in small.

    python examples/million_tokens.py
    torchrun --standalone --nproc-per-node 2 examples/million_tokens.py --tiny

The configuration is that of TRL's "Training Beyond 1M Tokens" (`trl_long_context.py` is its whole
recipe, with Trainer): Qwen3-8B in bfloat16, one sequence of 1,048,576 tokens, layers checkpointed,
weights, gradients and Adam's states in float32 and sharded by FSDP2. Nothing about the model names
context parallelism; the backend does.

Without arguments the script estimates memory and time of a step, which takes half a minute and no
GPU. `--tiny` takes a few steps on the ranks that torchrun started, with a tiny Qwen3 and a sequence
of 1/512 of the length, and compares each loss with that of one process.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, Qwen3Config

import cp_inductor

TOKENS = 1_048_576
QWEN3_8B = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class LanguageModel(nn.Module):
    """Qwen3 and its loss."""

    def __init__(self, sizes: dict[str, int], tokens: int, dtype: torch.dtype) -> None:
        super().__init__()
        config = Qwen3Config(
            **sizes,
            max_position_embeddings=tokens,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1_000_000,
                "factor": 32.0,
                "original_max_position_embeddings": tokens // 32,
            },
            attn_implementation="sdpa",
        )
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss


def build(mesh: DeviceMesh) -> tuple[nn.Module, tuple[Tensor]]:
    """Return the model and its arguments, for `python -m cp_inductor estimate ...:build`."""
    with torch.device("meta"):
        model = LanguageModel(QWEN3_8B, TOKENS, torch.bfloat16)
        ids = torch.empty(1, TOKENS, dtype=torch.int64)
    return model, (distribute_tensor(ids, mesh, [Shard(1)]),)


def estimate(target: str, world_size: int, checkpoint: str) -> None:
    with torch.device("meta"):
        model = LanguageModel(QWEN3_8B, TOKENS, torch.bfloat16)
    found = cp_inductor.estimate(
        model,
        lambda mesh: build(mesh)[1],
        mesh_shape=(world_size,),
        target=target,
        checkpoint=checkpoint,
        sharding="fsdp",
        held_dtype=torch.float32,
    )
    print(found)
    print(f"{found.peak_bytes / 1e9:.1f} GB and {found.seconds:.0f} s per step")


def run(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    models = []
    for _ in range(2):
        torch.manual_seed(0)  # the same weights on every rank
        models.append(LanguageModel(TINY, args.tokens, torch.float32))
    model, alone = cp_inductor.parallelize(models[0], mesh), models[1]
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (model, alone)]
    rows = []
    for step in range(args.steps):
        ids = torch.randint(TINY["vocab_size"], (1, args.tokens))
        loss = compiled(ids)
        loss.backward()
        expected = alone(ids)
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        difference = ((loss - expected).abs() / expected).item()
        rows.append((step, loss.item(), expected.item(), difference))
    if dist.get_rank() == 0:
        headers = ["step", "loss", "loss, 1 process", "difference"]
        print(f"{args.tokens:,} tokens on {dist.get_world_size()} ranks")
        print(tabulate(rows, headers, floatfmt=("", ".6f", ".6f", ".1e")))
        print(f"largest difference of loss  {max(row[-1] for row in rows):.1e}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on ranks of torchrun")
    parser.add_argument("--target", default="h100")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--checkpoint", default="layers", choices=("none", "layers", "offload"))
    parser.add_argument("--tokens", type=int, default=TOKENS // 512, help="of a run")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--backend", default="cp_inductor", help="or cp_aot_eager, to debug")
    args = parser.parse_args()
    if args.tiny:
        run(args)
    else:
        estimate(args.target, args.world_size, args.checkpoint)


if __name__ == "__main__":
    main()
