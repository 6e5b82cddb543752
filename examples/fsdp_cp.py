"""FSDP2 and context parallelism: weights sharded over all ranks, sequences over some.

    torchrun --standalone --nproc-per-node 4 examples/fsdp_cp.py

On the axis dp, ranks have different batches; on cp, they share each sequence. FSDP treats both as
data: it shards the weights over the two axes, flattened, and averages gradients over them. Blocks
are compiled one by one, so that the weights of one block are gathered while another computes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from witness import Witness, local_ranks, parse_arguments

import cp_inductor


def main() -> None:
    args = parse_arguments(__doc__)
    with local_ranks() as device_type:
        sizes = (dist.get_world_size() // 2, 2)
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("dp", "cp"))
        witness = Witness(args, device_type)
        model = witness.make_model()
        cp_inductor.parallelize(model, mesh["cp"], gradients="partial")
        both = mesh["dp", "cp"]._flatten("fsdp")
        for block in model.blocks:
            block.compile(backend=args.backend)
            fully_shard(block, mesh=both)
        fully_shard(model, mesh=both)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        for step in range(args.steps):
            whole = witness.draw(step, batch_size=mesh["dp"].size())
            ids, labels = (
                part.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()].clone() for part in whole
            )
            loss = model(ids, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            witness.watch(step, *whole, loss)
        witness.report()


if __name__ == "__main__":
    main()
