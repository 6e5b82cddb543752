"""How ranks share the recurrences of transformers' models, each computing its own tokens.

    mixer.forward calls            a function of its own module      and its form is
      causal_conv1d_fn               a short convolution               the tokens before
      torch_chunk_gated_delta_rule   delta rules                       keys and values
      mamba2_chunk_scan, ...         state spaces                      their scans

transformers writes most recurrences as functions of the module of a model, and takes those of fla,
mamba_ssm and causal_conv1d in their place if these are installed. The classes below call nothing
else that mixes tokens. RecurrentGemma and MiniMax write theirs as methods, which are overridden.

A cache that is still empty is filled with the states after the last token of all ranks, the same on
each, as one process has them. A mixer that goes on from a cache computes the whole sequence.

Read in transformers 5.23, which is not imported.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cp_inductor.integrations.recurrence_forms import (
    refuse_steps,
    share_chunk_scan,
    share_gated,
    share_keyed,
    share_nothing,
    share_selective_scan,
    share_short_convolution,
)
from cp_inductor.modules.along_sequence import last_tokens, pass_states
from cp_inductor.modules.mixers import CONVOLUTIONS, OnOwnTokens
from cp_inductor.modules.reading import Local, ReadsLocally, computing
from cp_inductor.modules.recurrences import Form

# Classes whose forwards mix tokens by the functions below alone.
MIXERS = frozenset(
    {
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention", "BailingHybridDeltaAttention"),
        *("Mamba2Mixer", "BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer"),
        *("NemotronHMamba2Mixer", "Zamba2MambaMixer", "MambaMixer", "FalconMambaMixer"),
        *("JambaMambaMixer", "ZambaMambaMixer", "Lfm2ShortConv", "Lfm2MoeShortConv"),
    }
)
CONVOLVING = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv"})
CONVOLUTION = "causal_conv1d_fn"
SCANS = frozenset(
    {
        *("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"),
        *("mamba2_chunk_scan", "mamba_selective_scan"),
    }
)
GATED, LIGHTNING = "RecurrentGemmaRecurrentBlock", "MiniMaxLightningAttention"
# sha256 of the source of the forward that `_Lightning` writes anew.
LIGHTNING_SOURCE = "69bc3f622840097cfc6810b4640b50455db872e89ee2a49d8bb326b65a9f88c5"


def find_recurrence(module: nn.Module) -> Local | None:
    """Return how ranks share the recurrence of a module of transformers."""
    name = type(module).__name__
    if name in MIXERS:
        functions = _functions()
        called = _globals_of(type(module)) & functions.keys()
        # Other versions call attributes of the module, or write the recurrence into the forward.
        is_known = CONVOLUTION in called and (name in CONVOLVING or bool(called & SCANS))
        return Local(_Mixer, CONVOLUTIONS, functions) if is_known else None
    if name == GATED:
        return Local(_Gated, {**CONVOLUTIONS, type(module.get_submodule("rg_lru")): _GatedScan})
    return Local(_Lightning) if name == LIGHTNING and _digest(module) == LIGHTNING_SOURCE else None


def _globals_of(cls: type) -> frozenset[str]:
    """Return the names of the globals that a forward reads."""
    forward: Any = cls.forward  # type: ignore[attr-defined]
    read = dis.get_instructions(inspect.unwrap(forward))
    return frozenset(code.argval for code in read if code.opname == "LOAD_GLOBAL")


def _digest(module: nn.Module) -> str:
    return hashlib.sha256(inspect.getsource(type(module).forward).encode()).hexdigest()


def _functions() -> Mapping[str, Form]:
    # transformers' own forms compute in float32.
    keyed = partial(share_keyed, is_exact="fla" not in sys.modules)
    return {
        CONVOLUTION: share_short_convolution,
        "torch_chunk_gated_delta_rule": keyed,
        "chunk_kimi_delta_attention": keyed,
        "mamba2_chunk_scan": share_chunk_scan,
        "mamba_selective_scan": share_selective_scan,
        "mamba_inner_fn": share_nothing,
        "mamba2_split_conv1d_scan_combined": share_nothing,
        "causal_conv1d_update": refuse_steps,
        "torch_recurrent_gated_delta_rule": refuse_steps,
        "recurrent_kimi_delta_attention": refuse_steps,
        "mamba_selective_state_update": refuse_steps,
        "mamba2_selective_state_update": refuse_steps,
    }


class _Mixer(OnOwnTokens):
    """A mixer with a cache of its last tokens and its state."""

    layer_idx: int

    def begin(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        for name, cache in kwargs.items():
            if not hasattr(cache, "update_conv_state"):
                continue
            layer = self.layer_idx
            if cache.has_previous_state(layer) or cache.is_recording_past(layer):
                return None
            return args, {**kwargs, name: _EmptyCache(cache)}
        return args, kwargs


class _EmptyCache:
    """Fills a cache with states that are the same on every rank."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, tokens: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        last = last_tokens(tokens, conv_kernel_size, -1)
        self.cache.update_conv_state(last, layer_idx, state_idx, conv_kernel_size=conv_kernel_size)
        return tokens

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        kept: Tensor = self.cache.update_recurrent_state(state, layer_idx, state_idx)
        return kept


class _Gated(OnOwnTokens):
    """The block of RecurrentGemma, which keeps its last tokens and its state itself."""

    def begin(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        names = ("input_states", "position_ids", "attention_mask", "use_cache")
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if arguments["input_states"].shape[1] == 1:
            return None  # it goes on from its own state
        # The forward does not read the mask of attention, which is not one of tokens.
        return (), {**arguments, "attention_mask": None}

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute(*args, **kwargs)
        block: Any = self
        if block.conv1d_state is not None:
            block.conv1d_state = last_tokens(block.conv1d_state, block.conv1d_width - 1, -1)
        return result


class _GatedScan(ReadsLocally):
    def _rnn_scan(
        self,
        hidden_states: Tensor,
        recurrent_gate: Tensor,
        reset: Tensor,
        recurrent_states: Tensor | None,
        acc_dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        scan: Any = super()._rnn_scan  # type: ignore[misc]
        if computing().sequence is None:
            scanned: tuple[Tensor, Tensor] = scan(
                hidden_states, recurrent_gate, reset, recurrent_states, acc_dtype
            )
            return scanned

        def own(tokens: Tensor, gate: Tensor, resets: Tensor) -> Any:
            return scan(tokens, gate, resets, None, acc_dtype)

        return share_gated(own, hidden_states, recurrent_gate, reset, recurrent_states)


class _Lightning(OnOwnTokens):
    """The lightning attention of MiniMax, whose forward holds its recurrence: written anew."""

    layer_idx: int

    def begin(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        cache = kwargs.get("past_key_values")
        is_new = cache is None or cache.get_linear_cache(self.layer_idx) is None
        return (args, kwargs) if is_new else None

    def compute(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self
        batch, length, _ = hidden_states.shape
        states = layer.act_fn(layer.qkv_proj(hidden_states))
        if attention_mask is not None:
            states = (states * attention_mask[:, :, None]).to(states.dtype)
        states = states.reshape(batch, length, layer.num_attention_heads, -1).transpose(1, 2)
        query, key, value = states.split(layer.head_dim, 3)
        out, final = _attend_blocks(layer, query, key, value)
        passed = torch.arange(1, length + 1, device=query.device)[:, None]
        remaining = torch.exp(-layer.slope_rate * passed)  # (H, S, 1)
        before, after = pass_states(final, decay=torch.exp(-layer.slope_rate * length))
        out = out + ((query * remaining).to(before.dtype) @ before).to(out.dtype)
        if past_key_values is not None:
            past_key_values.set_linear_cache(self.layer_idx, after.to(value.dtype))
        out = layer.norm(out.transpose(1, 2).reshape(batch, length, -1))
        out = torch.sigmoid(layer.output_gate(hidden_states)) * out
        return layer.out_proj(out), after.to(value.dtype)


def _attend_blocks(layer: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs (B, H, S, D) and the final state (B, H, D, D), from a state of zeros."""
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    outs = []
    for q, k, v in zip(*(t.split(layer.block_size, 2) for t in (query, key, value)), strict=True):
        size = q.shape[2]
        weights = (q @ k.transpose(-1, -2)) * layer.diagonal_decay[:, :, :size, :size]
        outs.append((q * layer.query_decay[:, :size]) @ state + weights @ v)
        update = (k * layer.key_decay[:, -size:]).transpose(-1, -2) @ v
        state = state * torch.exp(-layer.slope_rate * size) + update
    return torch.cat(outs, 2), state
