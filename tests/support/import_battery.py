"""Programs of DTensors that know nothing of this library, run before and after it is imported.

    python tests/support/import_battery.py          exits with 1, and says what has changed

Two gloo ranks, in processes of their own, since what is imported stays imported.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel.loss as parallel_loss
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as torchs
from torch.nn.attention import SDPBackend, sdpa_kernel

VOCABULARY = 5

# What a program was told when it could not be run, before the import, and may be told no more.
REFUSED = "refused"


def say(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a tensor is, to the bit."""
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return placements, tuple(tensor.shape), str(local.dtype), local.detach().tolist()


def loss_of(
    mesh: DeviceMesh, shape: tuple[int, ...], dim: int, run: Callable[..., Tensor], **kwargs: Any
) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(*shape, generator=generator)
    labels = torch.randint(VOCABULARY, (shape[0], *shape[2:]), generator=generator)
    # Most tokens of the first half count, and few of the second.
    labels[len(labels) // 2 + 1 :] = -100
    sharded = distribute_tensor(logits, mesh, [Shard(dim)]).requires_grad_()
    placement = Replicate() if dim == 1 else Shard(dim and dim - 1)
    loss = run(sharded, distribute_tensor(labels, mesh, [placement]), **kwargs)
    loss.sum().backward()
    assert sharded.grad is not None
    return [say(loss), say(sharded.grad)]


def attention(mesh: DeviceMesh, placement: Any) -> list[Any]:
    """Uses ops that DTensor has rules for; it searches for minutes in those of the CPU's kernel."""
    generator = torch.Generator().manual_seed(8)
    leaves = [
        distribute_tensor(torch.randn(2, 4, 6, 8, generator=generator), mesh, [placement])
        for _ in range(3)
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*leaves)
    out.sum().backward()
    return [say(tensor) for tensor in (out, *(leaf.grad for leaf in leaves))]


def placements(mesh: DeviceMesh) -> list[Any]:
    x = distribute_tensor(torch.arange(24.0).reshape(4, 6) / 7, mesh, [Shard(0)])
    partial = DTensor.from_local(x.to_local(), mesh, [Partial("avg")], run_check=False)
    results = [x.mean(), x.sum(0), x.softmax(1), F.layer_norm(x, (6,)), partial]
    return [say(one) for one in results] + [say(one.full_tensor()) for one in results]


def run_all(mesh: DeviceMesh) -> dict[str, Any]:
    torch._dynamo.reset()
    compiled = torch.compile(F.cross_entropy, backend="aot_eager", fullgraph=True)
    programs: dict[str, Callable[[], Any]] = {
        "placements": lambda: placements(mesh),
        "compiled loss": lambda: loss_of(mesh, (8, VOCABULARY), 0, compiled),
    }
    for reduction in ("mean", "sum", "none"):
        for shape, dim in (((8, VOCABULARY), 0), ((7, VOCABULARY), 0), ((3, VOCABULARY, 8), 2)):
            programs[f"{reduction} of {shape}, dim {dim}"] = partial(
                loss_of, mesh, shape, dim, F.cross_entropy, reduction=reduction
            )
    for placement in (Replicate(), Shard(0), Shard(1)):
        programs[f"attention {placement}"] = partial(attention, mesh, placement)
    results = {}
    for name, program in programs.items():
        try:
            results[name] = program()
        except (RuntimeError, ValueError, NotImplementedError):
            results[name] = REFUSED
    return results


def state() -> dict[str, Any]:
    """Return what torch keeps for the whole process, by the objects themselves."""
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    options = torchs._cp_options
    return {
        "handlers": dict(dispatcher._custom_op_handlers),
        "strategies": dict(propagator.op_strategy_funcs),
        "schemas": dict(propagator.op_to_schema_info),
        "losses": dict(parallel_loss.customized_loss_ops),
        "ring": dict(torchs.custom_ops) if hasattr(torchs, "custom_ops") else {},
        "process": {
            "attention": F.scaled_dot_product_attention,
            "balance": options.enable_load_balance,
            "excepthook": sys.excepthook,
            "grad": torch.is_grad_enabled(),
            "dtype": torch.get_default_dtype(),
            "seed": torch.initial_seed(),
            "threads": torch.get_num_threads(),
        },
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {value} -> {after[name]}"
        for name, value in before.items()
        if value != after[name]
    ]


def check(rank: int, store: str) -> list[str]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    mesh = init_device_mesh("cpu", (2,))
    results, kept = run_all(mesh), state()
    import cp_inductor

    changed = []
    for kind, entries in state().items():
        changed += [f"{kind} {line}" for line in differences(kept[kind], entries)]
        added = entries.keys() - kept[kind].keys()
        # A registration is of attention, and of nothing else.
        attentions = ("dot_product", "varlen_attn")
        others = [op for op in added if not any(name in str(op) for name in attentions)]
        changed += [f"{kind} {op}: new" for op in others]
    could = {name: result for name, result in results.items() if result is not REFUSED}
    assert len(could) > len(results) // 2, results
    changed += differences(could, run_all(mesh))
    assert cp_inductor.config.enabled
    dist.destroy_process_group()
    return changed


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = 0 if child else 1
        changed = check(rank, os.path.join(folder, "store"))
        for line in changed:
            print(f"rank {rank}: {line}", flush=True)
        if not child:
            os._exit(bool(changed))
        return 1 if os.waitpid(child, 0)[1] or changed else 0


if __name__ == "__main__":
    sys.exit(main())
