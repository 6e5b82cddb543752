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
whose gradients are those of all tokens: nothing is averaged afterwards.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, DynamoBackend, TorchDynamoPlugin
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from cp_inductor.errors import InvalidArgument, UnsupportedPlacement
from cp_inductor.integrations.methods import HEAD_IS_EAGER, NAME, Method, is_ours, replace_method
from cp_inductor.integrations.replicas import (
    distribute_with_optimizers,
    run_on_whole_batches,
    watch_optimizer,
)

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
        ("prepare_model", _prepare_model),
        ("prepare_optimizer", _prepare_optimizer),
        ("maybe_context_parallel", _maybe_context_parallel),
        ("backward", _backward),
        ("gather_for_metrics", _gather_for_metrics),
    ):
        replace_method(Accelerator, name, make)
    replace_method(TorchDynamoPlugin, "__post_init__", _compile_whole)
    _name_compilers()
    if importlib.util.find_spec("transformers") is not None:
        from transformers import Trainer

        replace_method(Trainer, "_wrap_model", _wrap_model)
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
        names = ("dp_replicate_size", "dp_shard_size", "tp_size")
        others = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name) > 1]
        if others and self.cp_enabled:
            raise _not_alone(", ".join(others))

    return __post_init__


def _not_alone(got: str) -> UnsupportedPlacement:
    return UnsupportedPlacement(
        site="ParallelismConfig",
        expected=f"cp_size alone with cp_backend={NAME!r}: weights are whole on every rank",
        got=got,
        remedy="use one axis, or write the loop with FSDP2 and cp_inductor.context_parallel"
        " (docs/fsdp.md)",
    )


def _init_state(original: Method) -> Method:
    def __init__(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        # On accelerators the original asks for FSDP2 where it sees a cp_size, whatever the backend.
        config = kwargs.get("parallelism_config")
        if config is None or not config.cp_enabled or config.cp_backend != NAME:
            original(self, *args, **kwargs)
            return
        is_first = not AcceleratorState._shared_state
        original(self, *args, **{**kwargs, "parallelism_config": None})
        if is_first:
            self.parallelism_config = config

    return __init__


def _validate(original: Method) -> Method:
    def _validate_accelerator(self: ParallelismConfig, accelerator: Accelerator) -> None:
        if self.cp_backend != NAME or not self.cp_enabled:
            original(self, accelerator)
            return
        if accelerator.distributed_type in (
            DistributedType.FSDP,
            DistributedType.DEEPSPEED,
            DistributedType.MEGATRON_LM,
        ):
            raise _not_alone(str(accelerator.distributed_type))
        if self.total_size != accelerator.num_processes:
            raise InvalidArgument(
                site="ParallelismConfig",
                expected=f"cp_size={accelerator.num_processes}, the number of processes",
                got=f"cp_size={self.cp_size}",
                remedy="start as many processes as ranks share the sequence",
            )

    return _validate_accelerator


def _prepare_cp(original: Method) -> Method:
    def _prepare_cp(self: Accelerator, *args: Any) -> Any:
        if not is_ours(self):
            return original(self, *args)
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
        _distribute(self, model, [], device_placement)
        # Without a wrapper that averages gradients: those of DTensors are whole.
        with _compiled_below_head(self, model):
            prepared = original(self, model, device_placement=False, evaluation_mode=True)
        run_on_whole_batches(
            prepared, self.unwrap_model(model, keep_torch_compile=False), _axis(self)
        )
        return prepared

    return prepare_model


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
        if is_ours(self):
            watch_optimizer(_plain(optimizer))
        return original(self, optimizer, *args, **kwargs)

    return prepare_optimizer


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
        with implicit_replication() if is_ours(self) else nullcontext():
            original(self, loss, **kwargs)

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
        return input_data[:num] if use_gather_object else _first(input_data, num)

    return gather_for_metrics


def _first(data: Any, num: int | None) -> Any:
    """Return the first samples of tensors, in tuples, lists and mappings, or of a list of others.

    What is sharded, such as logits, comes back whole.
    """

    def of_tensor(tensor: Tensor) -> Tensor:
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole[:num] if whole.ndim else whole

    try:
        return recursively_apply(of_tensor, data, error_on_other_type=True)
    except TypeError:
        return data[:num]


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
        # Summed over the ranks and divided by cp_size: the labels of the batch, counted once.
        with _averaging(self, True):
            return original(self, *args, **kwargs)

    return _get_num_items_in_batch


def _compute_loss(original: Method) -> Method:
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The original multiplies by the number of ranks, for gradients that are averaged over them.
        if not is_ours(self.accelerator):
            return original(self, *args, **kwargs)
        with _averaging(self, False), _losses_of_whole_outputs(self):
            return original(self, *args, **kwargs)

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
