"""What an installed package must compute, in any folder: attention of 2 gloo ranks beside float64.

    python after_install.py cp_inductor
    python after_install.py cp_inductor causal windowed       these cases alone

Nothing is imported from this folder: `tests/support/install_matrix.py` runs a copy of this file
where only what pip has installed can be found. Each case runs forward and backward, over DTensors,
through a backend of `torch.compile` that the package registers. The first line that is printed
names the first case that is wrong, or says that all are right.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

WORLD_SIZE = 2
BATCH, HEADS, LENGTH, HEAD_DIM, WINDOW, VOCABULARY = 2, 4, 24, 16, 5, 11
# A few hundred roundings of float32, relative to the largest magnitude.
TOLERANCE = 5e-6
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 5 + [1] * 4 + [2] * 15])


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def windowed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    index = torch.arange(query.shape[2])
    distance = index[:, None] - index[None]
    mask = (distance >= 0) & (distance < WINDOW)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def packed(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    index = torch.arange(query.shape[2])
    mask = (documents[:, :, None] == documents[:, None]) & (index[:, None] >= index[None])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])


class Layers(nn.Module):
    """Linear layers on a batch of more than one around an attention: what every model has."""

    def __init__(self) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        projected = (project(x) for project in (self.query, self.key, self.value))
        query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in projected)
        return self.head(causal(query, key, value).transpose(1, 2).flatten(2))


def check_attention(
    function: Callable[..., Tensor],
    backend: str,
    mesh: DeviceMesh,
    *tables: Tensor,
    options: dict[str, Any] | None = None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, HEADS, LENGTH, HEAD_DIM)
    *whole, grad_out = (torch.randn(shape, generator=generator) for _ in range(4))
    leaves = [tensor.double().requires_grad_() for tensor in whole]
    out = function(*leaves, *tables)
    expected = (out.detach(), *torch.autograd.grad(out, leaves, grad_out.double()))
    shards = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in whole]
    placed = [distribute_tensor(table, mesh, [Shard(1)]) for table in tables]
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)
    with implicit_replication():
        out = run(*shards, *placed)
        grads = torch.autograd.grad(out, shards, distribute_tensor(grad_out, mesh, [Shard(2)]))
    for name, actual, reference in zip(
        ("out", "dq", "dk", "dv"), (out.detach(), *grads), expected, strict=True
    ):
        compare(name, actual, reference)


def check_packed(backend: str, mesh: DeviceMesh) -> None:
    # Each backend makes one of the two kinds of plans; one for all batches is sooner compiled.
    options = {"plan": "static"} if backend == "cp_inductor" else None
    check_attention(packed, backend, mesh, DOCUMENTS, options=options)


def check_layers(backend: str, mesh: DeviceMesh) -> None:
    import cp_inductor

    torch.manual_seed(0)
    model, reference = Layers(), Layers().double()
    reference.load_state_dict(model.state_dict())
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    expected = reference(ids)
    expected.square().sum().backward()
    run = torch.compile(cp_inductor.parallelize(model, mesh), backend=backend, fullgraph=True)
    out = run(distribute_tensor(ids, mesh, [Shard(1)]))
    out.square().sum().backward()
    compare("out", out.detach(), expected.detach())
    distributed = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        grad = distributed[name].grad
        assert grad is not None and parameter.grad is not None
        compare(f"gradient of {name}", grad, parameter.grad)


def compare(name: str, actual: Tensor, expected: Tensor) -> None:
    assert isinstance(actual, DTensor)
    whole = actual.redistribute(placements=[Replicate()]).to_local()
    bound = TOLERANCE * max(1.0, expected.abs().max().item())
    difference = (whole.double() - expected).abs().max().item()
    if not difference <= bound:
        raise AssertionError(f"{name} is {difference:.2g} off, {bound:.2g} is allowed")


CASES: dict[str, Callable[[str, DeviceMesh], None]] = {
    "causal": lambda backend, mesh: check_attention(causal, backend, mesh),
    "windowed": lambda backend, mesh: check_attention(windowed, backend, mesh),
    "packed": check_packed,
    "layers": check_layers,
}


def run_rank(rank: int, backend: str, cases: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD_SIZE)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE, store=store)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("cp",))
    wrong = []
    for name in cases:
        torch._dynamo.reset()
        try:
            CASES[name](backend, mesh)
        except Exception as error:
            # Both ranks fail, or the other waits until its process group is gone.
            wrong.append(f"{name}: {type(error).__name__}: {first_line(error)}")
            if isinstance(error, dist.DistError):
                break
    (Path(folder) / f"{rank}.txt").write_text("\n".join(wrong))
    dist.destroy_process_group()


def first_line(error: Exception) -> str:
    lines: list[Any] = str(error).splitlines()
    return str(lines[0]) if lines else ""


def main() -> int:
    backend, *cases = sys.argv[1:]
    cases = cases or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(backend, cases, folder), nprocs=WORLD_SIZE)
        wrong = [
            line
            for rank in range(WORLD_SIZE)
            for line in (Path(folder) / f"{rank}.txt").read_text().splitlines()
        ]
    print("\n".join(wrong) or f"right: {', '.join(cases)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
