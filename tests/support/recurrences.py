"""Recurrences with random arguments, and what each computes in float64, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_inductor.integrations.recurrence_forms import (
    share_chunk_scan,
    share_gated,
    share_keyed,
    share_selective_scan,
    share_short_convolution,
)
from cp_inductor.modules.along_sequence import SharedSequence
from cp_inductor.modules.reading import computing_with
from tests.support.ranks import world_mesh
from tests.support.reference import shard

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Recurrence:
    """A function and its form.

    Attributes:
        share: the form, given the function.
        function: returns the function, which is imported where it is called.
        draw: random arguments, given a generator, a length, and a decay between 0 and 1.
        dims: the dim of the sequence, of each argument that has one; also of "out".
        steps: the outputs in float64, given all arguments in float64.
        state_flag, initial: arguments that ask for the last state, and give the first.
    """

    share: Callable[..., Any]
    function: Callable[[], Any]
    draw: Callable[[torch.Generator, int, float], Arguments]
    dims: Mapping[str, int]
    steps: Callable[..., tuple[Tensor, Tensor | None]]
    more: Mapping[str, Any]
    state_flag: str | None = None
    initial: str | None = None


def _sizes(generator: torch.Generator, *most: int) -> list[int]:
    return [int(torch.randint(1, size + 1, (), generator=generator)) for size in most]


def _logs(generator: torch.Generator, shape: tuple[int, ...], decay: float) -> Tensor:
    """Return logarithms of decays around one, some of which are much smaller."""
    spread = torch.rand(shape, generator=generator) * 2
    return torch.log(torch.tensor(decay)) * spread


def _draw_delta(
    generator: torch.Generator, length: int, decay: float, *, by_key: bool
) -> Arguments:
    batch, heads, groups, keys, values = _sizes(generator, 2, 2, 2, 8, 8)
    groups = 1 if by_key else groups
    normal = partial(torch.randn, generator=generator)
    shape = (batch, length, heads * groups, *((keys,) if by_key else ()))
    return {
        "query": F.normalize(normal(batch, length, heads, keys), dim=-1),
        "key": F.normalize(normal(batch, length, heads, keys), dim=-1),
        "value": normal(batch, length, heads * groups, values),
        "g": _logs(generator, shape, decay),
        "beta": torch.rand(batch, length, heads * groups, generator=generator),
        "initial_state": normal(batch, heads * groups, keys, values),
    }


def delta_steps(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    groups = value.shape[2] // key.shape[2]
    query, key = (t.repeat_interleave(groups, 2) for t in (query, key))
    query = query / query.shape[-1] ** 0.5
    state = value.new_zeros(*value.shape[:1], value.shape[2], key.shape[-1], value.shape[-1])
    state = state if initial_state is None else initial_state
    outs = []
    for t in range(query.shape[1]):
        decay = g[:, t].exp()
        state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        correction = value[:, t] - torch.einsum("bhk,bhkv->bhv", key[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t] * beta[:, t, :, None], correction)
        outs.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state))
    return torch.stack(outs, 1), state


def _draw_linear(generator: torch.Generator, length: int, decay: float, *, kind: str) -> Arguments:
    batch, heads, keys, values = _sizes(generator, 2, 3, 8, 8)
    normal = partial(torch.randn, generator=generator)
    more: Arguments = {"layer_idx": 1, "num_layers": 3}
    if kind == "gla":
        more = {"g": _logs(generator, (batch, length, heads, keys), decay)}
    if kind == "simple_gla":
        more = {"g": _logs(generator, (batch, length, heads), decay)}
        more["g_gamma"] = _logs(generator, (heads,), decay)
    return {
        "q": normal(batch, length, heads, keys),
        "k": normal(batch, length, heads, keys),
        "v": normal(batch, length, heads, values),
        **more,
        "initial_state": normal(batch, heads, keys, values),
    }


def _states(decay: Tensor, added: Tensor, initial: Tensor | None) -> Tensor:
    """Return the states (B, S, ...) of ``state = decay * state + added``, token by token."""
    state = torch.zeros_like(added[:, 0]) if initial is None else initial
    states = []
    for t in range(added.shape[1]):
        state = decay[:, t] * state + added[:, t]
        states.append(state)
    return torch.stack(states, 1)


# Stand-ins with the signatures of fla (August 2026), whose kernels need a GPU.


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor]:
    states = _states(g.exp()[..., None], k[..., None] * v[..., None, :], initial_state)
    out = torch.einsum("bshk,bshkv->bshv", q, states)
    return out * (q.shape[-1] ** -0.5 if scale is None else scale), states[:, -1]


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    logs = torch.zeros_like(k[..., 0])
    logs = logs if g is None else logs + g
    logs = logs if g_gamma is None else logs + g_gamma
    return chunk_gla(q, k, v, logs[..., None].expand_as(k), **more)


def chunk_lightning_attn(
    q: Tensor, k: Tensor, v: Tensor, layer_idx: int, num_layers: int, **more: Any
) -> tuple[Tensor, Tensor]:
    heads = torch.arange(q.shape[2], dtype=q.dtype)
    rate = -8 / q.shape[2] * (1 - layer_idx / num_layers)
    return chunk_simple_gla(q, k, v, g_gamma=rate * heads, **more)


def _draw_mamba2(generator: torch.Generator, length: int, decay: float) -> Arguments:
    batch, groups, per_group, width, size = _sizes(generator, 2, 2, 2, 6, 6)
    heads = groups * per_group
    normal = partial(torch.randn, generator=generator)
    # With steps of about 0.7 = softplus(0).
    return {
        "hidden_states": normal(batch, length, heads, width),
        "dt": normal(batch, length, heads) * 0.3,
        "A": _logs(generator, (heads,), decay) / 0.7 - 1e-3,
        "B": normal(batch, length, groups, size),
        "C": normal(batch, length, groups, size),
        "D": normal(heads),
        "dt_bias": normal(heads) * 0.1,
        "initial_states": normal(batch, heads, width, size),
    }


def mamba2_steps(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    dt_bias: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    heads = hidden_states.shape[2]
    B, C = (t.repeat_interleave(heads // t.shape[2], 2) for t in (B, C))
    dt = F.softplus(dt + dt_bias)
    decay = (dt * A).exp()
    if seq_idx is not None:
        is_new = seq_idx.diff(dim=1, prepend=seq_idx[:, :1]) != 0
        decay = decay.masked_fill(is_new[..., None], 0.0)
    added = (dt[..., None] * hidden_states)[..., None] * B[..., None, :]
    states = _states(decay[..., None, None], added, initial_states)
    return (states * C[..., None, :]).sum(-1) + D[:, None] * hidden_states, states[:, -1]


def _draw_mamba(generator: torch.Generator, length: int, decay: float) -> Arguments:
    batch, width, size = _sizes(generator, 2, 6, 6)
    normal = partial(torch.randn, generator=generator)
    return {
        "hidden_states": normal(batch, width, length),
        "dt": normal(batch, width, length) * 0.3,
        "A": _logs(generator, (width, size), decay) / 0.7 - 1e-3,
        "B": normal(batch, size, length),
        "C": normal(batch, size, length),
        "D": normal(width),
        "z": normal(batch, width, length),
        "delta_bias": normal(width) * 0.1,
    }


def _mamba_steps(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor,  # noqa: N803
    z: Tensor,
    delta_bias: Tensor,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    dt = F.softplus(dt + delta_bias[:, None])
    steps, tokens = (t.mT[..., None] for t in (dt, hidden_states))
    states = _states((steps * A).exp(), steps * B.mT[:, :, None] * tokens, None)
    out = (states * C.mT[:, :, None]).sum(-1).mT + D[:, None] * hidden_states
    return out * F.silu(z), states[:, -1]


def _draw_gated(generator: torch.Generator, length: int, decay: float) -> Arguments:
    batch, width = _sizes(generator, 2, 6)
    shape = (batch, length, width)
    return {
        "tokens": torch.randn(shape, generator=generator),
        "decay": _logs(generator, shape, decay).exp(),
        "reset": torch.rand(batch, length, 1, generator=generator) < 2 / length,
        "initial": torch.randn(batch, width, generator=generator),
    }


def _gated_steps(
    tokens: Tensor, decay: Tensor, reset: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    states = _states(torch.where(reset, 0.0, decay), tokens, initial)
    return states, states[:, -1]


def _draw_convolution(generator: torch.Generator, length: int, decay: float) -> Arguments:
    batch, width, size = _sizes(generator, 2, 6, 5)
    return {
        "hidden_states": torch.randn(batch, width, length, generator=generator),
        "weight": torch.randn(width, size, generator=generator),
        "bias": torch.randn(width, generator=generator),
    }


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    activation: str | None = None,
    **more: Any,
) -> Tensor:
    """A stand-in with the signature of causal_conv1d."""
    count = weight.shape[1] - 1
    windows = F.pad(x, (count, 0)).unfold(-1, count + 1, 1)
    if seq_idx is not None:
        numbers = F.pad(seq_idx, (count, 0), value=-1).unfold(-1, count + 1, 1)
        windows = windows * (numbers == seq_idx[..., None])[:, None]
    out = (windows * weight[:, None]).sum(-1) + (0 if bias is None else bias[:, None])
    return F.silu(out) if activation else out


def _convolution_steps(hidden_states: Tensor, **given: Tensor) -> tuple[Tensor, None]:
    return causal_conv1d_fn(hidden_states, **given, activation="silu"), None


def _of(model: str, name: str) -> Callable[[], Any]:
    def find() -> Any:
        import importlib
        import inspect

        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        # A model that these ranks distributed before has put one there that shares by itself.
        return inspect.unwrap(getattr(module, name))

    return find


CHUNKS = {"chunk_size": 8}
KEYED = dict.fromkeys(("query", "key", "value", "q", "k", "v", "g", "beta", "out"), 1)
TABLE: Mapping[str, Recurrence] = {
    **{
        name: Recurrence(
            *(partial(share_keyed, is_exact=True), _of(model, function)),
            partial(_draw_delta, by_key=name == "chunk_kda"),
            *(KEYED, delta_steps, more, "output_final_state", "initial_state"),
        )
        for name, model, function, more in (
            ("chunk_gated_delta_rule", "qwen3_next", "torch_chunk_gated_delta_rule", CHUNKS),
            ("recurrent_gated_delta_rule", "qwen3_next", "torch_recurrent_gated_delta_rule", {}),
            ("chunk_kda", "kimi_linear", "chunk_kimi_delta_attention", CHUNKS),
        )
    },
    **{
        f"chunk_{kind}": Recurrence(
            *(share_keyed, partial(lambda function: function, function)),
            partial(_draw_linear, kind=kind),
            *(KEYED, function, {}, "output_final_state", "initial_state"),
        )
        for kind, function in (
            ("gla", chunk_gla),
            ("simple_gla", chunk_simple_gla),
            ("lightning_attn", chunk_lightning_attn),
        )
    },
    "mamba_chunk_scan": Recurrence(
        *(share_chunk_scan, _of("mamba2", "mamba2_chunk_scan"), _draw_mamba2),
        {"hidden_states": 1, "dt": 1, "B": 1, "C": 1, "out": 1},
        *(mamba2_steps, {**CHUNKS, "dt_softplus": True}),
        *("return_final_states", "initial_states"),
    ),
    "selective_scan": Recurrence(
        *(share_selective_scan, _of("mamba", "mamba_selective_scan"), _draw_mamba),
        {"hidden_states": 2, "dt": 2, "B": 2, "C": 2, "z": 2, "out": 2},
        *(_mamba_steps, {"delta_softplus": True}, "return_last_state"),
    ),
    "gated": Recurrence(
        *(share_gated, lambda: _gated_steps, _draw_gated),
        {"tokens": 1, "decay": 1, "reset": 1, "out": 1},
        *(_gated_steps, {}, "", "initial"),
    ),
    "causal_conv1d": Recurrence(
        *(share_short_convolution, _of("mamba2", "causal_conv1d_fn"), _draw_convolution),
        {"hidden_states": 2, "out": 2},
        *(_convolution_steps, {"activation": "silu"}),
    ),
}


def _tensors(results: Any) -> list[Tensor]:
    """Return the output, and the last state if there is one."""
    results = results if isinstance(results, tuple) else (results,)
    return [one for one in results if one is not None]


def _floats(given: Arguments) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }


def _gradients(outs: Any, given: Arguments, weights: Any) -> list[Tensor]:
    loss = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
    return list(torch.autograd.grad(loss, list(_floats(given).values()), materialize_grads=True))


def _leaves(given: Arguments, dtype: torch.dtype) -> Arguments:
    floats = _floats(given)
    return {
        name: value.detach().to(dtype).requires_grad_() if name in floats else value
        for name, value in given.items()
    }


def own_tokens(tensor: Tensor, dim: int) -> Tensor:
    """Return this rank's tokens; where it has none, one of zeros, as a module does."""
    own = shard(tensor, dist.get_rank(), dist.get_world_size(), dim)
    nothing = torch.zeros_like(tensor.narrow(dim, 0, 1))
    return own if own.shape[dim] else torch.cat([own, nothing], dim)


def errors_of(name: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Compare a recurrence on this rank's tokens, and of all on one process, with float64.

    Returns:
        On the first rank, the largest error of outputs and gradients, relative to the largest
        element of each: of the ranks together, and of one process. On others zeros.
    """
    case, generator = TABLE[name], torch.Generator().manual_seed(seed)
    (length,) = _sizes(generator, 40)
    decay = (1e-4, 0.5, 0.9, 0.999)[seed % 4]
    given = case.draw(generator, length, decay)
    if case.initial and seed % 3:
        given[case.initial] = None
    flags = {case.state_flag: True} if case.state_flag else {}

    mesh = world_mesh()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    leaves = _leaves(given, dtype)
    own = {
        key: own_tokens(value, case.dims[key]) if key in case.dims else value
        for key, value in leaves.items()
    }
    with computing_with(sequence=SharedSequence(mesh, (0,), length)):
        out, *finals = _tensors(case.share(case.function(), **own, **case.more, **flags))
    dim = case.dims["out"]
    whole = torch.zeros(*out.shape[:dim], length, *out.shape[dim + 1 :], dtype=torch.float64)
    weights = [
        torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in (whole, *finals)
    ]
    of_own, own_weight = (shard(one, rank, world_size, dim) for one in (whole, weights[0]))
    out = out.narrow(dim, 0, of_own.shape[dim])
    # The final state is the same on all ranks: each counts its part.
    own_weights = [own_weight, *(weight / world_size for weight in weights[1:])]
    gradients = _gradients([out, *finals], leaves, own_weights)
    of_own.copy_(out.detach())
    finals = [one.detach() / world_size for one in finals]
    for one in (whole, *finals, *gradients):
        dist.all_reduce(one)
    if rank:
        return 0.0, 0.0

    exact = _leaves(
        {k: v.to(dtype) if k in _floats(given) else v for k, v in given.items()}, torch.float64
    )
    wanted = _tensors(case.steps(**exact))
    expected = [*wanted, *_gradients(wanted, exact, weights)]

    alone = _leaves(given, dtype)
    found = _tensors(case.function()(**alone, **case.more, **flags))
    on_one = [*found, *_gradients(found, alone, weights)]

    def worst(actual: list[Tensor]) -> float:
        pairs = zip(actual, expected, strict=True)
        return max(
            float((a.double() - e).abs().max() / e.abs().max().clamp(min=1e-3)) for a, e in pairs
        )

    return worst([whole, *finals, *gradients]), worst(on_one)


def errors_of_many(name: str, count: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return the largest errors over many draws: of ranks, of one process, and the worst seed."""
    found = [(*errors_of(name, seed, dtype), seed) for seed in range(count)]
    return max(one[0] for one in found), max(one[1] for one in found), max(found)[2]
