"""Tensor and context parallelism: heads and hidden units on one axis, the sequence on the other.

    torchrun --standalone --nproc-per-node 4 examples/tp_cp.py

It uses torch's own plan for a transformer, and a region around the step. Attention exchanges only
keys and values of this rank's heads, among the ranks that have the same heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from witness import Witness, local_ranks, parse_arguments

import cp_inductor

PLAN = {
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": ColwiseParallel(),
    "blocks.*.attention.value": ColwiseParallel(),
    "blocks.*.attention.out": RowwiseParallel(),
    "blocks.*.mlp.gate": ColwiseParallel(),
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": RowwiseParallel(),
}


def main() -> None:
    args = parse_arguments(__doc__)
    with local_ranks() as device_type:
        sizes = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("cp", "tp"))
        witness = Witness(args, device_type)
        model = parallelize_module(witness.make_model(), mesh["tp"], PLAN)
        compiled = torch.compile(model, backend=args.backend, fullgraph=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)

        for step in range(args.steps):
            whole = witness.draw(step, batch_size=2)
            ids, labels = (part.clone() for part in whole)
            with cp_inductor.context_parallel(
                mesh["cp"],
                buffers=[ids, labels, model.cos, model.sin],
                buffer_seq_dims=[1, 1, 0, 0],
            ):
                loss = compiled(ids, labels)
                (loss / mesh["cp"].size()).backward()
            cp_inductor.reduce_gradients(model, mesh["cp"])
            optimizer.step()
            optimizer.zero_grad()
            witness.watch(step, *whole, loss)
        witness.report()


if __name__ == "__main__":
    main()
