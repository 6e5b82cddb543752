"""How ranks share known recurrences: of fla, mamba_ssm, causal_conv1d, and transformers.

None of them is imported. Signatures are those of fla 0.4, mamba_ssm 2.2 and causal_conv1d 1.5, with
whose stand-ins the forms are tested: they need a GPU. `transformers_recurrences` names those of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cp_inductor.errors import UnsupportedPlacement
from cp_inductor.modules.along_sequence import pass_states, shared_sequence, tokens_before
from cp_inductor.modules.recurrences import forms_of_packages


def share_keyed(function: Any, *, is_exact: bool = False, **arguments: Any) -> tuple[Tensor, Any]:
    """Share a recurrence of keys and values: delta rules, gated linear attention, retention.

    Its state is (B, H, K, V). Each column of the state depends on the same column of the values
    alone. So one call with K more columns, whose values are zeros and whose state begins as the
    identity, finds what becomes of any state, and what each query reads of it.

    Args:
        function: takes queries (B, S, H, K), keys (B, S, H, K), values (B, S, H, V),
            `initial_state`, `output_final_state`, and what else it likes; returns (B, S, H, V) and
            the final state.
        is_exact: whether it computes in float32 whatever it is given. Then it is given queries in
            float32, so that what it returns is rounded once.
    """
    names = ("q", "k", "v") if "q" in arguments else ("query", "key", "value")
    query, key, value = (arguments.pop(name) for name in names)
    initial = arguments.pop("initial_state", None)
    is_final_asked = arguments.pop("output_final_state", False)
    # The last three are a state of (B, H, V, K), in older and newer versions, and a third result.
    refused = ("head_first", "cp_context", "reverse", "gv", "transpose_state_layout")
    _refuse(function, arguments, *refused, "state_v_first", "return_intermediate_states")
    beta = arguments.get("beta")
    if beta is not None and beta.ndim == value.ndim:  # one for each column
        _refuse(function, arguments, "beta")
    num_keys, num_heads, num_values = key.shape[-1], value.shape[-2], value.shape[-1]
    dtype = torch.promote_types(value.dtype, torch.float32)
    identity = torch.eye(num_keys, dtype=dtype, device=value.device)
    start = F.pad(identity, (num_values, 0)).expand(key.shape[0], num_heads, -1, -1)
    if arguments.get("cu_seqlens") is not None:
        if initial is not None or is_final_asked:
            _refuse_states(function, "of packed documents")
        arguments["cu_seqlens"], start = _own_documents(arguments["cu_seqlens"], start)
        for derived in ("cu_seqlens_cpu", "chunk_indices"):  # of all ranks
            arguments.pop(derived, None)
    out, final = function(
        **dict(zip(names, (query.float() if is_exact else query, key), strict=False)),
        **{names[2]: F.pad(value, (0, num_keys))},
        **arguments,
        initial_state=start.contiguous(),
        output_final_state=True,
    )
    # A copy: a part of `out` that is kept for the backward would keep all of it.
    out, reads = (part.contiguous() for part in out.split([num_values, num_keys], -1))
    final, matrix = final[-key.shape[0] :].split([num_values, num_keys], -1)
    before, after = pass_states(final, matrix=matrix, initial=initial)
    out = out + _read("bshk,bhkv->bshv", reads.to(dtype), before)
    return out.to(query.dtype), after if is_final_asked else None


def _own_documents(borders: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the borders of documents among this rank's tokens, and the state of each.

    The state before this rank reaches the first of them, unless that begins here.
    """
    sequence = shared_sequence()
    assert sequence is not None
    first = sum(sequence.lengths[: sequence.rank])
    length = max(sequence.lengths[sequence.rank], 1)
    ends = borders.new_tensor([0, length])
    own = torch.cat([ends[:1], (borders - first).clamp(0, length), ends[1:]]).unique_consecutive()
    begins = (borders == first).any()
    rest = start.new_zeros(own.shape[0] - 2, *start.shape[1:])
    return own.to(borders.dtype), torch.cat([torch.where(begins, 0.0, start), rest])


def share_chunk_scan(function: Any, **arguments: Any) -> Any:
    """Share the scan of Mamba 2, whose state is (B, H, P, N) and whose decay is one per head.

    The function is `mamba_chunk_scan_combined`, or `mamba2_chunk_scan` of transformers.
    """
    initial = arguments.pop("initial_states", None)
    is_final_asked = arguments.pop("return_final_states", False)
    _refuse(function, arguments, "cu_seqlens", "return_varlen_states")
    if arguments.get("seq_idx") is not None and (initial is not None or is_final_asked):
        _refuse_states(function, "of packed documents")
    out, final = function(**arguments, return_final_states=True)
    dtype = torch.promote_types(final.dtype, torch.float32)
    steps, rate, reads = arguments["dt"], arguments["A"], arguments["C"]
    if arguments.get("dt_bias") is not None:
        steps = steps + arguments["dt_bias"].to(steps.dtype)
    if arguments.get("dt_softplus"):
        steps = F.softplus(steps)
    steps = steps.clamp(*arguments.get("dt_limit", (0.0, float("inf")))).to(dtype)
    # (B, S, H): what remains of the state before, when a token reads it.
    remaining = torch.exp(torch.cumsum(steps * rate.to(dtype), 1))
    if arguments.get("seq_idx") is not None:
        numbers = arguments["seq_idx"]
        # Tokens (B, S) of the document in which the rank before ends.
        goes_on = (numbers != tokens_before(numbers, 1, 1)).cumsum(1) == 0
        remaining = remaining * goes_on[..., None]
    before, after = pass_states(final, decay=remaining[:, -1, :, None, None], initial=initial)

    def read(remaining: Tensor, reads: Tensor, before: Tensor, gate: Tensor | None) -> Tensor:
        by_group = before.unflatten(1, (reads.shape[2], -1))
        read = _read("bsgn,bghpn->bsghp", reads.to(dtype), by_group).flatten(2, 3)
        read = read * remaining[..., None]
        return read if gate is None else read * F.silu(gate.to(dtype))

    out = out + _keeping_arguments(read, remaining, reads, before, arguments.get("z")).to(out.dtype)
    return (out, after) if is_final_asked else out


def share_selective_scan(function: Any, **arguments: Any) -> Any:
    """Share the scan of Mamba 1, whose state is (B, D, N) and whose decay is one for each element.

    The function is `selective_scan_fn`, or `mamba_selective_scan` of transformers.
    """
    is_final_asked = arguments.pop("return_last_state", False)
    out, final = function(**arguments, return_last_state=True)
    steps = arguments["delta"] if "delta" in arguments else arguments["dt"]
    rate, reads = arguments["A"], arguments["C"]
    if rate.is_complex() or reads.ndim != 3:
        got = f"A in {rate.dtype}, and C of {tuple(reads.shape)}"
        raise _refused(function, "a real A, and C of (B, N, S)", got, "pass others")
    bias, is_softplus = arguments.get("delta_bias"), arguments.get("delta_softplus")
    dtype = torch.promote_types(final.dtype, torch.float32)

    def total(steps: Tensor, bias: Tensor | None) -> Tensor:  # (B, D, S)
        steps = steps if bias is None else steps + bias.to(steps.dtype)[..., None]
        return torch.cumsum((F.softplus(steps) if is_softplus else steps).to(dtype), -1)

    def decay(steps: Tensor, bias: Tensor | None, rate: Tensor) -> Tensor:
        return torch.exp(rate * total(steps, bias)[..., -1, None])

    def read(
        *of_total: Any, rate: Tensor, reads: Tensor, before: Tensor, gate: Tensor | None
    ) -> Tensor:
        remaining = torch.exp(rate[:, None] * total(*of_total)[..., None])  # (B, D, S, N)
        read = _read("bdsn,bns,bdn->bds", remaining, reads.to(dtype), before)
        return read if gate is None else read * F.silu(gate.to(dtype))

    left = _keeping_arguments(decay, steps, bias, rate)
    before, after = pass_states(final, decay=left)
    more = {"rate": rate, "reads": reads, "before": before, "gate": arguments.get("z")}
    out = out + _keeping_arguments(read, steps, bias, **more).to(out.dtype)
    return (out, after.to(final.dtype)) if is_final_asked else out


def share_gated(
    function: Any, tokens: Tensor, decay: Tensor, reset: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Share a recurrence of gates, state' = decay * state + token, as of RG-LRU and RNNs like it.

    Args:
        function: takes tokens, decays and resets of this rank, and returns outputs and the final
            state, from a state of zeros.
        tokens, decay: (B, S, D).
        reset: (B, S, 1) bool: where the state is forgotten, whatever `decay` is.
        initial: (B, D), before the first token of all.
    """
    out, final = function(tokens, decay, reset)
    dtype = torch.promote_types(final.dtype, torch.float32)

    def remaining(decay: Tensor) -> Tensor:
        logs = decay.to(dtype).clamp(min=torch.finfo(dtype).tiny).log().masked_fill(reset, 0.0)
        return torch.where(reset.cumsum(1) == 0, logs.cumsum(1).exp(), 0.0)

    left = _keeping_arguments(lambda decay: remaining(decay)[:, -1], decay)
    before, after = pass_states(final, decay=left, initial=initial)
    read = _keeping_arguments(lambda d, state: remaining(d) * state[:, None], decay, before)
    return out + read.to(out.dtype), after


def share_short_convolution(function: Any, **arguments: Any) -> Tensor:
    """Share a causal convolution of each channel: the K - 1 tokens before this rank's come first.

    The function is `causal_conv1d_fn`, of x (B, C, S) and a weight (C, K).
    """
    _refuse(function, arguments, "initial_states", "return_final_states", "final_states_out")
    name = "x" if "x" in arguments else "hidden_states"
    tokens, count = arguments.pop(name), arguments["weight"].shape[-1] - 1
    if arguments.get("seq_idx") is not None:
        numbers = arguments["seq_idx"]
        arguments["seq_idx"] = torch.cat([tokens_before(numbers, count, 1), numbers], 1)
    longer = torch.cat([tokens_before(tokens, count, 2), tokens], 2)
    out: Tensor = function(**{name: longer}, **arguments)
    return out[..., count:]


def _read(equation: str, *tensors: Tensor) -> Tensor:
    """Return what tokens read of a state, in its dtype, also where a region casts products."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        return torch.einsum(equation, *tensors)


def _keeping_arguments(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Call a function of which nothing is kept for the backward but what it is given.

    What tokens read of a state passes through tensors as large as what the recurrence itself keeps.
    Compilers decide for themselves what they keep.
    """
    if torch.compiler.is_compiling():
        return function(*args, **kwargs)
    options: Any = {"use_reentrant": False, "preserve_rng_state": False}
    again: Tensor = checkpoint(function, *args, **options, **kwargs)
    return again


def share_nothing(function: Any, **arguments: Any) -> None:
    """Stand in for a fused kernel that has no part to share: None, so that its parts are called."""


def refuse_steps(function: Any, **arguments: Any) -> Any:
    """Refuse a function of one token, which goes on from a state that all ranks have."""
    _refuse_states(function, "for a single token")


def _refuse(function: Any, arguments: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if arguments.get(name) is not None and arguments[name] is not False:
            got = f"{name}={type(arguments[name]).__name__}"
            expected = "a call of which ranks can compute their parts"
            raise _refused(function, expected, got, "leave it out")


def _refuse_states(function: Any, what: str) -> None:
    expected = "a sequence that begins without a state, and whose state nobody asks for"
    raise _refused(function, expected, f"a state {what}", "pass use_cache=False")


def _refused(function: Any, expected: str, got: str, way: str) -> UnsupportedPlacement:
    site = getattr(function, "__name__", type(function).__name__)
    remedy = f"{way}, or name the module that calls it in parallelize(..., whole=)"
    return UnsupportedPlacement(site=site, expected=expected, got=got, remedy=remedy)


# fla has two of each: one computes in chunks, the other goes from token to token.
KEYED = (
    *("gated_delta_rule", "kda", "delta_rule", "gla", "simple_gla", "lightning_attn", "retention"),
)
KINDS = ("chunk", "fused_recurrent")

# Modules that call these libraries may be named in `parallelize(..., recurrent=)`.
forms_of_packages["fla"] = {f"{kind}_{name}": share_keyed for name in KEYED for kind in KINDS}
forms_of_packages["mamba_ssm"] = {
    "mamba_chunk_scan_combined": share_chunk_scan,
    "selective_scan_fn": share_selective_scan,
    "selective_state_update": refuse_steps,
}
forms_of_packages["causal_conv1d"] = {
    "causal_conv1d_fn": share_short_convolution,
    "causal_conv1d_update": refuse_steps,
}
