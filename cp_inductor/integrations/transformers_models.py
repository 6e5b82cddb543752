"""What `parallelize` has to know about the models of transformers.

transformers itself is not imported: a module is one of its models if its class is defined in
`transformers.models`. Read in transformers 5.23.

Encoder-decoders make the decoder's inputs from labels. They do so here from the labels of all
tokens:

    labels (B, S) [Shard(1)], no decoder_input_ids
      =>
    decoder_input_ids = model's own shift of the whole labels, (B, S) [Shard(1)]

The models shift by writing to a part of a tensor, `shifted[:, 1:] = labels[:, :-1]`, across the
borders of shards. DTensor (torch 2.13) cannot write to a part of shards of unequal length. Labels
are a number per token, so every rank gathers them, shifts them and keeps its part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from cp_inductor.integrations.transformers_recurrences import find_recurrence
from cp_inductor.modules.mixers import OnWhole, gathered, own_part
from cp_inductor.modules.reading import Local, libraries
from cp_inductor.modules.tokenwise import OnShards

# A mixture of experts holds a child "experts" and one of these.
ROUTERS = ("gate", "router")
# A mixture whose experts have another name, and one that is called by its methods.
MIXTURES = frozenset({"JetMoeMoE"})
PROJECTING = "JetMoeMoA"
# Recurrences without a convolution.
RECURRENT = frozenset({"MiniMaxLightningAttention", "RwkvSelfAttention", "RwkvFeedForward"})

_HAS_HOOK = "_cp_shifts_labels"
_SHIFT_METHOD = "prepare_decoder_input_ids_from_labels"
_SHIFT_FUNCTION = "shift_tokens_right"
# Forwards take (tokens or features, attention_mask, decoder_input_ids) in this order.
_PLACE_OF_DECODER = 2


libraries.append(sys.modules[__name__])  # `parallelize` asks this file


def adapt(model: nn.Module) -> None:
    """Let models name their loss, and encoder-decoders shift labels over all tokens."""
    for module in filter(_is_one, model.modules()):
        # A model whose class names no loss, such as GPT-2, takes that of causal language
        # models, and warns in the forward, where Dynamo cannot trace the warning.
        if getattr(module, "loss_type", "") is None and hasattr(type(module), "loss_function"):
            module.loss_type = "ForCausalLM"  # type: ignore[assignment]
        if _shifts_labels(module) and not hasattr(module, _HAS_HOOK):
            setattr(module, _HAS_HOOK, True)
            module.register_forward_pre_hook(_add_decoder_inputs, with_kwargs=True)


def find_local(module: nn.Module) -> Local | None:
    """Return how a recurrence or a mixture of experts computes.

    State-space layers, linear attentions and the like convolve each channel along the sequence,
    or are known by name. A mixture has experts and a router, or is known by name.
    """
    name = type(module).__name__
    if not _is_one(module):
        return None
    recurrence = find_recurrence(module)
    if recurrence is not None:
        return recurrence
    if name in RECURRENT or any(map(_convolves_channels, module.children())):
        return Local(OnWhole)
    if name == PROJECTING:
        return Local(_Projects)
    has_experts = isinstance(getattr(module, "experts", None), nn.Module)
    has_router = any(isinstance(getattr(module, name, None), nn.Module) for name in ROUTERS)
    return Local(OnShards) if (has_experts and has_router) or name in MIXTURES else None


class _Projects(OnShards):
    """Projects to queries and back by experts, on this rank's tokens (JetMoE).

    What `map` says of the routing, in a tuple, stays this rank's: only `reduce` reads it.
    """

    keeps_routing = True

    def map(self, tokens: Tensor) -> Any:
        """Project this rank's tokens."""
        mapped: Any = super().map  # type: ignore[misc]
        return self.on_shards(mapped, tokens)

    def reduce(self, tokens: Tensor, routing: Any) -> Any:
        """Project this rank's tokens back."""
        reduced: Any = super().reduce  # type: ignore[misc]
        return self.on_shards(reduced, tokens, routing)


def find_routers(model: nn.Module) -> Mapping[type, int]:
    """Return the classes of routers, and let transformers install its hooks now.

    It would install them in the first forward that is to return logits, under a lock, which
    Dynamo (2.13) does not trace.
    """
    install = getattr(_output_capturing(), "maybe_install_capturing_hooks", None)
    routers: dict[type, int] = {}
    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        if recorders and install is not None and hasattr(module, "config"):
            install(module)
        named = recorders.get("router_logits", ())
        for recorder in named if isinstance(named, (list, tuple)) else (named,):
            target = getattr(recorder, "target_class", recorder)
            if isinstance(target, type):
                routers[target] = getattr(recorder, "index", 0)
    return routers


def is_recording_logits() -> bool:
    """Whether transformers records what routers return, in the forward that runs now.

    `_active_collector` holds what is recorded, by name. Without it, logits are recorded.
    """
    collector = getattr(_output_capturing(), "_active_collector", None)
    if collector is None:
        return True
    return "router_logits" in (collector.get() or {})


def _is_one(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _output_capturing() -> Any:
    return sys.modules.get("transformers.utils.output_capturing")


def _convolves_channels(module: nn.Module) -> bool:
    if not isinstance(module, nn.Conv1d) or module.kernel_size == (1,):
        return False
    return module.groups == module.in_channels and module.in_channels > 1


def _shifts_labels(module: nn.Module) -> bool:
    is_encoder_decoder = type(module).__name__.endswith("ForConditionalGeneration")
    has_shift = hasattr(module, _SHIFT_METHOD) or _shift_function(module) is not None
    return is_encoder_decoder and has_shift


def _shift_function(module: nn.Module) -> Any:
    return getattr(sys.modules[type(module).__module__], _SHIFT_FUNCTION, None)


def _add_decoder_inputs(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    labels = kwargs.get("labels")
    is_given = len(args) > _PLACE_OF_DECODER or any(
        kwargs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds")
    )
    if is_given or not isinstance(labels, DTensor):
        return None
    if not any(isinstance(p, Shard) and p.dim for p in labels.placements):
        return None
    whole = gathered(labels)
    if hasattr(module, _SHIFT_METHOD):
        ids = module.prepare_decoder_input_ids_from_labels(whole)
    else:
        config = module.config
        ids = _shift_function(module)(whole, config.pad_token_id, config.decoder_start_token_id)
    batch = whole.shape[0], labels.shape[0]
    shifted = own_part(ids, labels.device_mesh, labels.placements, batch)
    return args, {**kwargs, "decoder_input_ids": shifted}
