"""From torch's context_parallel: change one import, and name a backend.

    torchrun --standalone --nproc-per-node 2 examples/from_context_parallel.py

The loop is that of torch's tutorial. Instead of

    from torch.distributed.tensor.experimental import context_parallel

it has the import below, and `backend=`. With `--backend eager` nothing is compiled, and the same
region works.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from witness import Witness, local_ranks, parse_arguments

from cp_inductor import context_parallel


def main() -> None:
    args = parse_arguments(__doc__)
    with local_ranks() as device_type:
        mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("cp",))
        witness = Witness(args, device_type)
        model = witness.make_model()
        # Weights are the same on all ranks, gradients are averaged: to DDP, shards are batches.
        # Buffers are not the same, though: RoPE's tables are shards, too.
        run = DistributedDataParallel(
            model, process_group=mesh.get_group(), broadcast_buffers=False
        )
        if args.backend != "eager":
            run = torch.compile(run, backend=args.backend)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        for step in range(args.steps):
            whole = witness.draw(step, batch_size=2)
            ids, labels = (part.clone() for part in whole)
            with context_parallel(
                mesh,
                buffers=[ids, labels, model.cos, model.sin],
                buffer_seq_dims=[1, 1, 0, 0],
                # Used up by this step; RoPE's tables are needed whole again.
                no_restore_buffers={ids, labels},
            ):
                loss = run(ids, labels)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            witness.watch(step, *whole, loss)
        witness.report()


if __name__ == "__main__":
    main()
