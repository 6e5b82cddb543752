"""Train a byte-level GPT on a sequence-sharded batch, and check it against the unsharded model.

    torchrun --standalone --nproc-per-node 2 examples/train_text.py

The model is plain PyTorch. Context parallelism is one call, `cp_inductor.parallelize`, and the name
of the backend: every rank computes a piece of each sequence, and the compiler makes attention see
all of it.

With `--checkpoints FOLDER` a training that is killed goes on where it was: examples/checkpoints.py.

The text is real and on every machine: the sources of Python's standard library.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoints import Checkpoints
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from tqdm import tqdm

import cp_inductor

matplotlib.use("Agg")
from matplotlib import pyplot as plt

VOCABULARY = 256  # bytes


# --- The model: RMSNorm, RoPE, grouped-query attention, SwiGLU -------------------------------


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    max_seq_len: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rotary_angles(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cos and sin, (S, D), for every position of the whole sequence."""
    frequencies = 10_000 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = torch.outer(torch.arange(shape.max_seq_len), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head, x (B, S, H, D), by the angles of its position."""
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-right, left), dim=-1) * sin[:, None]


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_dim = shape.kv_heads * shape.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, kv_dim, bias=False)
        self.value = nn.Linear(shape.dim, kv_dim, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (-1, self.shape.head_dim)
        query, key, value = (
            project(x).unflatten(-1, heads) for project in (self.query, self.key, self.value)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return self.out(out.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = 8 * dim // 3
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.dim)
        self.mlp = SwiGLU(shape.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Next-byte prediction: ids and labels (B, S) to the mean loss over all B x S bytes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim)
        self.head = nn.Linear(shape.dim, VOCABULARY, bias=False)
        for name, angles in zip(("cos", "sin"), rotary_angles(shape), strict=True):
            self.register_buffer(name, angles, persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        cos, sin = (angles[: ids.shape[1]].to(x.dtype) for angles in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.transpose(1, 2), labels)


# --- Text ------------------------------------------------------------------------------------


def read_text(max_bytes: int = 4_000_000) -> Tensor:
    """Return the standard library's sources as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if not skipped.intersection(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def draw_batch(text: Tensor, batch_size: int, seq_len: int, step: int) -> Tensor:
    """Return (B, S + 1) bytes from places that depend on the step alone: the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - seq_len - 1, (batch_size,), generator=generator)
    return torch.stack([text[at : at + seq_len + 1] for at in starts.tolist()]).long()


# --- Training, with the unsharded model as a witness -----------------------------------------


@dataclass(frozen=True)
class Difference:
    """Sharded against unsharded."""

    loss: float  # relative
    gradient: float  # largest over all parameters, relative to the largest gradient of each
    expected: float  # loss of the unsharded model


def compare(model: nn.Module, witness: GPT, batch: Tensor, loss: float) -> Difference:
    """Run the witness, plain and whole, on the weights and the batch of the sharded model."""
    if dist.get_rank() != 0:
        return Difference(0.0, 0.0, 0.0)
    for sharded, whole in zip(model.parameters(), witness.parameters(), strict=True):
        whole.data.copy_(sharded)
    expected = witness(batch[:, :-1], batch[:, 1:])
    expected_gradients = torch.autograd.grad(expected, list(witness.parameters()))
    return Difference(
        abs(loss - expected.item()) / abs(expected.item()),
        max(
            ((got.grad - want).abs().max() / want.abs().max()).item()
            for got, want in zip(model.parameters(), expected_gradients, strict=True)
        ),
        expected.item(),
    )


@dataclass(frozen=True)
class Run:
    """What a training run left behind."""

    losses: list[float]
    first: int  # step that this process began with; the losses before are of the checkpoint
    differences: dict[int, Difference]
    seconds: float  # without the first step, which compiles


def train(args: argparse.Namespace, mesh: DeviceMesh) -> Run:
    shape = Shape(args.layers, args.dim, args.heads, args.kv_heads, args.seq_len)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    torch.manual_seed(args.seed)  # the same weights on every rank
    model = GPT(shape).to(mesh.device_type, dtype)
    witness = GPT(shape).to(mesh.device_type, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    cp_inductor.parallelize(model, mesh)
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)
    text = read_text().to(mesh.device_type)

    checkpoints = Checkpoints(
        args.checkpoints, args.checkpoint_every, {"sharded": (model, optimizer)}
    )
    losses = checkpoints.resume()
    first, differences = len(losses), dict[int, Difference]()
    start, paused = time.perf_counter(), 0.0
    is_first_rank = dist.get_rank() == 0
    if is_first_rank:
        print(
            "step 0 compiles: on two cores up to a minute",
            flush=True,
        )
        said = threading.Event()
        threading.Thread(target=say_that_it_compiles, args=(said,), daemon=True).start()
    # A bar on a terminal alone: in a log it would be a line for each of its moves.
    steps = tqdm(range(first, args.steps), disable=None if is_first_rank else True)
    for step in steps:
        batch = draw_batch(text, args.batch_size, args.seq_len, step)
        optimizer.zero_grad()
        loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        losses.append(loss.item())
        if is_first_rank:
            said.set()
        if step % args.check_every == 0:
            before = time.perf_counter()
            differences[step] = compare(model, witness, batch, losses[-1])
            paused += time.perf_counter() - before
            if is_first_rank:
                steps.write(
                    f"step {step:4d}  loss {losses[-1]:.4f}  relative difference from the unsharded"
                    f" model: loss {differences[step].loss:.1e},"
                    f" gradients {differences[step].gradient:.1e}"
                )
        optimizer.step()
        checkpoints.save(losses)
        if step == first:
            start, paused = time.perf_counter(), 0.0
    checkpoints.finish()
    return Run(losses, first, differences, time.perf_counter() - start - paused)


def say_that_it_compiles(is_done: threading.Event) -> None:
    """Print every few seconds for how long step 0 has been compiling."""
    start = time.perf_counter()
    while not is_done.wait(5):
        print(f"  compiling since {time.perf_counter() - start:.0f} s", flush=True)


def report(args: argparse.Namespace, run: Run) -> None:
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(run.losses, label="sharded")
    whole = {step: difference.expected for step, difference in run.differences.items()}
    axes.plot([*whole], [*whole.values()], "o", fillstyle="none", label="not sharded")
    axes.legend()
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Byte-level GPT, sharded sequence")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(folder / "train_text.png", dpi=120)

    tokens = max(0, len(run.losses) - run.first - 1) * args.batch_size * args.seq_len
    seen = counters["cp_inductor"]
    print(f"loss                  {run.losses[0]:.4f} -> {run.losses[-1]:.4f}")
    print(f"tokens/s              {tokens / run.seconds:.0f} on {dist.get_world_size()} ranks")
    print(f"bytes sent per step   {seen['bytes_sent']} by rank 0 for attention")
    print(f"attentions rewritten  {seen['sites_rewritten']}")
    print(f"loss curve            {folder / 'train_text.png'}")


def check(args: argparse.Namespace, run: Run) -> None:
    worst = max((difference.loss for difference in run.differences.values()), default=0.0)
    if args.dtype == "fp32" and worst > 1e-5:
        raise SystemExit(f"the loss differs from the unsharded one by {worst:.1e}, more than 1e-5")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=1024, help="of the whole sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--backend", default="cp_inductor", help="or cp_aot_eager, to debug")
    parser.add_argument("--check-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", metavar="FOLDER", help="to resume from if there are any")
    parser.add_argument("--checkpoint-every", type=int, default=5, metavar="STEPS")
    parser.add_argument("--out", default="runs", help="folder of the loss curve")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    world_size = int(os.environ["WORLD_SIZE"])
    if device_type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("cp",))
        run = train(args, mesh)
        if dist.get_rank() == 0:
            report(args, run)
            check(args, run)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
