"""Fine-tune on sequences of a million tokens with TRL's SFTTrainer, one per step.

    torchrun --standalone --nproc-per-node 8 examples/trl_long_context.py
    torchrun --standalone --nproc-per-node 2 examples/trl_long_context.py --tiny

The recipe of TRL's guide "Training Beyond 1M Tokens": Qwen3-8B, books of PG-19 joined to 1,048,576
tokens, YaRN, bfloat16, checkpointed layers. Context parallelism of this library adds `register`,
`cp_backend` and the two lines of `torch_compile`, and it may pack documents (`--packing`), which
TRL refuses with torch's.

As in the guide, FSDP2 shards weights, gradients and the optimizer's states over the ranks, and
checkpoints layers; with `--offload` the shards are in the host's memory; with `--whole-weights`
every rank has all of them, and Trainer checkpoints layers. The script begins with what a rank
needs. It has not been run on GPUs. `--tiny` trains a tiny model on Python's sources, on CPUs; with
one process it has the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from accelerate import ParallelismConfig
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from cp_inductor.integrations.accelerate import register

MODEL = "Qwen/Qwen3-8B"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000,
    "factor": 32.0,
    "original_max_position_embeddings": 32768,
}


def full(args: argparse.Namespace) -> tuple[Any, PretrainedConfig, Any, Dataset, dict[str, Any]]:
    """Return model, its configuration, tokenizer, data and settings of the recipe."""
    options = {"dtype": torch.bfloat16, "rope_parameters": YARN}
    books, texts = load_dataset("emozilla/pg19", split="train", streaming=True), []
    current = ""
    for book in books:
        current += book["text"]
        if args.packing or len(current) >= 6 * args.seq_len:
            texts.append(current)
            current = ""
        if sum(map(len, texts)) >= 6 * args.seq_len * args.steps:
            break
    settings = {"bf16": True, "optim": args.optim}
    model = AutoModelForCausalLM.from_pretrained(MODEL, **options)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return model, AutoConfig.from_pretrained(MODEL), tokenizer, _texts(texts), settings


def tiny(args: argparse.Namespace) -> tuple[Any, PretrainedConfig, Any, Dataset, dict[str, Any]]:
    """Return the same of a model with random weights, in float32 and on CPUs."""
    set_seed(0)
    config = Qwen3Config(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=args.seq_len,
        rope_parameters={**YARN, "original_max_position_embeddings": args.seq_len // 32},
    )
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    sources = [path.read_text("utf-8", "replace") for path in files]
    # Documents of an eighth to three quarters of a row, or rows that are full.
    lengths = [args.seq_len * (1 + index % 6) // 8 for index in range(8 * args.steps)]
    if not args.packing:
        lengths = [2 * args.seq_len] * args.steps
    texts, rest = [], "".join(sources)
    for length in lengths:
        texts.append(rest[:length])
        rest = rest[length:]
    settings = {"bf16": False, "use_cpu": True, "ddp_backend": "gloo", "learning_rate": 1e-2}
    return AutoModelForCausalLM.from_config(config), config, _bytes(), _texts(texts), settings


def _texts(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"text": texts})


def _bytes() -> PreTrainedTokenizerBase:
    """Return a tokenizer with a token for each character of Latin-1."""
    words = ["<pad>", "<eos>", "<unk>", *map(chr, range(256))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def memory_needed(
    config: PretrainedConfig, parameters: int, itemsize: int, shard: int, optim: str, parts: int
) -> dict[str, float]:
    """Return what a rank holds between forward and backward, in GB, by what it is for.

    Args:
        config: of the model.
        parameters: how many it has.
        itemsize: bytes of a weight where it is whole, and of an activation.
        shard: tokens per rank.
        optim: of transformers. adafactor's states are so small that they count as none.
        parts: ranks that share the weights by FSDP2, which holds them in float32, or 1.
    """
    inputs = config.num_hidden_layers * shard * config.hidden_size
    states = 0 if optim == "adafactor" else 2
    held = parameters // parts * (4 if parts > 1 else itemsize)
    bytes_of = {
        "weights": held,
        "gradients": held,
        "optimizer": held * states,
        "gathered weights": parameters * itemsize if parts > 1 else 0,  # at most
        "inputs of layers": inputs * itemsize,
    }
    return {name: size / 1e9 for name, size in bytes_of.items()}


def main() -> None:
    args = parse_arguments()
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    model, config, tokenizer, data, settings = (tiny if args.tiny else full)(args)
    if ranks > 1:
        register()
        settings["parallelism_config"] = ParallelismConfig(cp_size=ranks, cp_backend="cp_inductor")
        settings["fsdp"] = not args.whole_weights
        if settings["fsdp"]:  # which checkpoints layers; SFTConfig does by itself otherwise
            settings["gradient_checkpointing"] = False
            settings["fsdp_config"] = {
                "activation_checkpointing": True,
                "cpu_offload": args.offload,
            }
        settings["torch_compile"] = True
        settings["torch_compile_backend"] = args.backend
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        itemsize = next(model.parameters()).element_size()
        parts = 1 if args.whole_weights else ranks
        shard = args.seq_len // ranks
        needed = memory_needed(config, parameters, itemsize, shard, args.optim, parts)
        for name, size in needed.items():
            is_offloaded = args.offload and name in ("weights", "gradients", "optimizer")
            print(f"GB per rank, {name:17} {size:.3g}{' (of the host)' * is_offloaded}")
    arguments = SFTConfig(
        output_dir=args.out,
        max_length=args.seq_len,
        packing=args.packing,
        pad_to_multiple_of=args.seq_len,  # one length: a model is compiled for each
        per_device_train_batch_size=1,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=args.tiny,
        **settings,
    )
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    if rank == 0:
        for entry in trainer.state.log_history:
            if "loss" in entry:
                names = ("step", "loss", "grad_norm", "entropy", "num_tokens")
                print(json.dumps({name: entry[name] for name in names}))
    trainer.save_model()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on CPUs")
    parser.add_argument("--packing", action="store_true", help="several documents in a row")
    parser.add_argument("--whole-weights", action="store_true", help="no FSDP2")
    parser.add_argument("--offload", action="store_true", help="FSDP2's shards on the host")
    parser.add_argument("--seq-len", type=int, help="1048576, and 256 of the tiny model")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--optim", default="adamw_torch", help="of transformers")
    parser.add_argument("--backend", default="cp_inductor")
    parser.add_argument("--out", default="out", metavar="FOLDER", help="of the trained model")
    args = parser.parse_args()
    if args.offload and args.whole_weights:
        parser.error("--offload is of FSDP2, and --whole-weights goes without")
    args.seq_len = args.seq_len or (256 if args.tiny else 1_048_576)
    return args


if __name__ == "__main__":
    main()
