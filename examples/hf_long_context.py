"""Fine-tune a Hugging Face causal LM on packed documents, sharded along the sequence.

    torchrun --standalone --nproc-per-node 2 examples/hf_long_context.py
    torchrun --standalone --nproc-per-node 2 examples/hf_long_context.py --model mistral --window 64

No line of the model is changed, and nobody describes its mask again. `position_ids` that restart
with every document say that documents are packed; the model computes a mask from them; the compiler
reads the mask from the graph. Every step is printed next to the same step of the same model on one
process. With `--checkpoints FOLDER` both go on where they
were if a rank is killed: examples/checkpoints.py.

Documents are source files of Python's standard library, and tokens are bytes. `--pretrained NAME`
uses the weights and vocabulary size of a model on the Hub instead of a small random model.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from checkpoints import Checkpoints
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import cp_inductor

VOCABULARY = 256  # bytes


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    """Return a small random model, or a pretrained one."""
    if args.pretrained:
        return transformers.AutoModelForCausalLM.from_pretrained(
            args.pretrained, attn_implementation="sdpa", dtype=torch.float32
        )
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": args.dim,
        "intermediate_size": 8 * args.dim // 3,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": args.seq_len,
        "attn_implementation": "sdpa",
    }
    if args.model == "mistral":
        return transformers.MistralForCausalLM(
            transformers.MistralConfig(**sizes, sliding_window=args.window)
        )
    if args.model == "qwen2":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def packed_batch(seq_len: int, step: int) -> dict[str, Tensor]:
    """Return one sequence of documents, (1, S): tokens, and positions within each document."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    first = 7 * step % len(files)
    texts, positions, left = [], [], seq_len
    for file in files[first:] + files[:first]:
        data = file.read_bytes()
        # A part of each file: long files are long documents, and none is more than half a batch.
        data = data[: min(left, seq_len // 2, max(16, len(data) // 64))]
        texts.append(torch.frombuffer(bytearray(data), dtype=torch.uint8).long())
        positions.append(torch.arange(len(data)))
        left -= len(data)
        if not left:
            break
    ids, position_ids = torch.cat(texts)[None], torch.cat(positions)[None]
    # The first token of a document does not follow from the one before it.
    labels = ids.masked_fill(position_ids == 0, -100)
    return {"input_ids": ids, "position_ids": position_ids, "labels": labels}


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> tuple[float, float]:
    """Return the loss, and the norm of the gradients."""
    optimizer.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), norm.item()


def facts_of_plan(config: transformers.PretrainedConfig) -> list[list[float]]:
    """Return what was planned for the last batch; nothing if plans were made when compiling.

    Blocks of 128 x 128 that are computed, as a part of those of causal attention over the whole
    sequence; the busiest rank's work over the mean; what the rank that receives most receives,
    forward and backward, in a layer; the time it took to plan.
    """
    if not (made := cp_inductor.batch_plans()):
        return []
    plan, heads = made[-1], config.num_attention_heads
    blocks = -(-int(plan.queries.length.sum()) // 128)
    sizes = {
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.hidden_size // heads,
        "itemsize": 4,
    }
    received = max(plan.bytes_received(rank, **sizes) for rank in range(plan.world_size))
    planning_ms = counters["cp_inductor"].pop("planning_us", 0) / 1e3
    part = plan.num_blocks / (blocks * (blocks + 1) / 2)
    return [[part, plan.balance, received / 1e3, planning_ms]]


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    if dist.get_rank() == 0:
        # What the compiler found: site, mask, plan.
        logging.getLogger("cp_inductor").setLevel(logging.INFO)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = make_model(args)
    whole = copy.deepcopy(model)
    cp_inductor.parallelize(model, mesh)  # weights stay whole; or weights=, which shards them
    optimizers = [torch.optim.AdamW(m.parameters(), lr=args.lr) for m in (model, whole)]
    compiled = torch.compile(
        model, backend=args.backend, fullgraph=True, dynamic=False, options={"plan": args.plan}
    )

    trained = {"sharded": (model, optimizers[0]), "whole": (whole, optimizers[1])}
    checkpoints = Checkpoints(args.checkpoints, args.checkpoint_every, trained)
    rows, plans = checkpoints.resume(), []
    for step in range(len(rows), args.steps):
        batch = packed_batch(args.seq_len, step)
        start = time.perf_counter()
        sharded = train_step(compiled, optimizers[0], batch)
        seconds = time.perf_counter() - start
        plans += [[step, *facts, args.seq_len / seconds] for facts in facts_of_plan(model.config)]
        unsharded = train_step(whole, optimizers[1], batch)
        difference = abs(sharded[0] - unsharded[0]) / unsharded[0]
        rows.append([step, *sharded, *unsharded, difference, seconds])
        checkpoints.save(rows)
    checkpoints.finish()
    if dist.get_rank() == 0:
        headers = ["step", "loss", "grad norm", "loss, 1 process", "grad norm, 1 process"]
        print(
            tabulate(rows, [*headers, "difference", "s"], floatfmt=("", *[".6f"] * 4, ".1e", ".2f"))
        )
        headers = ["step", "of causal", "balance", "kB received", "planning ms", "tokens/s"]
        if plans:
            print("\nwhat was planned for each batch")
            print(tabulate(plans, headers, floatfmt=("", ".1%", ".3f", ".1f", ".1f", ".0f")))
        parameters = zip(model.parameters(), whole.parameters(), strict=True)
        drift = max((a - b).abs().max().item() for a, b in parameters)
        print(f"attentions rewritten        {counters['cp_inductor']['sites_rewritten']}")
        print(f"largest difference of loss  {max(row[5] for row in rows):.1e}")
        print(f"largest drift of a weight   {drift:.1e}")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["llama", "mistral", "qwen2"], default="llama")
    parser.add_argument("--pretrained", help="name of a causal LM on the Hub, instead")
    parser.add_argument("--window", type=int, default=256, help="of mistral, in tokens")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--plan", default="auto", help="when: static, runtime, auto")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoints", metavar="FOLDER", help="to resume from if there are any")
    parser.add_argument("--checkpoint-every", type=int, default=2, metavar="STEPS")
    parser.add_argument("--backend", default="cp_inductor")
    return parser.parse_args()


if __name__ == "__main__":
    main()
