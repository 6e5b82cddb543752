"""Generate with a Hugging Face model whose prompt and cache are spread over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/generate.py
    torchrun --standalone --nproc-per-node 2 examples/generate.py --static --sample --new 40

The first rank prints the tokens beside those of the same model on one process, and how much of the
cache each rank holds. `--pretrained NAME` uses a model on the Hub instead of a small random one.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

import cp_inductor


def make_model(args: argparse.Namespace) -> PreTrainedModel:
    """Return a small random model, or a pretrained one."""
    if args.pretrained:
        return transformers.AutoModelForCausalLM.from_pretrained(args.pretrained)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def main() -> None:
    """Generate on one process, then on all ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pretrained", default="")
    parser.add_argument("--prompt", type=int, default=600, help="tokens")
    parser.add_argument("--new", type=int, default=20, help="tokens")
    parser.add_argument("--static", action="store_true", help="a cache of a fixed size")
    parser.add_argument("--sample", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = make_model(args).eval()
    ids = torch.randint(3, model.config.vocab_size, (1, args.prompt))
    dist.broadcast(ids, 0)
    how = {"max_new_tokens": args.new, "do_sample": args.sample, "return_dict_in_generate": True}
    if args.static:
        how["cache_implementation"] = "static"

    torch.manual_seed(1)
    expected = model.generate(ids, **how)
    cp_inductor.distribute(model, mesh)
    torch.manual_seed(1)
    found = model.generate(ids, **how)  # the same call, on every rank

    held = [layer.keys.shape[2] for layer in found.past_key_values.layers]
    if dist.get_rank() == 0:
        is_same = torch.equal(found.sequences, expected.sequences)
        print(found.sequences[0, args.prompt :].tolist())
        print(f"{'the same' if is_same else 'OTHER'} tokens as on one process")
        print(f"each rank has room for {held[0]} of {args.prompt + args.new} tokens, in each layer")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
