"""Context parallelism of this library for accelerate, and for the Trainer of transformers.

    from cp_inductor.integrations.accelerate import register

    register()
    TrainingArguments(
        parallelism_config=ParallelismConfig(cp_size=2, cp_backend="cp_inductor"),
        torch_compile=True,
        torch_compile_backend="cp_inductor",
    )

accelerate (1.15) and transformers (5.23) know one backend of context parallelism, torch's, and they
check for it by name. `register` replaces the methods that do, on their classes. Each of the
replacements calls the original unless the configuration names this library.

The batch is whole on every rank of the axis, and so is the loss. Weights are replicated DTensors,
whose gradients are those of all tokens: nothing is averaged afterwards. Under FSDP2 they are
sharded over all ranks, and averaged over those with other batches (`sharded.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import accelerate.accelerator
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from cp_inductor.errors import InvalidArgument, UnsupportedPlacement
from cp_inductor.integrations.loaders import iterate_loader, take_samples
from cp_inductor.integrations.methods import HEAD_IS_EAGER, NAME, Method, is_ours, replace_method
from cp_inductor.integrations.replicas import (
    distribute_with_optimizers,
    run_on_whole_batches,
    watch_optimizer,
)
from cp_inductor.integrations.sharded import shard_weights
from cp_inductor.torch_private.checkpoint import redraw_when_recomputed

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
    for name, make in (
        ("_prepare_cp", _prepare_cp),
        ("_prepare_fsdp2", _prepare_fsdp2),
        ("prepare_model", _prepare_model),
        ("prepare_optimizer", _prepare_optimizer),
        ("prepare_data_loader", _prepare_data_loader),
        ("maybe_context_parallel", _maybe_context_parallel),
        ("backward", _backward),
        ("gather_for_metrics", _gather_for_metrics),
    ):
        replace_method(Accelerator, name, make)
    replace_method(accelerate.accelerator, "fsdp2_apply_ac", _checkpoint_layers)
    replace_method(accelerate.accelerator, "fsdp2_prepare_model", _shard_model)
    replace_method(DataLoaderShard, "__iter__", iterate_loader)
    replace_method(TorchDynamoPlugin, "__post_init__", _compile_whole)
    _name_compilers()
    if importlib.util.find_spec("transformers") is not None:
        from transformers import Trainer

        replace_method(Trainer, "_wrap_model", _wrap_model)
        replace_method(Trainer, "get_batch_samples", take_samples)
        replace_method(Trainer, "_prepare_context_parallel_inputs", _prepare_inputs)
        replace_method(Trainer, "_get_num_items_in_batch", _count_items)
        replace_method(Trainer, "compute_loss", _compute_loss)
    if importlib.util.find_spec("trl") is not None:
        from cp_inductor.integrations import trl

        trl.register(_compute_loss)


def _axis(accelerator: Accelerator) -> DeviceMesh:
    return accelerator.torch_device_mesh["cp"]


def _post_init(original: Method) -> Method:
    def __post_init__(self: ParallelismConfig) -> None:  # noqa: N807
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

    return __post_init__


def _not_alone(got: str) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        site="ParallelismConfig",
        expected=f"cp_size, or cp_size and dp_shard_size under FSDP2, with cp_backend={NAME!r}",
        got=got,
        remedy="use these axes, or write the loop with cp_inductor.context_parallel (docs/fsdp.md)",
    )


def _init_state(original: Method) -> Method:
    def __init__(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:  # noqa: N807
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

    return __init__


def _validate(original: Method) -> Method:
    def _validate_accelerator(self: ParallelismConfig, accelerator: Accelerator) -> None:
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

    return _validate_accelerator


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


def _prepare_cp(original: Method) -> Method:
    def _prepare_cp(self: Accelerator, *args: Any) -> Any:
        if not is_ours(self):
            return original(self, *args)
        if self.is_fsdp2:
            return args
        optimizers = [_plain(arg) for arg in args if isinstance(arg, Optimizer)]
        for arg in args:
            if isinstance(arg, nn.Module):
                _distribute(self, arg, optimizers)
        for optimizer in optimizers:
            watch_optimizer(optimizer)
        return args

    return _prepare_cp


def _prepare_model(original: Method) -> Method:
    def prepare_model(
        self: Accelerator,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        if not is_ours(self):
            return original(self, model, device_placement, evaluation_mode)
        if self.is_fsdp2:
            _shard(self, model)
            _compile_sharded(self, model)
            return model
        _distribute(self, model, [], device_placement)
        # Without a wrapper that averages gradients: those of DTensors are whole.
        with _compiled_below_head(self, model):
            prepared = original(self, model, device_placement=False, evaluation_mode=True)
        run_on_whole_batches(
            prepared, self.unwrap_model(model, keep_torch_compile=False), _axis(self)
        )
        return prepared

    return prepare_model


def _prepare_fsdp2(original: Method) -> Method:
    def _prepare_fsdp2(self: Accelerator, *args: Any) -> Any:
        if not is_ours(self):
            return original(self, *args)
        # The original compiles before it shards, and keeps a wrapper: here it shards only.
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            return original(self, *args)
        finally:
            plugin.backend = backend
            for arg in args:
                if isinstance(arg, nn.Module):
                    _compile_sharded(self, arg)

    return _prepare_fsdp2


def _compile_sharded(accelerator: Accelerator, model: nn.Module) -> None:
    """Compile a model in place, and let it take whole batches."""
    if getattr(model, "_cp_inductor_takes_whole_batches", False):
        return
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO:
        below: Any = model.base_model if getattr(model, HEAD_IS_EAGER, False) else model
        below.forward = torch.compile(below.forward, **plugin.to_kwargs())
    run_on_whole_batches(model, model, _axis(accelerator))


def _checkpoint_layers(original: Method) -> Method:
    def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        if not is_ours(accelerator):
            return original(accelerator, model)
        plugin = accelerator.state.fsdp_plugin
        if plugin.auto_wrap_policy is not None and not redraw_when_recomputed(model):
            original(accelerator, model)  # a second time it would wrap what it has wrapped
        if not redraw_when_recomputed(model):
            raise InvalidArgument(
                site="FullyShardedDataParallelPlugin",
                expected="an auto_wrap_policy that names the layers to checkpoint",
                got=f"auto_wrap_policy={plugin.auto_wrap_policy!r}, by which no module of"
                f" {type(model).__name__} is one",
                remedy="set auto_wrap_policy='transformer_based_wrap' and"
                " transformer_cls_names_to_wrap=['...']",
            )
        return model

    return fsdp2_apply_ac


def _shard_model(original: Method) -> Method:
    def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
        if not is_ours(accelerator):
            return original(accelerator, model)
        _shard(accelerator, model)
        return model

    return fsdp2_prepare_model


def _shard(accelerator: Accelerator, model: nn.Module) -> None:
    mesh = accelerator.torch_device_mesh
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    shard_weights(
        model,
        mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
        mesh["cp"],
        param_dtype=getattr(policy, "param_dtype", None),
        reduce_dtype=getattr(policy, "reduce_dtype", None),
        # As accelerate does: the optimizer works on them, and the policy casts what is gathered.
        is_float32=accelerator.mixed_precision != "no",
        is_offloaded=isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy),
    )
    # accelerate asks for it while it accumulates. Gradients are summed in every backward.
    model.set_requires_gradient_sync = _ignore  # type: ignore[assignment]


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def _compiled_below_head(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Compile what is below a head that runs in eager code, if the model has such a head."""
    plugin = accelerator.state.dynamo_plugin
    backend = plugin.backend
    if backend == DynamoBackend.NO or not getattr(model, HEAD_IS_EAGER, False):
        yield
        return
    model.base_model.compile(**plugin.to_kwargs())  # type: ignore[union-attr]
    plugin.backend = DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend


def _prepare_optimizer(original: Method) -> Method:
    def prepare_optimizer(
        self: Accelerator, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        if is_ours(self) and not self.is_fsdp2:
            watch_optimizer(_plain(optimizer))
        return original(self, optimizer, *args, **kwargs)

    return prepare_optimizer


def _prepare_data_loader(original: Method) -> Method:
    def prepare_data_loader(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self):
            return original(self, *args, **kwargs)
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
        before, settings.dispatch_batches = settings.dispatch_batches, False
        try:
            return original(self, *args, **kwargs)
        finally:
            settings.dispatch_batches = before

    return prepare_data_loader


def _distribute(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Optimizer],
    device_placement: bool | None = None,
) -> None:
    if getattr(model, "_is_accelerate_prepared", False):
        return
    if accelerator.device_placement if device_placement is None else device_placement:
        model.to(accelerator.device)
    known = [_plain(optimizer) for optimizer in accelerator._optimizers]
    bare = accelerator.unwrap_model(model, keep_torch_compile=False)
    distribute_with_optimizers(bare, _axis(accelerator), [*known, *optimizers])


def _plain(optimizer: Any) -> Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)


def _maybe_context_parallel(original: Method) -> Method:
    def maybe_context_parallel(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        """Do nothing: a prepared model takes whole batches, and shards them itself."""
        return nullcontext() if is_ours(self) else original(self, *args, **kwargs)

    return maybe_context_parallel


def _backward(original: Method) -> Method:
    def backward(self: Accelerator, loss: Any, **kwargs: Any) -> None:
        if not is_ours(self):
            original(self, loss, **kwargs)
            return
        # Gradients are summed over ranks with other batches: of their mean, as FSDP defines it.
        with implicit_replication():
            original(self, loss / self.parallelism_config.dp_shard_size, **kwargs)

    return backward


def _gather_for_metrics(original: Method) -> Method:
    def gather_for_metrics(
        self: Accelerator, input_data: Any, use_gather_object: bool = False
    ) -> Any:
        if not is_ours(self):
            return original(self, input_data, use_gather_object)
        # All ranks have the same samples: gathering would count each of them once per rank. Of the
        # last batch, as on one process, only as many count as the data set has left.
        state = self.gradient_state
        num = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        others = self.torch_device_mesh["dp_shard"] if _num_batches(self) > 1 else None
        if use_gather_object:
            return (_gather_lists(input_data, others) if others else input_data)[:num]
        return _first(input_data, num, others)

    return gather_for_metrics


def _num_batches(accelerator: Accelerator) -> int:
    """Return how many ranks have batches of their own."""
    size: int = accelerator.parallelism_config.dp_shard_size
    return size


def _first(data: Any, num: int | None, others: DeviceMesh | None = None) -> Any:
    """Return the first samples of tensors, in tuples, lists and mappings, or of a list of others.

    What is sharded, such as logits, comes back whole. `others` are the ranks with other samples.
    """

    def of_tensor(tensor: Tensor) -> Tensor:
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if others is not None:
            whole = _gather_samples(whole if whole.ndim else whole[None], others)
        return whole[:num] if whole.ndim else whole

    try:
        return recursively_apply(of_tensor, data, error_on_other_type=True)
    except TypeError:
        return (_gather_lists(data, others) if others is not None else data)[:num]


def _gather_samples(samples: Tensor, others: DeviceMesh) -> Tensor:
    gathered = samples.new_empty((others.size() * len(samples), *samples.shape[1:]))
    dist.all_gather_into_tensor(gathered, samples.contiguous(), group=others.get_group())
    return gathered


def _gather_lists(data: list[Any], others: DeviceMesh) -> list[Any]:
    gathered: list[Any] = [None] * others.size()
    dist.all_gather_object(gathered, data, group=others.get_group())
    return [item for part in gathered for item in part]


def _name_compilers() -> None:
    """Make members of accelerate's enum of compilers when they are asked for."""

    def _missing_(cls: type[DynamoBackend], value: object) -> DynamoBackend | None:
        if value not in COMPILERS:
            return None
        member = str.__new__(cls, value)
        member._name_ = member._value_ = str(value)
        return cls._value2member_map_.setdefault(value, member)

    DynamoBackend._missing_ = classmethod(_missing_)


def _compile_whole(original: Method) -> Method:
    def __post_init__(self: TorchDynamoPlugin) -> None:  # noqa: N807
        is_left_open = self.fullgraph is None
        original(self)
        # TrainingArguments can ask for neither. A break inside a mask costs its meaning, and
        # DTensor (torch 2.13) has no views of tensors whose number of sequences is dynamic.
        if self.backend in COMPILERS:
            self.fullgraph = is_left_open or self.fullgraph
            self.dynamic = bool(self.dynamic)

    return __post_init__


def _prepare_inputs(original: Method) -> Method:
    def _prepare_context_parallel_inputs(self: Any, model: nn.Module, inputs: Any) -> Any:
        # Any attention and any mask: the compiler reads them.
        return (nullcontext, inputs) if is_ours(self.accelerator) else original(self, model, inputs)

    return _prepare_context_parallel_inputs


def _wrap_model(original: Method) -> Method:
    def _wrap_model(self: Any, model: nn.Module, training: bool = True, **kwargs: Any) -> Any:
        if is_ours(self.accelerator) and not training and model is self.model:
            # The original evaluates what it has not wrapped: that does not take whole batches.
            return self.model_wrapped
        return original(self, model, training, **kwargs)

    return _wrap_model


def _count_items(original: Method) -> Method:
    def _get_num_items_in_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self.accelerator):
            return original(self, *args, **kwargs)
        # Summed over the ranks and divided by cp_size: the labels of the batch, counted once.
        is_of_all = self.args.average_tokens_across_devices or _num_batches(self.accelerator) == 1
        with _averaging(self, is_of_all):
            count = original(self, *args, **kwargs)
        return count if is_of_all or count is None else count * self.get_cp_size()

    return _get_num_items_in_batch


def _compute_loss(original: Method) -> Method:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The original multiplies by the number of ranks, for gradients that are averaged over them.
        if not is_ours(self.accelerator):
            return original(self, *args, **kwargs)
        with _averaging(self, False), _losses_of_whole_outputs(self):
            result = original(self, *args, **kwargs)
        # Those with other batches do average.
        is_of_all = self.args.average_tokens_across_devices and (
            self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        )
        count = kwargs.get("num_items_in_batch", args[3] if len(args) > 3 else None)
        num = _num_batches(self.accelerator)
        if num == 1 or count is None or not is_of_all:
            return result
        return (result[0] * num, *result[1:]) if isinstance(result, tuple) else result * num

    return compute_loss


@contextmanager
def _losses_of_whole_outputs(trainer: Any) -> Iterator[None]:
    """Give label smoothing and `compute_loss_func` whole logits, as their labels are whole."""
    smoother, loss_function = trainer.label_smoother, trainer.compute_loss_func
    if smoother is not None:
        trainer.label_smoother = _of_whole_outputs(smoother, **_shift_of(trainer))
    if loss_function is not None:
        trainer.compute_loss_func = _of_whole_outputs(loss_function)
    try:
        yield
    finally:
        trainer.label_smoother, trainer.compute_loss_func = smoother, loss_function


def _of_whole_outputs(function: Any, **more: Any) -> Any:
    def call(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        return function(_first(outputs, None), *args, **{**kwargs, **more})

    return call


def _shift_of(trainer: Any) -> dict[str, bool]:
    """Return whether labels are the next tokens: Trainer asks the class, and forgets the compile.

    transformers 5.23 compares names, and a compiled model's is OptimizedModule: it would smooth the
    labels of the tokens themselves.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    bare = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    is_causal = type(bare).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {"shift_labels": True} if is_causal else {}


@contextmanager
def _averaging(trainer: Any, value: bool) -> Iterator[None]:
    """Set whether Trainer counts tokens over devices, where the sequence is sharded by us."""
    if not is_ours(trainer.accelerator):
        yield
        return
    args = trainer.args
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = value
    try:
        yield
    finally:
        args.average_tokens_across_devices = before
