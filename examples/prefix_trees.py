"""Policy gradients on groups of answers: each prompt is stored once, over a sharded sequence.

    torchrun --standalone --nproc-per-node 2 examples/prefix_trees.py

A small Qwen3 answers prompts of bytes. Each prompt and its answers are a prefix tree, and a batch
is one row of trees over all ranks. The loss is a policy gradient with a KL term against the first
model. Every step is compared with the same step on unpacked rows, in which each answer has its own
copy of the prompt, on one process.

The loss of step 0 is 0: the advantages of a group add up to 0, all ratios are 1, and the policy
still is the first model. Its gradient is not 0, so the norm is printed as well.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import cp_inductor

BETA = 0.1
Group = tuple[list[int], list[list[int]]]  # a prompt and its answers


def make_model(seq_len: int) -> transformers.PreTrainedModel:
    """Return a small random model."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=seq_len,
        attn_implementation="sdpa",
    )
    return transformers.Qwen3ForCausalLM(config)


def draw_groups(step: int, num_answers: int) -> list[Group]:
    """Return two prompts and their answers, which stand for what a policy has generated."""
    draw = torch.Generator().manual_seed(step)

    def tokens(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(0, 256, (length,), generator=draw).tolist()

    return [(tokens(60, 120), [tokens(1, 30) for _ in range(num_answers)]) for _ in range(2)]


def advantages_of(group: Group) -> list[float]:
    """Reward small bytes; normalize over the group."""
    rewards = torch.tensor([sum(token < 128 for token in one) / len(one) for one in group[1]])
    return ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()


def loss_of(log_probs: list[Tensor], before: list[Tensor], advantages: list[float]) -> Tensor:
    """Return the mean over answers of a policy gradient and a KL term, each a mean over tokens."""
    losses = []
    for one, other, advantage in zip(log_probs, before, advantages, strict=True):
        divergence = (other - one).exp() - (other - one) - 1
        losses.append((-(one - one.detach()).exp() * advantage + BETA * divergence).mean())
    return torch.stack(losses).mean()


def of_trees(model: nn.Module, groups: list[Group]) -> list[Tensor]:
    """Return the log-probabilities of each answer, from one row of prefix trees."""
    batch = cp_inductor.pad_packed(cp_inductor.pack_prefix_trees(groups))
    log_probs = cp_inductor.token_logprobs(
        model,
        batch["input_ids"],
        batch["labels"],
        position_ids=batch["position_ids"],
        attention_mask=batch["attention_mask"],
    )
    return [log_probs[0, begin:end] for _, node, begin, end in batch["spans"].tolist() if node]


def of_rows(model: nn.Module, groups: list[Group]) -> list[Tensor]:
    """Return the same from a row for each answer."""
    found = []
    for prompt, answers in groups:
        for answer in answers:
            ids = torch.tensor([prompt + answer])
            found.append(cp_inductor.token_logprobs(model, ids, ids)[0, len(prompt) :])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--backend", default="cp_inductor")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = make_model(1024)
    whole, first = copy.deepcopy(model), copy.deepcopy(model)
    policy, reference = model, copy.deepcopy(model)
    for one in (policy, reference):
        cp_inductor.accept_prefix_trees(one)
        cp_inductor.distribute(one, mesh)
        one.base_model.compile(backend=args.backend, fullgraph=True, dynamic=False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (policy, whole)]
    worst = 0.0
    for step in range(args.steps):
        groups = draw_groups(step, args.answers)
        advantages = [one for group in groups for one in advantages_of(group)]
        losses, norms = [], []
        for one, before, compute, optimizer in (
            (policy, reference, of_trees, optimizers[0]),
            (whole, first, of_rows, optimizers[1]),
        ):
            with torch.no_grad():
                fixed = compute(before, groups)
            loss = loss_of(compute(one, groups), fixed, advantages)
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in one.parameters()])
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            optimizer.step()
            losses.append(loss.item())
        differences = [abs(losses[0] - losses[1]), abs(norms[0] - norms[1])]
        for p, q in zip(policy.parameters(), whole.parameters(), strict=True):
            held = p.full_tensor() if isinstance(p, DTensor) else p
            differences.append(float((held - q).detach().abs().max()))
        worst = max(worst, *differences)
        if dist.get_rank() == 0:
            tokens = sum(len(prompt) + sum(map(len, answers)) for prompt, answers in groups)
            rows = sum(len(prompt) + len(one) for prompt, answers in groups for one in answers)
            why = "" if step else " (advantages add up to 0, and no weight has changed)"
            print(
                f"step {step}  loss {losses[0]:.6f}{why}  gradient's norm {norms[0]:.4f}"
                f"  tokens {tokens}, unpacked {rows}",
                flush=True,
            )
    if dist.get_rank() == 0:
        print(f"largest difference of losses, norms and weights {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
