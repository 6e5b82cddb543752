"""Let encoder-decoders of transformers make the decoder's inputs from labels over all tokens.

    labels (B, S) [Shard(1)], no decoder_input_ids
      =>
    decoder_input_ids = model's own shift of the whole labels, (B, S) [Shard(1)]

The models shift by writing to a part of a tensor, `shifted[:, 1:] = labels[:, :-1]`, across the
borders of shards. DTensor (torch 2.13) cannot write to a part of shards of unequal length. Labels
are a number per token, so every rank gathers them, shifts them and keeps its part.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from cp_inductor.modules.whole import gathered, own_part

_MARK = "_cp_shifts_labels"
_BY_METHOD = "prepare_decoder_input_ids_from_labels"
_BY_FUNCTION = "shift_tokens_right"
# In what order all of them take (tokens or features, attention_mask, decoder_input_ids).
_PLACE_OF_DECODER = 2


def shift_whole_labels(model: nn.Module) -> None:
    """Hook the encoder-decoders in a model; a second call changes nothing."""
    for module in model.modules():
        if hasattr(module, _MARK) or not type(module).__module__.startswith("transformers.models."):
            continue
        if not type(module).__name__.endswith("ForConditionalGeneration"):
            continue
        if hasattr(module, _BY_METHOD) or _function_of(module) is not None:
            setattr(module, _MARK, True)
            module.register_forward_pre_hook(_with_decoder_inputs, with_kwargs=True)


def settle_losses(model: nn.Module) -> None:
    """Name the loss that models of transformers take if their class names none, such as GPT-2.

    They take that of causal language models, and warn in the forward, where Dynamo cannot.
    """
    for module in model.modules():
        if not type(module).__module__.startswith("transformers.models."):
            continue
        if getattr(module, "loss_type", "") is None and hasattr(type(module), "loss_function"):
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]


def _function_of(module: nn.Module) -> Any:
    return getattr(sys.modules[type(module).__module__], _BY_FUNCTION, None)


def _with_decoder_inputs(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    labels = kwargs.get("labels")
    is_given = len(args) > _PLACE_OF_DECODER or any(
        kwargs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds")
    )
    if is_given or not isinstance(labels, DTensor):
        return None
    if not any(isinstance(p, Shard) and p.dim for p in labels.placements):
        return None
    whole = gathered(labels)
    if hasattr(module, _BY_METHOD):
        ids = module.prepare_decoder_input_ids_from_labels(whole)
    else:
        config = module.config
        ids = _function_of(module)(whole, config.pad_token_id, config.decoder_start_token_id)
    batch = whole.shape[0], labels.shape[0]
    shifted = own_part(ids, labels.device_mesh, labels.placements, batch)
    return args, {**kwargs, "decoder_input_ids": shifted}
