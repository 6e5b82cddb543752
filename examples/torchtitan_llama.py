"""torchtitan's Llama with its sequence sharded by this library, under FSDP2.

    torchrun --standalone --nproc-per-node 4 examples/torchtitan_llama.py --cp 2

torchtitan 0.3 takes a model as a ModelSpec, whose `parallelize_fn` says how it is parallelized.
`parallelize` below is one: where torchtitan's own wraps the inner attention for context
parallelism, it compiles each block with this library's backend, over plain shards. Batches are
sharded by torchtitan's `prepare_context_parallel_input`, in the order that they have.

torchtitan's Trainer needs an accelerator: its constructor calls `set_device` of torch.cuda. So
this script has a training loop of its own, on CPUs, of torchtitan's model, FSDP2, loss and
sharding of batches, and compares with one process. On GPUs, where this has not been run:

    PYTHONPATH=examples torchrun --standalone --nproc-per-node 8 -m torchtitan.train
        --module torchtitan_llama --config llama3_debugmodel
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import config_registry, model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: TrainingConfig,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Apply checkpoints of activations, context parallelism and FSDP2: a `parallelize_fn`."""
    if parallelism.context_parallel_load_balancer is not None:
        raise ValueError("set parallelism.context_parallel_load_balancer to None: plans balance")
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    compile_blocks(model, parallel_dims.get_mesh("cp"), compile_config.backend)
    shard_weights(model, parallel_dims.get_mesh(["fsdp"]), training)
    return model


def compile_blocks(model: nn.Module, cp: DeviceMesh, backend: str) -> None:
    """Compile each block over plain shards of the sequence, in place."""
    for block in model.layers.values():
        block.compile(backend=backend, fullgraph=True, dynamic=False, options={"mesh": cp})


def shard_weights(model: nn.Module, fsdp: DeviceMesh, training: TrainingConfig) -> None:
    """Shard weights over the ranks of both axes, by torchtitan's FSDP2: gradients are summed."""
    apply_fsdp_to_decoder(
        model,
        fsdp,
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        pp_enabled=False,
    )


def causal_spec() -> ModelSpec:
    """Return torchtitan's debug Llama with causal attention, to be parallelized by us."""
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    spec.parallelize_fn = parallelize
    return spec


def llama3_debugmodel() -> Trainer.Config:
    """Return the configuration of torchtitan's debug Llama for two ranks of the sequence axis."""
    config = config_registry.llama3_debugmodel()
    config.model_spec = causal_spec()
    config.parallelism = replace(
        config.parallelism,
        spmd_backend="partial_dtensor",
        context_parallel_degree=2,
        context_parallel_load_balancer=None,
    )
    config.training = replace(config.training, disable_cuda_graphs=True)
    config.compile = replace(config.compile, backend="cp_inductor")
    return config


def batch(step: int, part: int, size: int, seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and positions, (B, S) each, of Python's sources."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files[:40])
    length = size * (seq_len + 1)
    first = (step * 7 + part) * length % (len(data) - length)
    text = torch.frombuffer(bytearray(data[first : first + length]), dtype=torch.uint8).long()
    rows = text.view(size, seq_len + 1)
    return rows[:, :-1], rows[:, 1:].clone(), torch.arange(seq_len).expand(size, -1)


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows = train(args)
    if dist.get_rank() == 0:
        headers = ["step", "loss", "loss, 1 process", "difference", "of gradients"]
        print(tabulate(rows, headers, floatfmt=("", ".6f", ".6f", ".1e", ".1e")))
        print(f"attentions rewritten             {counters['cp_inductor']['sites_rewritten']}")
        print(f"largest difference of loss       {max(row[3] for row in rows):.1e}")
        print(f"largest difference of gradients  {max(row[4] for row in rows):.1e}")
    dist.destroy_process_group()


def train(args: argparse.Namespace) -> list[list[float]]:
    """Train beside one process; return each step's number, both losses, and two differences."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    fsdp = mesh["dp", "cp"]._flatten("fsdp")
    training = TrainingConfig(mixed_precision_param="float32")

    torch.manual_seed(0)
    spec = causal_spec()
    spec.model.layers = spec.model.layers[: args.layers]
    whole = spec.model.build()
    whole.init_states()
    model = copy.deepcopy(whole)
    compile_blocks(model, mesh["cp"], args.backend)
    shard_weights(model, fsdp, training)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # torchtitan has FSDP scale and sum at once, which gloo cannot.
            module.set_force_sum_reduction_for_comms(True)
    loss_fn = CrossEntropyLoss.Config().build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3) for m in (model, whole)]

    rows = []
    for step in range(args.steps):
        parts = [batch(step, part, args.batch, args.seq_len) for part in range(mesh["dp"].size())]
        num_tokens = torch.tensor(sum(labels.numel() for _, labels, _ in parts))
        tokens, labels, positions = parts[mesh["dp"].get_local_rank()]
        tokens, labels, extra = prepare_context_parallel_input(
            tokens, labels, {"positions": positions}, mesh["cp"], torch.device("cpu"), None
        )
        loss, _ = loss_fn(model(tokens, **extra), labels, num_tokens)
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)

        expected = torch.zeros(())
        for tokens, labels, positions in parts:
            part, _ = loss_fn(whole(tokens, positions=positions), labels, num_tokens)
            part.backward()
            expected += part.detach()
        gradients = largest_difference(model, whole)
        difference = abs(loss - expected) / expected
        rows.append([step, loss.item(), expected.item(), difference.item(), gradients])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return rows


def largest_difference(model: nn.Module, whole: nn.Module) -> float:
    """Return that of all gradients, each relative to its weight's largest."""
    largest = 0.0
    for sharded, one in zip(model.parameters(), whole.parameters(), strict=True):
        gradient = sharded.grad
        found = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        scale = one.grad.abs().max().item()
        largest = max(largest, (found - one.grad).abs().max().item() / scale)
    return largest


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cp", type=int, default=2, help="ranks that share a sequence")
    parser.add_argument("--layers", type=int, default=6, help="of the debug model's six")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank of dp")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backend", default="cp_inductor")
    return parser.parse_args()


if __name__ == "__main__":
    main()
