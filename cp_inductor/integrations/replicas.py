"""Put a model, and the optimizers that train it, on the ranks that share its sequence.

    model(input_ids=ids, labels=labels)     plain, whole        optimizer of plain parameters
      =>
    ids, labels as DTensors [Shard(1)] -> model -> loss, whole  optimizer of the model's DTensors

The caller passes whole batches and gets whole losses: a training loop need not know of DTensors.
State dicts are plain and whole as well, in both directions, so that a checkpoint can be loaded on
any number of ranks.

Assumes: weights are whole on every rank, and so are the states of optimizers.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import Optimizer

from cp_inductor.errors import SequenceWarning
from cp_inductor.modules.distribute import distribute
from cp_inductor.torch_private.dtensor import plain_for_replicated

# The sequence dims of what models are called with. Every other argument is whole on all ranks,
# which is right whatever it is.
SEQUENCE_DIMS: Mapping[str, int] = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "labels": 1,
    "shift_labels": 1,
    "token_type_ids": 1,
    "position_ids": -1,
    "decoder_input_ids": 1,
    "decoder_inputs_embeds": 1,
}
MASKS = ("attention_mask", "decoder_attention_mask")  # (B, S), or (B, 1, S, S), which stays whole

_IS_WATCHED = "_cp_inductor_is_watched"


def distribute_with_optimizers(
    model: nn.Module, mesh: DeviceMesh, optimizers: Sequence[Optimizer]
) -> None:
    """Replicate a model on a mesh, in place, and let optimizers of its parameters follow.

    A second call changes nothing. State dicts of the model stay plain.

    Args:
        model: the same on every rank, except for its values, compiled or not.
        mesh: 1-D, the ranks that share a sequence.
        optimizers: those that hold parameters of the model. Others stay as they are.
    """
    old = list(model.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings():  # optimizers follow here, or when they are prepared
        warnings.filterwarnings("ignore", "distribute makes new parameters", SequenceWarning)
        distribute(model, mesh)
    new = dict(model.named_parameters(remove_duplicate=False))
    moved: dict[Tensor, Tensor] = {
        parameter: new[name] for name, parameter in old if new[name] is not parameter
    }
    for optimizer in optimizers:
        _follow(optimizer, moved)
    if not getattr(model, _IS_WATCHED, False):
        model.register_state_dict_post_hook(_make_weights_plain)
        model.register_load_state_dict_pre_hook(_make_weights_dtensors)
        setattr(model, _IS_WATCHED, True)


def _follow(optimizer: Optimizer, moved: Mapping[Tensor, Tensor]) -> None:
    """Exchange the parameters of an optimizer, and what its state says of them."""
    for group in optimizer.param_groups:
        group["params"] = [moved.get(parameter, parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if parameter in moved]:
        optimizer.state[moved[parameter]] = optimizer.state.pop(parameter)
    is_ours = any(
        isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]
    )
    if is_ours and not getattr(optimizer, _IS_WATCHED, False):
        optimizer.register_state_dict_post_hook(_make_states_plain)
        optimizer.register_load_state_dict_post_hook(_make_states_dtensors)
        setattr(optimizer, _IS_WATCHED, True)
    _make_states_dtensors(optimizer)


def watch_optimizer(optimizer: Optimizer) -> None:
    """Keep the state dicts of an optimizer of DTensors plain."""
    _follow(optimizer, {})


def _make_weights_plain(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
) -> None:
    for name, value in state_dict.items():
        if name.startswith(prefix) and isinstance(value, DTensor):
            state_dict[name] = value.to_local()  # a replica


def _make_weights_dtensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object
) -> None:
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers()),
    }
    for name, held in tensors.items():
        value = state_dict.get(prefix + name)
        if isinstance(held, DTensor) and value is not None:
            state_dict[prefix + name] = _like(held, value)


def _make_states_plain(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = {
        index: {name: _local(value) for name, value in state.items()}
        for index, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _make_states_dtensors(optimizer: Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor):
            continue
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                state[name] = _like(parameter, value)


def _like(held: DTensor, value: Tensor) -> Tensor:
    if isinstance(value, DTensor):
        return value
    local = value.to(held.to_local().device)
    return DTensor.from_local(local, held.device_mesh, held.placements, run_check=False)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def run_on_whole_batches(prepared: nn.Module, model: nn.Module, mesh: DeviceMesh) -> None:
    """Let a model take whole batches and return whole losses, in place.

    Scalars that it returns are whole. Tensors with dims, such as logits, stay sharded DTensors.

    Args:
        prepared: what is called: the model, or what torch.compile made of it.
        model: the model itself, whose signature names the arguments.
        mesh: 1-D, the ranks that share a sequence.
    """
    if getattr(prepared, "_cp_inductor_takes_whole_batches", False):
        return
    inner = prepared.forward
    names = list(inspect.signature(model.forward).parameters)
    lengths = Lengths()

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        sharded = [_shard(name, value, mesh) for name, value in zip(names, args, strict=False)]
        sharded += args[len(names) :]
        named = {name: _shard(name, value, mesh) for name, value in kwargs.items()}
        lengths.note({**dict(zip(names, sharded, strict=False)), **named})
        with plain_for_replicated():
            return _whole(inner(*sharded, **named))

    prepared.forward = forward
    prepared._cp_inductor_takes_whole_batches = True  # type: ignore[assignment]


# The first lengths of packed batches have a graph each; all others share one.
NUM_LENGTHS = 2


class Lengths:
    """The lengths of packed batches. If there are more than a few, Dynamo shall make one graph.

    Trainer's compiles have dynamic=False unless the user says otherwise, because the number of
    sequences must be a constant of the graph. So only the dim of the tokens is marked as dynamic.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def note(self, batch: Mapping[str, Any]) -> None:
        """Mark the tokens of a batch as dynamic if it is packed, and its length is one of many.

        `torch._dynamo.config.automatic_dynamic_shapes = False` keeps a graph for each.
        """
        positions = batch.get("position_ids")
        if not isinstance(positions, DTensor):
            return
        if len(self._seen) <= NUM_LENGTHS:
            self._seen.add(positions.shape[-1])
        if len(self._seen) <= NUM_LENGTHS or not torch._dynamo.config.automatic_dynamic_shapes:
            return
        for name, value in batch.items():
            if isinstance(value, DTensor):
                torch._dynamo.maybe_mark_dynamic(value, _dim_of(name, value))


def _dim_of(name: str, value: DTensor) -> int:
    return (1 if name in MASKS else SEQUENCE_DIMS[name]) % value.ndim


def _shard(name: str, value: Any, mesh: DeviceMesh) -> Any:
    dim = 1 if name in MASKS and getattr(value, "ndim", 0) == 2 else SEQUENCE_DIMS.get(name)
    if dim is None or type(value) is not Tensor or value.ndim < 2:
        return value
    # From the first rank: loaders that shuffle differently on each rank must not mix batches.
    return distribute_tensor(value, mesh, [Shard(dim % value.ndim)])


def _whole(output: Any) -> Any:
    """Return scalars whole, in a container of the same class; tensors with dims stay sharded."""
    if isinstance(output, DTensor):
        return output if output.ndim else output.full_tensor()
    if isinstance(output, dict):
        for name, value in list(output.items()):
            if isinstance(value, (DTensor, tuple, list)):
                output[name] = _whole(value)
        return output
    if type(output) in (tuple, list):
        return type(output)(_whole(value) for value in output)
    return output
