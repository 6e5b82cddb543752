"""Prefix trees in models of transformers, through its interfaces of attentions and masks.

    attention(query, key, value, attention_mask)         tables of a tree, (B, 1, 2, S), int32
      =>
    mask = sdpa_mask(mask_function=is_visible)           (B, 1, S, S), as transformers makes masks
    sdpa_attention_forward(query, key, value, mask)

    is_visible(q, k) = (k <= q) & (q < ends[k])
                       & (positions[q] - positions[k] < window), in layers with a window

transformers hands a mask of four dims on to every attention as it is. A model whose
`attn_implementation` is one of `IMPLEMENTATIONS` makes its mask of it there, so the compiler reads
the mask as any other. Windows count along the branch. Any other mask is left to transformers.

Assumes: a batch of `pack_prefix_trees`. Read in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from cp_inductor.batches.trees import is_tables
from cp_inductor.errors import InvalidArgument, UnsupportedAttention
from cp_inductor.modules.libraries import libraries

# Models whose branches the suite compares with unpacked rows: `tests/models/test_prefix_trees.py`.
MODELS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("gemma3_text", "gpt_oss", "olmo2", "phi3", "smollm3"),
)
# What they are called with, and the attention of transformers that computes them.
IMPLEMENTATIONS = {f"prefix_trees_{base}": base for base in ("sdpa", "flex_attention")}


def accept_prefix_trees(model: Any) -> None:
    """Let a model of transformers take batches of `pack_prefix_trees`, in place.

    Every other batch is computed as before. The model is not patched: its `attn_implementation`
    becomes one that knows trees, on top of the one it had. Call it before the model is compiled.

    Args:
        model: of transformers, with ``attn_implementation`` "sdpa" or "flex_attention".

    Raises:
        UnsupportedAttention: the model has layers that are no attention and mix tokens, such as
            recurrences; it is not one of those that were compared with unpacked rows; or it has
            another `attn_implementation`.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    name = type(model).__name__
    for path, module in model.named_modules():
        if any(one.mixes_tokens(module) or one.find_recurrence(module) for one in libraries()):
            raise _refusal(
                name,
                "attention alone to mix tokens: a branch begins from the state of its prompt",
                f"{path}, a {type(module).__name__}",
                "train on unpacked rows, or on packed documents",
            )
    config = model.config
    if config.model_type not in MODELS or not getattr(config, "is_causal", True):
        raise _refusal(
            name,
            f"a causal model of one of the types {', '.join(MODELS)}",
            f"{config.model_type!r}",
            "train on unpacked rows; or compare its branches with them, and add the type to MODELS",
        )
    base = IMPLEMENTATIONS.get(config._attn_implementation, config._attn_implementation)
    if base not in IMPLEMENTATIONS.values():
        remedy = 'make the model with attn_implementation="sdpa", or "flex_attention" for sinks'
        raise _refusal(name, "one of " + ", ".join(IMPLEMENTATIONS.values()), repr(base), remedy)
    ours = f"prefix_trees_{base}"
    AttentionMaskInterface.register(ours, ALL_MASK_ATTENTION_FUNCTIONS[base])
    AttentionInterface.register(ours, partial(_attend, base))
    model.set_attn_implementation(ours)


def _attend(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    """Compute the attention of a layer; every argument is as transformers passes it."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if is_tables(attention_mask):
        window = kwargs.get("sliding_window")
        _check(module, query, key, attention_mask, window)
        attention_mask = ALL_MASK_ATTENTION_FUNCTIONS[base](
            batch_size=query.shape[0],
            q_length=query.shape[2],
            kv_length=query.shape[2],
            mask_function=is_visible(attention_mask[:, 0, 0], attention_mask[:, 0, 1], window),
            allow_is_causal_skip=False,
            device=query.device,
        )
    return ALL_ATTENTION_FUNCTIONS[base](module, query, key, value, attention_mask, **kwargs)


def is_visible(ends: Tensor, positions: Tensor, window: int | None) -> Callable[..., Tensor]:
    """Return the mask function of a row of trees, as transformers takes it.

    Args:
        ends, positions: of each token, (B, S), int32; see `pack_prefix_trees`.
        window: how many tokens of its branch a query sees, itself included; None is all.
    """

    def mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Tensor:
        seen: Tensor = (kv_idx <= q_idx) & (q_idx < ends[batch_idx, kv_idx])
        if window is None:
            return seen
        of_query, of_key = (positions[batch_idx, idx].long() for idx in (q_idx, kv_idx))
        return seen & (of_query - of_key < window)

    return mask


def _check(module: Any, query: Tensor, key: Tensor, tables: Tensor, window: int | None) -> None:
    """Refuse tables of another shape, a cache, and a window that the layer has and did not pass."""
    length = query.shape[2]
    shapes = tuple(tables.shape), key.shape[2]
    if shapes != ((query.shape[0], 1, 2, length), length):
        raise InvalidArgument(
            site=type(module).__name__,
            expected=f"tables of a tree {(query.shape[0], 1, 2, length)}, and {length} keys",
            got=f"{shapes[0]} and {shapes[1]} keys",
            remedy="give the attention_mask of pack_prefix_trees, and no cache",
        )
    config = module.config
    kinds = getattr(config, "layer_types", None)
    of_layer = kinds[module.layer_idx] if kinds else "sliding_attention"
    expected = getattr(config, "sliding_window", None) if of_layer == "sliding_attention" else None
    if window != expected:
        raise _refusal(
            type(module).__name__,
            f"the window of the layer, {expected}",
            f"{window}",
            "report the model; its layers pass another window than its config has",
        )


def _refusal(site: str, expected: str, got: str, remedy: str) -> UnsupportedAttention:
    return UnsupportedAttention(site=site, expected=expected, got=got, remedy=remedy)
