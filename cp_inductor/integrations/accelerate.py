"""Context parallelism of this library for accelerate, and for the Trainer of transformers.

    from cp_inductor.integrations.accelerate import register

    register()
    TrainingArguments(
        parallelism_config=ParallelismConfig(cp_size=2, cp_backend="cp_inductor"),
        torch_compile=True,
        torch_compile_backend="cp_inductor",
    )

accelerate (1.15) and transformers (5.23) know one backend of context parallelism, torch's, and they
check for it by name. `register` replaces the methods that do, on their classes. A program whose
configuration does not name this library runs the original methods.

Models are parallelized: the batch is whole on every rank of the axis, and so are the loss and the
gradients, so that nothing is averaged afterwards. Under FSDP2 weights are stored in shards over all
ranks, and their gradients averaged over those with other batches.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import accelerate.accelerator
import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from cp_inductor.errors import InvalidArgument, UnsupportedPlacement
from cp_inductor.integrations import trainer
from cp_inductor.integrations.methods import (
    HEAD_IS_EAGER,
    NAME,
    Method,
    attributes_of,
    is_ours,
    replace_method,
)
from cp_inductor.integrations.outputs import gather_objects, gather_outputs
from cp_inductor.modules.parallelize import parallelize
from cp_inductor.modules.weights import ShardedWeights
from cp_inductor.torch_private.checkpoint import has_checkpointed_layers, redraw_when_recomputed

_IS_COMPILED = "_cp_inductor_is_compiled"
COMPILERS = ("CP_INDUCTOR", "CP_AOT_EAGER")  # accelerate writes names of backends in capitals


def register() -> None:
    """Let classes of accelerate, transformers and TRL know this library, once per process.

    After this call `ParallelismConfig(cp_backend="cp_inductor")`,
    `TorchDynamoPlugin(backend="cp_inductor")` and
    `TrainingArguments(torch_compile_backend="cp_inductor")` are valid, as are the environment
    variables from which accelerate reads the same. Programs that name no such backend run as
    before. torch is not changed. A second call changes nothing.

    Raises:
        AttributeError: accelerate, transformers or TRL, as installed, has no such name; nothing
            that was replaced before is undone.
    """
    replace_method(ParallelismConfig, "__post_init__", _post_init)
    replace_method(ParallelismConfig, "_validate_accelerator", _validate)
    replace_method(AcceleratorState, "__init__", _init_state)
    methods: dict[str, Method] = {
        "_prepare_cp": _prepare_cp,
        "_prepare_fsdp2": _prepare_fsdp2,
        "prepare_model": _prepare_model,
        "prepare_data_loader": _prepare_data_loader,
        "maybe_context_parallel": _maybe_context_parallel,
        "gather_for_metrics": _gather_for_metrics,
    }
    for name, new in methods.items():
        replace_method(Accelerator, name, new, when=is_ours)
    replace_method(accelerate.accelerator, "fsdp2_apply_ac", _checkpoint_layers, when=is_ours)
    replace_method(accelerate.accelerator, "fsdp2_prepare_model", _shard_model, when=is_ours)
    replace_method(TorchDynamoPlugin, "__post_init__", _compile_whole)
    _name_compilers()
    if importlib.util.find_spec("transformers") is not None:
        trainer.register()
    if importlib.util.find_spec("trl") is not None:
        from cp_inductor.integrations import trl

        trl.register()


def _post_init(original: Method, self: ParallelismConfig) -> None:
    handler = self.cp_handler  # the original fills it in
    try:
        original(self)
        return
    except (ValueError, KeyError):  # it takes one name only
        if self.cp_backend != NAME:
            raise
    if handler is not None and self.cp_size > 1:
        raise InvalidArgument(
            site="ParallelismConfig",
            expected=f"no cp_handler with cp_backend={NAME!r}",
            got=f"a {type(handler).__name__}",
            remedy="leave it out; options of the plan go to torch.compile"
            " (TorchDynamoPlugin(options=...))",
        )
    self.cp_backend, self.cp_handler = "torch", None
    original(self)
    self.cp_backend, self.cp_handler = NAME, None
    names = ("dp_replicate_size", "tp_size")
    others = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1]
    if others and self.cp_enabled:
        raise _not_alone(", ".join(others))


def _not_alone(got: str) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        site="ParallelismConfig",
        expected=f"cp_size, or cp_size and dp_shard_size under FSDP2, with cp_backend={NAME!r}",
        got=got,
        remedy="use these axes, or write the loop with cp_inductor.context_parallel (docs/fsdp.md)",
    )


def _init_state(original: Method, self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    # On accelerators the original asks for FSDP2 where it sees a cp_size, whatever the backend.
    config = kwargs.get("parallelism_config")
    if config is None or not config.cp_enabled or config.cp_backend != NAME:
        original(self, *args, **kwargs)
        return
    is_first = not AcceleratorState._shared_state
    plugin = kwargs.get("fsdp_plugin")
    original(self, *args, **{**kwargs, "parallelism_config": None})
    if not is_first:
        return
    self.parallelism_config = config
    if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        # The original knows FSDP on accelerators only.
        if self._mixed_precision != "no":
            plugin.set_mixed_precision(self._mixed_precision)
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def _validate(original: Method, self: ParallelismConfig, accelerator: Accelerator) -> None:
    if self.cp_backend != NAME or not self.cp_enabled:
        original(self, accelerator)
        return
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise _not_alone(str(accelerator.distributed_type))
    if accelerator.is_fsdp2:
        _check_plugin(accelerator.state.fsdp_plugin)
    elif accelerator.distributed_type == DistributedType.FSDP:
        raise _not_alone("FSDP1")
    elif self.dp_shard_size > 1:
        raise _not_alone(f"dp_shard_size={self.dp_shard_size} without FSDP2")
    if self.total_size != accelerator.num_processes:
        size = accelerator.num_processes // self.dp_shard_size
        raise InvalidArgument(
            site="ParallelismConfig",
            expected=f"cp_size={size}, the number of processes"
            + (f" by dp_shard_size={self.dp_shard_size}" if self.dp_shard_size > 1 else ""),
            got=f"cp_size={self.cp_size}",
            remedy="start as many processes as ranks share the sequences",
        )


def _check_plugin(plugin: Any) -> None:
    """Refuse what sharded weights and DTensors cannot do."""
    # Each with a way out.
    refused = {
        # torch's save_on_cpu (2.13) cannot save DTensors, and Dynamo does not trace it.
        "activation_checkpointing_offload": "leave it out: checkpoints keep the inputs of layers"
        " on the device, each rank those of its own tokens",
        # FSDP2 leaves their weights plain, which do not go with activations that are DTensors.
        "ignored_modules": "leave it out: freeze what is not to be trained",
    }
    for name, remedy in refused.items():
        value = getattr(plugin, name, None)
        if value:
            raise InvalidArgument(
                site="FullyShardedDataParallelPlugin",
                expected=f"no {name} with cp_backend={NAME!r}",
                got=f"{name}={value!r}",
                remedy=remedy,
            )


def _prepare_cp(original: Method, self: Accelerator, *args: Any) -> Any:
    for arg in args:
        if isinstance(arg, nn.Module) and not self.is_fsdp2:
            _parallelize(self, arg)
    return args


def _prepare_model(
    original: Method,
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    if self.is_fsdp2:
        _shard(self, model)
        _compile_sharded(self, model)
        return model
    _parallelize(self, model, device_placement)
    # Without a wrapper that averages gradients: they are whole.
    with _compile_below_head(self, model):
        return original(self, model, device_placement=False, evaluation_mode=True)


def _prepare_fsdp2(original: Method, self: Accelerator, *args: Any) -> Any:
    # The original compiles before it shards, and keeps a wrapper: here it shards only.
    with attributes_of(self.state.dynamo_plugin, backend=DynamoBackend.NO):
        prepared = original(self, *args)
    for arg in args:
        if isinstance(arg, nn.Module):
            _compile_sharded(self, arg)
    return prepared


def _compile_sharded(accelerator: Accelerator, model: nn.Module) -> None:
    """Compile a model in place, once."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO and not hasattr(model, _IS_COMPILED):
        _let_frozen_embeddings_be(model)
        below: Any = _below_head(model) or model
        below.forward = torch.compile(below.forward, **plugin.to_kwargs())
        setattr(model, _IS_COMPILED, True)


def _checkpoint_layers(original: Method, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    plugin = accelerator.state.fsdp_plugin
    if plugin.auto_wrap_policy is not None and not has_checkpointed_layers(model):
        original(accelerator, model)  # a second time it would wrap what it has wrapped
        redraw_when_recomputed(model)
    if not has_checkpointed_layers(model):
        raise InvalidArgument(
            site="FullyShardedDataParallelPlugin",
            expected="an auto_wrap_policy that names the layers to checkpoint",
            got=f"auto_wrap_policy={plugin.auto_wrap_policy!r}, by which no module of"
            f" {type(model).__name__} is one",
            remedy="set auto_wrap_policy='transformer_based_wrap' and"
            " transformer_cls_names_to_wrap=['...']",
        )
    return model


def _shard_model(original: Method, accelerator: Accelerator, model: nn.Module) -> nn.Module:
    _shard(accelerator, model)
    return model


def _shard(accelerator: Accelerator, model: nn.Module) -> None:
    mesh = accelerator.torch_device_mesh
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    weights = ShardedWeights(
        mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
        param_dtype=getattr(policy, "param_dtype", None),
        reduce_dtype=getattr(policy, "reduce_dtype", None),
        # As accelerate does: the optimizer works on them, and the policy casts what is gathered.
        is_float32=accelerator.mixed_precision != "no",
        is_offloaded=isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy),
    )
    parallelize(model, mesh["cp"], weights=weights)
    # accelerate asks for it while it accumulates. Gradients are summed in every backward.
    model.set_requires_gradient_sync = _ignore  # type: ignore[assignment]


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _let_frozen_embeddings_be(model: nn.Module) -> None:
    """Take away hooks that have the output of frozen embeddings require gradients.

    Checkpoints beside adapters need them in eager code, if they are reentrant (transformers 5.23,
    peft 0.21). Dynamo does not trace such hooks, and its checkpoints do not need them.
    """
    for part in model.modules():
        for key, hook in [*part._forward_hooks.items()]:
            if getattr(hook, "__name__", "") == "make_inputs_require_grads":
                del part._forward_hooks[key]


def _below_head(model: nn.Module) -> nn.Module | None:
    """Return what is below a head that runs in eager code; the model may be within adapters."""
    heads: Any = (part for part in model.modules() if vars(part).get(HEAD_IS_EAGER))
    return next((head.base_model for head in heads), None)


def _compile_below_head(accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
    """Compile what is below a head that runs in eager code, and nothing more within the result."""
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO:
        _let_frozen_embeddings_be(model)
        below = _below_head(model)
        if below is not None:
            below.compile(**plugin.to_kwargs())
            return attributes_of(plugin, backend=DynamoBackend.NO)
    return nullcontext()


def _prepare_data_loader(original: Method, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    settings = self.dataloader_config
    if settings.dispatch_batches:
        raise InvalidArgument(
            site="Accelerator.prepare_data_loader",
            expected=f"dispatch_batches=False or None with cp_backend={NAME!r}",
            got="dispatch_batches=True",
            remedy="leave it out: every rank reads the batches, and takes its part of each",
        )
    # It is the default for data sets without a length, and cuts a batch into one part for each
    # process: ranks that share a sequence would train on the first of these, and skip others.
    with attributes_of(settings, dispatch_batches=False):
        return original(self, *args, **kwargs)


def _parallelize(
    accelerator: Accelerator, model: nn.Module, device_placement: bool | None = None
) -> None:
    if getattr(model, "_is_accelerate_prepared", False):
        return
    if accelerator.device_placement if device_placement is None else device_placement:
        model.to(accelerator.device)
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    parallelize(bare, accelerator.torch_device_mesh["cp"])


def _maybe_context_parallel(original: Method, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Do nothing: a prepared model takes whole batches, and shards them itself."""
    return nullcontext()


def _gather_for_metrics(
    original: Method, self: Accelerator, input_data: Any, use_gather_object: bool = False
) -> Any:
    # All ranks of a sequence have the same samples: gathering these would count each of them once
    # per rank. In the last batch only as many count as the data set has left, as on one process.
    state = self.gradient_state
    num = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    others = self.torch_device_mesh["dp_shard"] if trainer.num_batches(self) > 1 else None
    if use_gather_object:
        return gather_objects(input_data, num, others)
    return gather_outputs(input_data, num, others)


def _name_compilers() -> None:
    """Make members of accelerate's enum of compilers when they are asked for."""

    def _missing_(cls: type[DynamoBackend], value: object) -> DynamoBackend | None:
        if value not in COMPILERS:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = str(value)
        return cls._value2member_map_.setdefault(value, member)

    DynamoBackend._missing_ = classmethod(_missing_)


def _compile_whole(original: Method, self: TorchDynamoPlugin) -> None:
    is_left_open = self.fullgraph is None
    original(self)
    # TrainingArguments can ask for neither. A break inside a mask costs its meaning, and
    # DTensor (torch 2.13) has no views of tensors whose number of sequences is dynamic.
    if self.backend in COMPILERS:
        self.fullgraph = is_left_open or self.fullgraph
        self.dynamic = bool(self.dynamic)
