"""Generate with a model of transformers over a prompt that is sharded along the sequence.

    model.generate(ids)                ids plain, the same on every rank
      =>
    prompt:       ids [Shard(1)]; attention is planned as in training; keys stay where they are
    each token:   every rank computes it on plain tensors, except that it attends to its own keys,
                  and combines what all ranks found

The loop of transformers runs on plain tensors on every rank. Four of its own places lead here: the
model's `prepare_inputs_for_generation`, through which ids and cache pass; the layers of the cache
(`spread_cache`); an attention and a mask that are registered under a name, which the model is set
to meanwhile; and a hook behind the prompt, from where on weights are read as the plain tensors that
they are on every rank.

Ranks draw alike: they take the state of the first rank's generator. At the beginning they compare
their prompts, at the end their tokens. Where code of the user's own runs in the loop, or a clock
ends it, they compare each new token, and where one rank stops, all do.

Assumes: weights are whole on every rank of a 1-D mesh, as `distribute` makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.masking_utils import causal_mask_function, sdpa_mask

from cp_inductor.dtensor.axis import axis_of_mesh
from cp_inductor.dtensor.rules.attention import attend_with_lse
from cp_inductor.dtensor.wrap import wrap_parts
from cp_inductor.errors import RanksDisagree, UnsupportedAttention
from cp_inductor.integrations.spread_cache import (
    SHORTEST_SHARD,
    Ranks,
    SpreadLayer,
    can_spread,
    spread,
)
from cp_inductor.integrations.token_ids import check_ids
from cp_inductor.mask.language import SCORE
from cp_inductor.mask.rule import Rule
from cp_inductor.modules.local_weights import plain_weights
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.run.spread_keys import attend_to_spread_keys, gather_from_ranks
from cp_inductor.torch_private.dtensor import plain_for_replicated
from cp_inductor.trust.agreement import agree_once
from cp_inductor.trust.claims import digest
from cp_inductor.trust.ledger import Entry

NAME = "cp_inductor_spread"
SITE = "generate over a sharded prompt"

# What a prompt may consist of.
OF_PROMPT = frozenset({"inputs", "input_ids", "attention_mask"})

# Criteria that say the same of the same tokens, and arguments that are code of the user's own.
OF_TOKENS = (MaxLengthCriteria, EosTokenCriteria, StopStringCriteria)
OWN_CODE = ("logits_processor", "prefix_allowed_tokens_fn")
GOES_ON, STOPS, FAILS = range(3)


@dataclass
class _Generation:
    """A call of generate that runs now.

    Attributes:
        model: which generates.
        mesh, ranks: that share its prompt.
        is_prompt: whether the forward that is prepared, or runs, is that of a sharded prompt.
        is_first: whether no forward has ended yet.
        attended: how many attentions have passed here in the first.
        cache: whose keys lie on all ranks, once it is known.
    """

    model: Any
    mesh: DeviceMesh
    ranks: Ranks
    is_prompt: bool
    is_first: bool = True
    attended: int = 0
    cache: Cache | None = None

    def layers(self) -> list[SpreadLayer]:
        """Return the layers of the cache that hold keys."""
        every = [] if self.cache is None else self.cache.layers
        return [layer for layer in every if isinstance(layer, SpreadLayer)]

    def layer_under(self, window: int | None) -> SpreadLayer | None:
        """Return a layer whose tokens a mask is for; None if no layer holds them."""
        layers = self.layers() or [SpreadLayer(self.ranks, None, None)]  # which are made later
        whole = next((layer for layer in layers if layer.window is None), None)
        if window is None:
            return whole
        return next((layer for layer in layers if layer.window is not None), whole)


_running: list[_Generation] = []


def obstacle(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Say why a call of generate is not shared by ranks as this module does; None if it is."""
    of_weights = _obstacle_of_weights(model)
    if of_weights is not None:
        return of_weights
    if model.config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    given = {name for name, one in kwargs.items() if isinstance(one, Tensor)}
    prompt, asked = _read(model, args, kwargs)
    if not given <= OF_PROMPT or not isinstance(prompt, Tensor) or prompt.ndim != 2:
        return "the prompt is not one of ids"
    if asked("guidance_scale") not in (None, 1):
        return "guidance calls the model besides, with a cache of its own"
    if asked("use_cache") is False:
        return "there is no cache"
    has_own_cache = not model._supports_default_dynamic_cache()
    if has_own_cache or not can_spread(DynamicCache(config=model.config)):
        return "the model has a cache of its own"
    if not model._can_set_attn_implementation():
        return "the model does not attend through AttentionInterface"
    return None


def _obstacle_of_weights(model: Any) -> str | None:
    weights = [*model.parameters(), *model.buffers()]
    meshes = {one.device_mesh for one in weights if isinstance(one, DTensor)}
    if len(meshes) != 1 or next(iter(meshes)).ndim != 1 or next(iter(meshes)).size() == 1:
        return "the model is not distributed on a 1-D mesh"
    if not all(isinstance(one, DTensor) and one.placements == (Replicate(),) for one in weights):
        return "weights are not whole on every rank"
    return None


def needs_whole(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of generate with an `obstacle` is right on whole sequences alone: padding."""
    mask = kwargs.get("attention_mask")
    is_plain = not any(isinstance(one, DTensor) for one in (*args, *kwargs.values()))
    is_padded = is_plain and isinstance(mask, Tensor) and not bool(mask.all())
    return is_padded and _obstacle_of_weights(model) is None


def generate_whole(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate on every rank what one process does, where `needs_whole`."""
    mesh = next(one.device_mesh for one in model.parameters() if isinstance(one, DTensor))
    group_name = axis_of_mesh(mesh, site=SITE).group_name
    prompt, asked = _read(model, args, kwargs)
    _compare("a prompt", group_name, prompt, kwargs["attention_mask"])
    if asked("do_sample") or model.training:
        _take_generator_of_first(mesh, kwargs["attention_mask"].device)
    with torch.no_grad(), plain_weights(model):
        found = type(model).generate(model, *args, **kwargs)
    _compare(
        "generated tokens", group_name, found if isinstance(found, Tensor) else found.sequences
    )
    return found


def _read(
    model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Callable[[str], Any]]:
    """Return the prompt of a call of generate, and what tells its options."""
    prompt, config, *_ = (*args, None, None)
    if prompt is None:
        prompt = kwargs.get("input_ids", kwargs.get("inputs"))
    config = config or kwargs.get("generation_config") or model.generation_config
    return prompt, lambda name: kwargs.get(name, getattr(config, name, None))


def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate as the model's class does, with a prompt and a cache that lie on all ranks.

    Args:
        model: without an `obstacle`.
        args, kwargs: of `generate`. Tensors are the same on every rank, or DTensors.

    Returns:
        What the class returns. All tensors are plain, and the same on every rank.

    Raises:
        RanksDisagree: ranks have other prompts.
        InvalidArgument: the prompt has ids that the model does not have.
        UnsupportedAttention: the model, or an argument, asks for what is not computed so.
    """
    assert not _running, "generate within generate"
    mesh = next(one.device_mesh for one in model.parameters() if isinstance(one, DTensor))
    axis = axis_of_mesh(mesh, site=SITE)
    args, kwargs = pytree.tree_map(_whole, (args, kwargs))
    prompt, asked = _read(model, args, kwargs)
    _compare("a prompt", axis.group_name, prompt, kwargs.get("attention_mask"))
    check_ids(prompt, model, SITE)
    length = min(prompt.shape[1], asked("prefill_chunk_size") or prompt.shape[1])
    cache = kwargs.get("past_key_values")
    is_empty = cache is None or not int(cache.get_seq_length())
    ranks = Ranks(axis.group_name, axis.rank, axis.world_size)
    is_long = length >= SHORTEST_SHARD * ranks.world_size
    if is_empty and length < ranks.world_size and _compresses_keys(model):
        raise UnsupportedAttention(
            site=f"{SITE}: {type(model).__name__}",
            expected=f"a prompt of at least {ranks.world_size} tokens, one for each rank, where"
            " the cache holds compressed keys",
            got=f"{length} tokens",
            remedy="generate from a longer prompt, or on one process",
        )
    this = _Generation(model, mesh, ranks, is_prompt=is_empty and is_long)
    if asked("do_sample") or model.training:
        _take_generator_of_first(mesh, prompt.device)
    # DTensors (torch 2.13) fail in inference mode.
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad():
        args, kwargs = pytree.tree_map(_usable, (args, kwargs))
        stack.enter_context(_attending_here(model))
        stack.enter_context(_prepared_by(this))
        has_own_code = len(args) > 2 or any(asked(name) for name in OWN_CODE)
        stack.enter_context(_stopping_alike(this, has_own_code))
        stack.enter_context(plain_for_replicated())
        if not this.is_prompt:
            stack.enter_context(plain_weights(model))
        stack.enter_context(_ending_first(this, stack))
        found = type(model).generate(model, *args, **kwargs)
    _compare(
        "generated tokens", axis.group_name, found if isinstance(found, Tensor) else found.sequences
    )
    return found


def _compresses_keys(model: Any) -> bool:
    """Whether the cache holds latent vectors, which a rank without keys cannot expand."""
    config = model.config
    parts = [config, *(getattr(config, key) for key in config.sub_configs)]
    return any(getattr(part, "kv_lora_rank", None) for part in parts)


@contextmanager
def _attending_here(model: Any) -> Iterator[None]:
    """Within this context the model attends by `_attend`."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    config = model.config
    parts = {key: getattr(config, key) for key in config.sub_configs}
    before = {"": config._attn_implementation}
    before |= {key: part._attn_implementation for key, part in parts.items() if part is not None}
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _prepared_by(this: _Generation) -> Iterator[None]:
    """Within this context the inputs of each forward pass through `_prepare`."""
    model, prepare = this.model, this.model.prepare_inputs_for_generation

    @functools.wraps(prepare)
    def prepare_here(*args: Any, **kwargs: Any) -> Any:
        # State-space models have another name for it.
        _take_cache(this, kwargs.get("past_key_values", kwargs.get("cache_params")))
        return _sharded(this, prepare(*args, **kwargs))

    model.prepare_inputs_for_generation = prepare_here
    _running.append(this)
    try:
        yield
    finally:
        _running.clear()
        del model.prepare_inputs_for_generation


@contextmanager
def _stopping_alike(this: _Generation, has_own_code: bool) -> Iterator[None]:
    """Within this context all ranks stop where one does, unless tokens alone decide."""
    model, make = this.model, this.model._get_stopping_criteria

    @functools.wraps(make)
    def make_here(*args: Any, **kwargs: Any) -> StoppingCriteriaList:
        made = make(*args, **kwargs)
        is_alike = all(type(one) in OF_TOKENS for one in made) and not has_own_code
        return made if is_alike else _OfAllRanks(made, this.ranks)

    model._get_stopping_criteria = make_here
    try:
        yield
    finally:
        del model._get_stopping_criteria


class _OfAllRanks(StoppingCriteriaList):
    """Criteria of which one is enough that one rank meets; ranks compare their tokens as well."""

    def __init__(self, criteria: StoppingCriteriaList, ranks: Ranks) -> None:
        super().__init__(criteria)
        self.ranks = ranks

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Say for each row whether it is done."""
        try:
            done = super().__call__(input_ids, scores, **kwargs)
        except Exception:
            self._gather(torch.full_like(input_ids[:, -1], FAILS), input_ids)
            raise
        flags, tokens = self._gather(done.to(input_ids.dtype), input_ids)
        failed = [rank for rank, one in enumerate(flags.tolist()) if FAILS in one]
        if failed or not bool((tokens == tokens[0]).all()):
            raise RanksDisagree(
                site=f"{SITE}: token {input_ids.shape[1]}",
                expected="the same new tokens on every rank",
                got=f"an error on rank {failed[0]}" if failed else f"{tokens.tolist()}, by rank",
                remedy="let stopping criteria, logits processors and the like decide by what is"
                " the same on every rank; the failed rank's own error says what it met",
            )
        return (flags == STOPS).any(0)

    def _gather(self, flags: Tensor, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.stack([flags, input_ids[:, -1]])
        every = gather_from_ranks(
            own, group_name=self.ranks.group_name, world_size=self.ranks.world_size
        )
        return every[:, 0], every[:, 1]


def _take_cache(this: _Generation, cache: Cache | None) -> None:
    if cache is None or this.cache is cache:
        return
    if not any(isinstance(layer, SpreadLayer) for layer in cache.layers):
        spread(cache, this.ranks)
    this.cache = cache


def _sharded(this: _Generation, inputs: dict[str, Any]) -> dict[str, Any]:
    """Shard the ids of a prompt, and their positions."""
    for name in ("input_ids", "position_ids") if this.is_prompt else ():
        whole = inputs.get(name)
        if whole is not None:
            inputs[name] = distribute_tensor(whole, this.mesh, [Shard(whole.ndim - 1)])
    return inputs


@contextmanager
def _ending_first(this: _Generation, stack: ExitStack) -> Iterator[None]:
    """Within this context, behind the first forward everything becomes plain."""

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        handle.remove()
        _check_attended(this)
        this.is_first = False
        if this.is_prompt:
            this.is_prompt = False
            stack.enter_context(plain_weights(this.model))
            assert this.cache is not None
            for layer in this.cache.layers:
                if isinstance(layer, LinearAttentionCacheLayerMixin):
                    for states in (layer.conv_states, layer.recurrent_states):
                        states.update({key: _whole(state) for key, state in states.items()})
            for name, value in list(output.items()):
                if not isinstance(value, Cache):
                    output[name] = pytree.tree_map(_whole, value)
        return output

    handle = this.model.register_forward_hook(end)
    try:
        yield
    finally:
        handle.remove()


def _check_attended(this: _Generation) -> None:
    layers = [layer for layer in this.layers() if layer.is_initialized]
    has_states_alone = this.cache is not None and all(
        type(layer) is LinearAttentionLayer for layer in this.cache.layers
    )
    if not (layers or has_states_alone) or this.attended != len(layers):
        raise UnsupportedAttention(
            site=f"{SITE}: {type(this.model).__name__}",
            expected="an attention through transformers' AttentionInterface for each layer of the"
            " cache",
            got=f"{this.attended} for {len(layers)} layers",
            remedy="let the model attend by ALL_ATTENTION_FUNCTIONS, or generate on one process",
        )


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Make the mask of this rank's queries of a prompt, or of new tokens and this rank's keys.

    The arguments are those of `sdpa_mask`, and so is the result: bool, (B, 1, S, T).
    """
    this = _running[0]
    of_mask = (mask_function, attention_mask)
    if torch.compiler.is_compiling() and this.is_prompt:  # the graph's mask is read, not made
        kwargs.update(local_size=local_size, allow_is_causal_skip=allow_is_causal_skip)
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, *of_mask, **kwargs)
    kwargs["allow_is_causal_skip"] = False
    layer = this.layer_under(local_size)
    if layer is None:
        return torch.empty(0, 0, 0, 0)  # no layer holds all tokens: `_attend` refuses it
    is_growing = layer.window is layer.most is None and q_length == 1
    if allow_is_causal_skip and (this.is_prompt or is_growing):
        is_short = local_size is None or kv_length < local_size
        if is_short and (attention_mask is None or bool(attention_mask.all())):
            return None
    if this.is_prompt:
        lengths = shard_lengths(q_length, this.ranks.world_size)
        start, count = sum(lengths[: this.ranks.rank]), lengths[this.ranks.rank]
        rows = sdpa_mask(batch_size, count, kv_length, start, 0, *of_mask, **kwargs)
        return wrap_parts(rows, this.mesh, [Shard(2)], (*rows.shape[:2], q_length, kv_length))
    if not layer.slots:  # the first tokens of all are the same on every rank
        layer.number_slots(0, q_length, torch.device(kwargs["device"]))
    tokens, is_held = layer.tokens_read(q_length)

    def of_tokens(batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
        seen: Tensor = mask_function(batch, head, query, tokens[slot])
        return seen if is_held is None else seen & is_held[slot]

    own = None
    if attention_mask is not None:
        last = attention_mask.shape[-1] - 1
        own = attention_mask.index_select(-1, tokens.clamp(max=last)) & (tokens <= last)
    return sdpa_mask(batch_size, q_length, len(tokens), q_offset, 0, of_tokens, own, **kwargs)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as an attention of transformers does, to a prompt or to keys on all ranks.

    Returns:
        out (B, S, H, E), and None for the probabilities.
    """
    this = _running[0]
    if this.is_first:
        this.attended += 1
    _check_call(module, attention_mask, dropout, is_causal, kwargs)
    if isinstance(key, DTensor):
        has_more = softcap is not None or s_aux is not None
        if has_more and torch.compiler.is_compiling():
            raise _refusal(
                module, "scores as they are in a compiled prompt", "sinks, or scores with a cap"
            )
        out, lse = _attend_to_prompt(query, key, value, attention_mask, scaling, softcap)
    else:
        out, lse = attend_to_spread_keys(
            query,
            key,
            value,
            attention_mask,
            group_name=this.ranks.group_name,
            world_size=this.ranks.world_size,
            scale=scaling,
            change=None if softcap is None else _Cap(softcap),
        )
    if s_aux is not None:
        # A sink takes part in the softmax, and has no value.
        out = out * torch.sigmoid(lse - s_aux.view(1, -1, 1)).unsqueeze(-1)
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _attend_to_prompt(
    query: Any,
    key: Any,
    value: Any,
    mask: Tensor | None,
    scale: float | None,
    cap: float | None,
) -> tuple[Tensor, Any]:
    """Attend along the sharded sequence; the lse is computed in eager code alone."""
    # DTensor gathers what is broadcast to heads and concatenated, as MLA's keys are.
    keys, values = (one.redistribute(placements=query.placements) for one in (key, value))
    width = values.shape[-1]
    if width < keys.shape[-1]:  # MLA
        padded: Any = F.pad(values, (0, keys.shape[-1] - width))
        values = padded
    if torch.compiler.is_compiling():
        attended: Any = F.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return attended[..., :width], None
    score = SCORE if cap is None else Rule.parse(f"k - q <= 0;{cap}*Tanh({1 / cap}*s)").score
    out, lse = attend_with_lse(
        query, keys, values, mask, mask is None, scale=scale, enable_gqa=True, score=score
    )
    return out[..., :width], lse


class _Cap:
    """Scores that are capped: cap * tanh(scores / cap)."""

    def __init__(self, cap: float) -> None:
        self.cap = cap

    def value(self, scores: Tensor) -> Tensor:
        """Return what takes their place."""
        return self.cap * torch.tanh(scores / self.cap)

    def slope(self, scores: Tensor) -> Tensor:
        """Return its derivative."""
        return 1 - torch.tanh(scores / self.cap) ** 2


def _check_call(
    module: nn.Module,
    mask: Any,
    dropout: float,
    is_causal: bool | None,
    kwargs: Mapping[str, Any],
) -> None:
    if dropout and module.training:
        raise _refusal(module, "no dropout", f"dropout={dropout}")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool):
        raise _refusal(module, "the mask that transformers makes", f"{type(mask).__name__}")
    if is_causal is False or not getattr(module, "is_causal", True):
        raise _refusal(module, "causal attention", "attention in both directions")
    if kwargs.get("position_bias") is not None:
        raise _refusal(module, "scores without a bias", "a position_bias")


def _refusal(module: nn.Module, expected: str, got: str) -> UnsupportedAttention:
    return UnsupportedAttention(
        site=f"{SITE}: {type(module).__name__}",
        expected=expected,
        got=got,
        remedy="generate on one process, or leave it out",
    )


def _compare(what: str, group_name: str, *tensors: Tensor | None) -> None:
    """Compare tensors of all ranks."""

    def describe() -> Entry:
        parts = [t.detach().cpu().contiguous() for t in tensors if t is not None]
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        tokens = digest(b"".join(part.numpy().tobytes() for part in parts))
        remedy = "give all ranks the same ids and attention_mask"
        return Entry(SITE, {"what": what, "shapes": shapes, "digest": tokens}, (), remedy)

    agree_once([group_name], describe)


def _take_generator_of_first(mesh: DeviceMesh, device: torch.device) -> None:
    """Let torch's generator of a device go on from the state of the first rank's."""
    of_device: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    state = of_device.get_rng_state()
    sent = state.to(device)
    dist.broadcast(sent, group=mesh.get_group(), group_src=0)
    of_device.set_rng_state(sent.to(state.device))


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _usable(tensor: Any) -> Any:
    """Return a tensor that is not of inference mode."""
    return tensor.clone() if isinstance(tensor, Tensor) and tensor.is_inference() else tensor
