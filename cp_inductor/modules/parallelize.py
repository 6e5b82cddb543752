"""Parallelize a model along the sequence: whole batches in, plain weights, the loss of all tokens.

    cp_inductor.parallelize(model, mesh["cp"])       nothing moves, nothing is replaced
    loss = torch.compile(model, backend="cp_inductor")(ids, labels)
    loss.backward(); optimizer.step()                .grad is plain and complete

While the model runs, its modules read their parameters and buffers as DTensors (`reading`), and its
inputs are DTensors that are sharded along the sequence (`whole_batches`). Outside of a run all are
plain: optimizers, checkpoints, clipping, adapters and `generate` see a model of one process.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ParallelStyle

from cp_inductor.errors import (
    InvalidArgument,
    UnsupportedAttention,
    UnsupportedPlacement,
    UnsupportedWrite,
)
from cp_inductor.modules.model import SITE, adapt, agree_on_model, check_arguments
from cp_inductor.modules.reading import (
    READING,
    ReadsLocally,
    as_on_one_process,
    class_of,
    computing,
    read_as_dtensors,
    read_locally,
)
from cp_inductor.modules.tokenwise import run_beside_tensor_parallelism
from cp_inductor.modules.weights import Options, ShardedWeights
from cp_inductor.modules.whole_batches import WholeBatches, contents_of
from cp_inductor.torch_private.dtensor import are_plain_tensors_replicated, checks_of_given_data
from cp_inductor.torch_private.modes import is_transforming, run_uncompiled
from cp_inductor.torch_private.traces import traces
from cp_inductor.trust.unreduced import watch_gradients

Module = TypeVar("Module", bound=nn.Module)

# How the class of a parallelized model takes batches; the forward that the object had itself.
BATCHES, OWN_FORWARD = "_cp_batches", "_cp_forward"
_numbers = itertools.count()


def parallelize(
    model: Module,
    mesh: DeviceMesh,
    *,
    tokenwise: Sequence[type[nn.Module]] = (),
    recurrent: Sequence[type[nn.Module]] = (),
    whole: Sequence[type[nn.Module]] = (),
    seq_dims: Mapping[str, int | None] | None = None,
    outputs: str = "sharded",
    weights: DeviceMesh | ShardedWeights | None = None,
    gradients: str = "sum",
) -> Module:
    """Let a model compute each batch on all ranks of a mesh, each rank its part of the sequence.

    The model takes whole batches, which are the same on all ranks, eager or compiled with
    ``backend="cp_inductor"``. Results without tokens, such as losses, come out plain and whole.
    Parameters, buffers and gradients stay plain and whole, or as DDP, `fully_shard` and others have
    them on other axes, before or after this call. Nothing is replaced but the classes of modules,
    by subclasses. `generate`, and whoever calls a part of the model, gets the model of one process.

    All ranks get the parameters and buffers of the first. Parameters and modules may be added or
    replaced later. Means and losses are over all tokens. A DTensor that is passed is taken as it
    is, and so is one among the weights, on the same mesh.

    Args:
        model: the same on every rank, except for its values.
        mesh: one axis, of the ranks that share sequences; or several that have names, of which the
            first holds the sequences.
        tokenwise: classes of modules that treat every token alone, and run on this rank's tokens.
            Their first argument is (B, S, ...) or (T, ...), and so are their results. Others are of
            these tokens if they are as long. Mixtures of experts of transformers are known.
        recurrent: classes of modules that pass states along the sequence by functions that
            `register_recurrence` or the table of recurrences knows, by `pass_states` or by
            `tokens_before`, and otherwise treat every token alone. They run on this rank's tokens.
            Their first tensor is (B, S, H), and so is their first result; others are states
            (B, ...). Most state-space layers and linear attentions of transformers are known.
        whole: classes of modules that mix tokens in another way than by attention, and run on the
            whole sequence on every rank. Their arguments are gathered. Their results are
            (B, S, ...), or have the sequence in the dim in which it was sharded. If no argument is
            sharded along the sequence, it begins in the module, such as the patches of an image.
            Modules of transformers whose recurrence is in no table are known; a warning names them.
        seq_dims: the dim of tokens of an argument of the model, by its name or its key in a dict;
            None leaves it whole. By default, dim 1 of integers and booleans (B, S), and of other
            tensors the dim that is as long. It is a matter of speed: numbers do not depend on it.
        outputs: "sharded" returns results with tokens, such as logits, as DTensors; "whole" gathers
            them.
        weights: 1-D, of the ranks over which parameters are stored in shards, each gathered where
            it is read: the ranks of the sequence, or these and those with other batches. Parameters
            become DTensors, so build optimizers afterwards; their gradients are averaged over
            batches, as `fully_shard` does. None leaves parameters as they are.
        gradients: "sum" gives each rank those of all tokens; "partial" its part of them, times the
            number of ranks, for whoever averages over an axis that contains these ranks, such as
            `fully_shard`.

    Returns:
        The model.

    Raises:
        InvalidArgument: an argument cannot be meant; or the model was parallelized otherwise.
        UnsupportedPlacement: a parameter is a DTensor on a mesh over the same ranks.
        RanksDisagree: the model of another rank has other modules or tensors. Nothing is changed.
    """
    classes = {"tokenwise": tokenwise, "recurrent": recurrent, "whole": whole}
    stored = ShardedWeights(weights) if isinstance(weights, DeviceMesh) else weights
    others = {"outputs": outputs, "gradients": gradients, "weights": stored}
    check_arguments(model, mesh, classes, seq_dims=seq_dims, **others)
    mesh = _first_equal(mesh)
    named = tuple(tokenwise), tuple(recurrent), tuple(whole)
    options = Options(mesh, *named, dict(seq_dims or {}), outputs, stored, gradients)
    before = options_of(model)
    if before is not None:
        if vars(before) != vars(options):
            raise InvalidArgument(
                site=SITE,
                expected=f"the arguments of the first call for this model: {before}",
                got=str(options),
                remedy="parallelize a model once, or build it anew",
            )
        return model
    agree_on_model(model, options)
    if stored is not None:
        stored.shard(model)
    _take_values_of_first(model, options.everybody)
    _change_classes(model, options)
    return model


class ParallelizeSequence(ParallelStyle):
    """`parallelize` as a style of torch's `parallelize_module`, with the same options."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return parallelize(module, device_mesh, **self.options)


def options_of(model: object) -> Options | None:
    """Return how a model was parallelized; None if it was not."""
    batches: WholeBatches | None = getattr(type(model), BATCHES, None)
    return None if batches is None else batches.options


def parallelize_copy(model: nn.Module, options: Options) -> None:
    """Let the copy of a parallelized model compute on other meshes."""
    for module in model.modules():
        module.__class__ = class_of(module)
    if OWN_FORWARD in vars(model):
        model.forward = vars(model).pop(OWN_FORWARD)
    _change_classes(model, options)


def _change_classes(model: nn.Module, options: Options) -> None:
    for module in list(model.modules()):
        read_as_dtensors(module, options)
    adapt(model, options)
    run_beside_tensor_parallelism(model, options.mesh)
    model.__class__ = _entrance(type(model), options)
    if "forward" in vars(model):  # replaced on the object, which would go past the class
        setattr(model, OWN_FORWARD, vars(model).pop("forward"))


_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def _first_equal(mesh: DeviceMesh) -> DeviceMesh:
    """Return the first of equal meshes: DTensor's caches (torch 2.13) know that one alone."""
    first = _meshes.setdefault(mesh.get_group(0), mesh)
    return first if first == mesh else mesh


def _entrance(cls: Any, options: Options) -> type[nn.Module]:
    """Return a subclass whose forward takes whole batches."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(cls.forward).parameters.values()
    names = tuple(parameter.name for parameter in parameters if parameter.kind in kinds)[1:]
    batches = WholeBatches(cls.__name__, names, options)

    def compute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__.get(OWN_FORWARD)
        return cls.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    @wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        here = computing()
        if here.is_running is not None:  # within another such model, or in `generate`
            return compute(self, *args, **kwargs)
        output = None
        is_traced = torch.compiler.is_compiling()
        _begin(self, is_traced)
        here.is_running = True
        try:
            parts, named = batches.cut(args, kwargs)
            held = contents_of((parts, named), (args, kwargs))
            output = batches.make_whole(compute(self, *parts, **named))
            batches.refuse_changes(held, contents_of((parts, named), (args, kwargs)))
            if not is_traced:
                batches.refuse_writes((args, kwargs), parts, named)
        finally:
            here.is_running = None
            if not is_traced:  # a trace ends by itself
                _replicating.end_with(self, output)
        return output

    @wraps(getattr(cls, "generate", forward))
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with as_on_one_process():
            return cls.generate(self, *args, **kwargs)

    methods = {"forward": forward} | ({"generate": generate} if hasattr(cls, "generate") else {})
    # Dynamo counts what it has compiled, and gives up, by code.
    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")  # type: ignore[attr-defined]
    forward.__code__ = code  # type: ignore[attr-defined]
    special = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    special |= {BATCHES: batches, READING: getattr(cls, READING)}
    made: type[nn.Module] = type(cls.__name__, (cls,), {**special, **methods})
    return made


class _Replicating(threading.local):
    """Takes plain tensors as replicated until models that ran, and their results, are gone.

    Programs compute with results, such as logits beside labels, and autograd with saved tensors.
    torch's context is per thread, which a backward takes over, and ends the one around it as well.
    """

    def __init__(self) -> None:
        self.num_askers, self.around, self.models = 0, ExitStack(), WeakSet[nn.Module]()

    def begin(self, model: nn.Module) -> None:
        if not are_plain_tensors_replicated():
            self.around.enter_context(implicit_replication())
        self.num_askers += 1
        if model not in self.models:
            self.models.add(model)
            self.num_askers += 1
            weakref.finalize(model, self.end).atexit = False

    def end(self) -> None:
        self.num_askers -= 1
        if not self.num_askers:
            self.around.close()

    def end_with(self, model: nn.Module, output: Any) -> None:
        """End when the tensors of a result are gone that have gradients."""
        site = type(model).__name__

        def ask(gradient: Tensor) -> None:
            """Be a hook of a tensor, live as long as it, and refuse second derivatives."""
            if torch.is_grad_enabled():
                raise UnsupportedAttention(
                    site=site,
                    expected="first derivatives, as of loss.backward()",
                    got="create_graph=True, of which DTensor (torch 2.13-2.15) loses terms",
                    remedy="train with a penalty on gradients, or on steps of an optimizer, on one"
                    " process, or by finite differences of two losses",
                )

        weakref.finalize(ask, self.end).atexit = False
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(ask)


_replicating = _Replicating()
run_uncompiled(_Replicating.end_with)


# Dynamo calls it while it traces, and raises what it raises.
@torch.compiler.assume_constant_result
def _begin(model: nn.Module, is_traced: bool) -> None:
    if is_traced and not traces.is_ours:
        raise InvalidArgument(
            site=type(model).__name__,
            expected='backend="cp_inductor" or "cp_aot_eager", for a parallelized model',
            got="another backend of torch.compile, or aot_compile",
            remedy='torch.compile(model, backend="cp_inductor")',
        )
    if not is_traced and is_transforming():
        raise UnsupportedPlacement(
            site=type(model).__name__,
            expected="a parallelized model outside of transforms of torch.func",
            got="a call within one (grad, vmap, ...), which knows nothing of exchanges",
            remedy="call loss.backward() or torch.autograd.grad; functional_call may stay",
        )
    _adopt(model)
    _replicating.begin(model)
    if is_traced:  # also if what eager code has returned goes in the meantime
        traces.around.callback(_replicating.end)


run_uncompiled(_begin)  # where a graph break has left the forward to Python


def _mark_lengths(frame: Mapping[str, Any]) -> None:
    """Mark the lengths of a batch for which Dynamo is about to trace the forward of a model."""
    batches: WholeBatches | None = getattr(type(frame.get("self")), BATCHES, None)
    if batches is not None:
        batches.mark_lengths(frame.get("args", ()), frame.get("kwargs", {}))


traces.before.append(_mark_lengths)


def _adopt(model: nn.Module) -> None:
    """Let modules read what came into the model since its last run."""
    _parallelized.add(model)  # here, as copies have never met `parallelize`
    options: Any = options_of(model)
    stored = options.weights
    has_batches = stored is not None and stored.mesh.size() > options.mesh.size()
    for name, weight in model.named_parameters() if has_batches else ():
        if weight.requires_grad and not isinstance(weight, DTensor):
            raise UnsupportedPlacement(
                site=name,
                expected="weights that were there when others were stored in shards",
                got="a plain one, whose gradient nobody would average over batches",
                remedy="add adapters and the like before parallelize(..., weights=)",
            )
    if options.gradients == "partial":
        for group in options.mesh.get_all_groups():
            watch_gradients(str(group.group_name), list(model.parameters()))
    for module in model.modules():
        read_as_dtensors(module, options)
        if isinstance(module, ReadsLocally):  # such as adapters, inside it
            read_locally(module, ReadsLocally, {})


_parallelized: WeakSet[nn.Module] = WeakSet()


def _check_given_data(tensor: DTensor) -> None:
    """Refuse other data for a weight that was read: the weight itself would not have it."""
    address = tensor.to_local().data_ptr()
    with as_on_one_process():  # in which models name their own weights
        for model in list(_parallelized) if address else ():
            for name, stored in itertools.chain(model.named_parameters(), model.named_buffers()):
                if not isinstance(stored, DTensor) and stored.data_ptr() == address:
                    raise UnsupportedWrite(
                        site=f"{name}.data = ...",
                        expected="weights that keep their memory while their model runs",
                        got="other data for one that the model has read",
                        remedy="write to its elements, as in weight.data.copy_(new)",
                    )


checks_of_given_data.append(_check_given_data)


@torch.no_grad()
def _take_values_of_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the parameters, their gradients and buffers of the first, as DDP does."""
    gradients = (t.grad for t in model.parameters() if t.grad is not None)
    everything = itertools.chain(model.parameters(), model.buffers(), gradients)
    for tensor in {id(t): t for t in everything}.values():
        is_there = isinstance(tensor, DTensor) and tensor.device_mesh == mesh
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if is_there or own.is_meta:
            continue
        sent = own.detach().contiguous()
        for group in mesh.get_all_groups():
            dist.broadcast(sent, group=group, group_src=0)
        if sent.data_ptr() != own.data_ptr():
            own.copy_(sent)
