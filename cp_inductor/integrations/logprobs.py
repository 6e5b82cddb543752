"""Log-probabilities of given tokens, without logits of the whole sequence.

    hidden (B, S, H) [Shard(1)], labels (B, S)
      =>
    each rank, for its own tokens that have labels, some at a time:
    logits (n, V) = head(hidden), log_softmax, the label's entry     ->  (B, S), gathered

What is below the head may be compiled in place; the head runs in eager code, over a rank's own
tokens. If gradients are needed, the backward computes the logits of each part again.

Assumes: a causal language model with `base_model` and `get_output_embeddings`, as transformers
(5.23) has them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from cp_inductor.dtensor.shard import shard
from cp_inductor.dtensor.wrap import wrap_parts
from cp_inductor.errors import InvalidArgument
from cp_inductor.integrations.token_ids import check_ids, check_rows
from cp_inductor.torch_private.dtensor import plain_for_replicated

IGNORED_LABEL = -100
# Logits that are made at once, in numbers: 256 MiB in float32.
NUM_LOGITS = 1 << 26
# What configurations call factors of logits; `final_logit_softcapping` is computed here.
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")


def token_logprobs(
    model: Any,
    ids: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    num_tokens: int | None = None,
    **inputs: Any,
) -> Tensor:
    """Return the log-probability of each label, given the tokens before it.

        model.base_model.compile(backend="cp_inductor", fullgraph=True, dynamic=False)
        log_probs = cp_inductor.token_logprobs(model, ids, labels)
        perplexity = (-log_probs.sum() / (labels[:, 1:] != -100).sum()).exp()

    It is differentiable, and equals one process: if the model was distributed, every rank computes
    its own tokens, and gets the log-probabilities of all. Logits exist for a part of a rank's
    tokens at a time.

    Args:
        model: a causal language model of transformers, on one process or distributed by
            `distribute`. What is below its head may be compiled, in place as above. Over shards,
            any mask but a causal one needs that.
        ids: (B, S), int64, the same on every rank: plain, or a DTensor.
        labels: (B, S): the token itself, or -100, as such models take them; also of other tokens.
        temperature: logits are divided by it.
        num_tokens: whose logits are made at once; None makes 2^26 numbers at once.
        inputs: what else the model takes, such as `position_ids` and `attention_mask`. If the model
            was distributed, plain tensors whose last dim is S are sharded there; others are passed
            on.

    Returns:
        (B, S), plain and whole on every rank, in float32, or float64 if the model is: entry i is
        log p(labels[i] | ids before i). It is 0 where the label is -100, and for the first token.

    Raises:
        InvalidArgument: the model is what `torch.compile(model)` returned, whose logits are in its
            graph; it has no head to be taken off; or it scales logits in a way that is not known.
            Ids or labels are not in its vocabulary; then every rank raises.
    """
    _check(model)
    labels = labels.full_tensor() if isinstance(labels, DTensor) else labels
    following = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    _check_ids(model, ids, labels)
    mesh = _mesh_of(model, ids)
    given = {"input_ids": ids, **inputs}
    if mesh is not None:
        length = ids.shape[1]
        given = {name: _sharded(value, mesh, length) for name, value in given.items()}
        following = shard(following, mesh).to_local()
    with nullcontext() if mesh is None else plain_for_replicated():
        hidden = model.base_model(**given, use_cache=False).last_hidden_state
    if mesh is not None:  # a sequence that is shorter than the ranks may come whole
        hidden = hidden.redistribute(mesh, [Shard(1)])
    local = hidden.to_local() if isinstance(hidden, DTensor) else hidden
    found = _of_tokens(model, local, following, temperature, num_tokens)
    if mesh is not None:
        parts = wrap_parts(found, mesh, hidden.placements, labels.shape)
        found = parts.redistribute(mesh, [Replicate()]).to_local()
    return F.pad(found[:, :-1], (1, 0))


def _check(model: Any) -> None:
    name = type(model).__name__
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise _refusal(
            name,
            "a model that is compiled below its head",
            "what torch.compile(model) returned",
            "call model.base_model.compile(...) instead, and give the model",
        )
    has_head = hasattr(model, "base_model") and hasattr(model, "get_output_embeddings")
    if not has_head or model.base_model is model or model.get_output_embeddings() is None:
        remedy = "give a ...ForCausalLM of transformers"
        raise _refusal(name, "base_model and get_output_embeddings()", "no head", remedy)
    config = model.config.get_text_config()
    scaled = [n for n in FACTORS if getattr(config, n, None) not in (None, 1.0)]
    if scaled:
        remedy = "compute the model's own logits"
        raise _refusal(name, "logits that are the head's", ", ".join(scaled), remedy)


def _check_ids(model: Any, ids: Tensor, labels: Tensor) -> None:
    site, head = f"token_logprobs of {type(model).__name__}", model.get_output_embeddings()
    check_ids(ids, model, site)
    if isinstance(head, nn.Linear):
        asked = labels.masked_fill(labels == IGNORED_LABEL, 0)
        check_rows(asked, head.out_features, site, "labels that are -100, or")


def _refusal(site: str, expected: str, got: str, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        site=f"token_logprobs of {site}", expected=expected, got=got, remedy=remedy
    )


def _mesh_of(model: Any, ids: Tensor) -> DeviceMesh | None:
    """Return the ranks that share the sequence."""
    head = model.get_output_embeddings().weight
    for one in (ids, head):
        if isinstance(one, DTensor):
            return one.device_mesh
    return None


def _sharded(value: Any, mesh: DeviceMesh, length: int) -> Any:
    is_plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not is_plain or not value.ndim or value.shape[-1] != length:
        return value
    return shard(value, mesh, -1)


def _of_tokens(
    model: Any, hidden: Tensor, labels: Tensor, temperature: float, num_tokens: int | None
) -> Tensor:
    """Return (B, s): the log-probabilities of labels, from hidden states (B, s, H)."""
    head = model.get_output_embeddings()
    weight, bias = (_local(getattr(head, name, None)) for name in ("weight", "bias"))
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def part(states: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        logits = F.linear(states, weight, bias)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return -F.cross_entropy(logits, ids, reduction="none")

    is_counted = labels != IGNORED_LABEL
    states, ids = hidden[is_counted], labels[is_counted]
    size = num_tokens or max(1, NUM_LOGITS // weight.shape[0])
    found = [
        checkpoint(part, *pair, weight, bias, use_reentrant=False)
        for pair in zip(states.split(size), ids.split(size), strict=True)
    ]
    values = torch.cat(found)
    return values.new_zeros(labels.shape).masked_scatter(is_counted, values)


def _local(parameter: Tensor | None) -> Any:
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
