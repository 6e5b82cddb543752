"""Parallelize a model along the sequence: whole batches in, plain weights, the loss of all tokens.

    cp_inductor.parallelize(model, mesh["cp"])       nothing moves, nothing is replaced
    loss = torch.compile(model, backend="cp_inductor")(ids, labels)
    loss.backward(); optimizer.step()                .grad is plain and complete

While the model runs, its modules read their parameters and buffers as DTensors (`reading`), and its
inputs are DTensors that are sharded along the sequence (`whole_batches`). Outside of a run they are
the plain tensors that they always were. So optimizers, checkpoints, clipping, adapters and
`generate` see a model of one process.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.parameter import is_lazy

from cp_inductor.dtensor.axis import hold_sequences_along
from cp_inductor.dtensor.rules import register_rules
from cp_inductor.errors import (
    InvalidArgument,
    UnsupportedAttention,
    UnsupportedPlacement,
    UnsupportedWrite,
)
from cp_inductor.modules.libraries import libraries
from cp_inductor.modules.own_tokens import run_on_own_tokens
from cp_inductor.modules.reading import (
    READING,
    Reading,
    ReadsLocally,
    as_on_one_process,
    class_of,
    computing,
    read_as_dtensors,
    read_locally,
    reading_of,
    reads_locally,
)
from cp_inductor.modules.same_model import agree_on_model
from cp_inductor.modules.sharded_weights import ShardedWeights
from cp_inductor.modules.tensor_parallel import (
    check_styles,
    is_tensor_parallel,
    run_beside_tensor_parallelism,
)
from cp_inductor.modules.tokenwise import run_on_shards
from cp_inductor.modules.whole import run_known_on_whole, run_on_whole
from cp_inductor.modules.whole_batches import WholeBatches, contents_of, names_of
from cp_inductor.torch_private.dtensor import are_plain_tensors_replicated, checks_of_given_data
from cp_inductor.torch_private.modes import is_transforming, run_uncompiled
from cp_inductor.torch_private.traces import traces
from cp_inductor.trust.unreduced import watch_gradients

Module = TypeVar("Module", bound=nn.Module)

SITE = "parallelize"
# Of a parallelized model: the options of its class, and the forward that the object had of its own.
OPTIONS, OWN_FORWARD, BATCHES = "_cp_options", "_cp_forward", "_cp_batches"
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
    ``backend="cp_inductor"``. Each rank cuts out its part. Results without tokens, such as losses,
    come out plain and whole. Parameters, buffers and gradients stay plain and whole, or as DDP,
    `fully_shard` and others have them on other axes, before or after this call. Nothing in the
    model is replaced but the classes of its modules, by subclasses. `generate`, and whoever calls a
    part of the model, gets the model of one process.

    All ranks get the parameters and buffers of the first. Parameters and modules may be added or
    replaced later. Means and losses are over all tokens. A DTensor that is passed is taken as it
    is, and so is one among the weights, on the same mesh.

    Args:
        model: the same on every rank, except for its values.
        mesh: one axis, of the ranks that share sequences; or several that have names, of which the
            first holds the sequences.
        tokenwise: classes of modules that treat every token alone, and run on this rank's tokens.
            Their first argument is (B, S, ...) or (T, ...), and so are their results. Other
            arguments are of these tokens if they are as long, or whole. Mixtures of experts of
            transformers are known.
        recurrent: classes of modules that pass states along the sequence by functions that
            `register_recurrence` or the table of recurrences knows, by `pass_states` or by
            `tokens_before`, and otherwise treat every token alone. They run on this rank's tokens.
            Their first tensor is (B, S, H), and so is their first result; others are states
            (B, ...). Most state-space layers, linear attentions and short convolutions of
            transformers are known.
        whole: classes of modules that mix tokens in another way than by attention, and run on the
            whole sequence on every rank. Their arguments are gathered. Their results are
            (B, S, ...), or have the sequence in the dim in which it was sharded, and each rank
            keeps its tokens. If no argument is sharded along the sequence, the sequence begins in
            the module, such as the patches of an image. Modules of transformers that mix tokens so,
            and whose recurrence is in no table, are known, and a warning names them.
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
    _check_arguments(model, mesh, seq_dims, outputs, gradients)
    mesh = _first_equal(mesh)
    stored = ShardedWeights(weights) if isinstance(weights, DeviceMesh) else weights
    named = {"tokenwise": tokenwise, "recurrent": recurrent, "whole": whole}
    for argument, classes in named.items():
        _check_classes(argument, classes)
    options = Options(
        mesh,
        tuple(tokenwise),
        tuple(recurrent),
        tuple(whole),
        tuple((seq_dims or {}).items()),
        outputs,
        stored,
        gradients,
    )
    before = options_of(model)
    if before is not None:
        if before != options:
            raise InvalidArgument(
                site=SITE,
                expected=f"the arguments of the first call for this model: {before}",
                got=str(options),
                remedy="parallelize a model once, or build it anew",
            )
        return model
    check = partial(_check, model, options)
    everybody = mesh if stored is None else stored.mesh
    agree_on_model(model, everybody, site=SITE, with_meta=stored is None, check=check)
    if stored is not None:
        stored.shard(model)
    _take_values_of_first(model, everybody)
    _change_classes(model, options)
    return model


class ParallelizeSequence(ParallelStyle):
    """`parallelize` as a style of torch's `parallelize_module`, with the same options."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return parallelize(module, device_mesh, **self.options)


@dataclass(frozen=True)
class Options:
    """How a model was parallelized: the arguments of `parallelize`."""

    mesh: DeviceMesh
    tokenwise: tuple[type[nn.Module], ...] = ()
    recurrent: tuple[type[nn.Module], ...] = ()
    whole: tuple[type[nn.Module], ...] = ()
    seq_dims: tuple[tuple[str, int | None], ...] = ()
    outputs: str = "sharded"
    weights: ShardedWeights | None = None
    gradients: str = "sum"


def options_of(model: object) -> Options | None:
    """Return how a model was parallelized; None if it was not."""
    options: Options | None = getattr(type(model), OPTIONS, None)
    return options


def parallelize_copy(model: nn.Module, options: Options) -> None:
    """Let the copy of a parallelized model compute on other meshes."""
    for module in model.modules():
        module.__class__ = class_of(module)
    if OWN_FORWARD in vars(model):
        model.forward = vars(model).pop(OWN_FORWARD)
    _change_classes(model, options)


def _change_classes(model: nn.Module, options: Options) -> None:
    mesh, weights = options.mesh, options.weights
    gather = None if weights is None else partial(weights.gather, sequence=mesh)
    reading = Reading(mesh, sums_gradients=options.gradients == "sum", gather=gather)
    for module in list(model.modules()):
        read_as_dtensors(module, reading)
    adapt(model, options)
    run_beside_tensor_parallelism(model, mesh)
    batches = WholeBatches(
        site=type(model).__name__,
        mesh=mesh,
        names=names_of(type(model).forward),
        seq_dims=dict(options.seq_dims),
        are_outputs_whole=options.outputs == "whole",
    )
    model.__class__ = _entrance(type(model), batches, options)
    if "forward" in vars(model):  # replaced on the object, which would go past the class
        setattr(model, OWN_FORWARD, vars(model).pop("forward"))


def adapt(model: nn.Module, options: Options) -> None:
    """Let modules compute as `parallelize` says, in a model that reads DTensors."""
    register_rules()
    mesh = options.mesh
    for axis in range(mesh.ndim):
        hold_sequences_along(mesh, str(mesh.get_group(axis).group_name))
    for library in libraries():
        library.adapt(model)
    run_on_whole(model, options.whole)
    run_on_own_tokens(model, options.recurrent)
    run_known_on_whole(model, mesh)
    run_on_shards(model, options.tokenwise)


_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


def _first_equal(mesh: DeviceMesh) -> DeviceMesh:
    """Return the first of equal meshes: DTensor's caches (torch 2.13) know that one alone."""
    first = _meshes.setdefault(mesh.get_group(0), mesh)
    return first if first == mesh else mesh


def _entrance(cls: Any, batches: WholeBatches, options: Options) -> type[nn.Module]:
    """Return a subclass whose forward takes whole batches."""

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
        (_begin_trace if is_traced else _begin)(self)
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
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    names |= {OPTIONS: options, BATCHES: batches, READING: getattr(cls, READING)}
    made: type[nn.Module] = type(cls.__name__, (cls,), {**names, **methods})
    return made


class _Replicating(threading.local):
    """Takes plain tensors beside DTensors as replicated, as long as somebody asks for it.

    Autograd asks as well: its formulas compute with tensors that a forward saved. So it goes on
    until what the model has returned is gone. torch's context is per thread, which autograd takes
    over from the caller of a backward, and when it is left, it ends the one around it as well.
    """

    def __init__(self) -> None:
        self.num_askers, self.around = 0, ExitStack()

    def begin(self) -> None:
        if not are_plain_tensors_replicated():
            self.around.enter_context(implicit_replication())
        self.num_askers += 1

    def end(self) -> None:
        self.num_askers -= 1
        if not self.num_askers:
            self.around.close()

    def end_with(self, model: nn.Module, output: Any) -> None:
        """End when the tensors of a result are gone that have gradients."""
        tensors = [one for one in pytree.tree_leaves(output) if isinstance(one, Tensor)]
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
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(ask)


_replicating = _Replicating()
run_uncompiled(_Replicating.end_with)


def _begin(model: nn.Module) -> None:
    if is_transforming():
        raise UnsupportedPlacement(
            site=type(model).__name__,
            expected="a parallelized model outside of transforms of torch.func",
            got="a call within one (grad, vmap, ...), which knows nothing of exchanges",
            remedy="call loss.backward() or torch.autograd.grad; functional_call may stay",
        )
    _adopt(model)
    _replicating.begin()


run_uncompiled(_begin)  # where a graph break has left the forward to Python


# Dynamo calls it while it traces, and raises what it raises.
@torch.compiler.assume_constant_result
def _begin_trace(model: nn.Module) -> None:
    if not traces.is_ours:
        raise InvalidArgument(
            site=type(model).__name__,
            expected='backend="cp_inductor" or "cp_aot_eager", for a parallelized model',
            got="another backend of torch.compile, or aot_compile",
            remedy='torch.compile(model, backend="cp_inductor")',
        )
    _adopt(model)
    _replicating.begin()  # also if what eager code has returned goes in the meantime
    traces.around.callback(_replicating.end)


def _mark_lengths(frame: Mapping[str, Any]) -> None:
    """Mark the lengths of a batch for which Dynamo is about to trace the forward of a model."""
    batches: WholeBatches | None = getattr(type(frame.get("self")), BATCHES, None)
    if batches is not None:
        batches.mark_lengths(frame.get("args", ()), frame.get("kwargs", {}))


traces.before.append(_mark_lengths)


def _adopt(model: nn.Module) -> None:
    """Let modules read what came into the model since its last run."""
    _parallelized.add(model)  # here, as copies have never met `parallelize`
    reading, options = reading_of(model), options_of(model)
    assert reading is not None and options is not None
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
    if not reading.sums_gradients:
        for axis in range(options.mesh.ndim):
            name = str(options.mesh.get_group(axis).group_name)
            watch_gradients(name, list(model.parameters()))
    for module in model.modules():
        read_as_dtensors(module, reading)
        # Such as adapters, in a module that computes on a rank's own tokens.
        new = [one for one in module.modules() if not reads_locally(one)]
        for inner in new if reads_locally(module) else ():
            read_locally(inner, ReadsLocally)


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


def _take_values_of_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all ranks the parameters, their gradients and buffers of the first, as DDP does."""
    gradients = (one.grad for one in model.parameters() if one.grad is not None)
    everything = itertools.chain(model.parameters(), model.buffers(), gradients)
    tensors = {id(one): one for one in everything}
    with torch.no_grad():
        for tensor in tensors.values():
            is_there = isinstance(tensor, DTensor) and tensor.device_mesh == mesh
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if is_there or own.is_meta:
                continue
            sent = own.detach().contiguous()
            for axis in range(mesh.ndim):
                dist.broadcast(sent, group=mesh.get_group(axis), group_src=0)
            if sent.data_ptr() != own.data_ptr():
                own.copy_(sent)


def _check_arguments(
    model: object, mesh: object, seq_dims: object, outputs: object, gradients: object
) -> None:
    def refuse(expected: str, got: str, remedy: str) -> None:
        raise InvalidArgument(site=SITE, expected=expected, got=got, remedy=remedy)

    if not isinstance(model, nn.Module) or not isinstance(mesh, DeviceMesh):
        refuse(
            "an nn.Module and a DeviceMesh",
            f"a {type(model).__name__} and a {type(mesh).__name__}",
            'call parallelize(model, mesh["cp"])',
        )
    assert isinstance(mesh, DeviceMesh)
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        refuse(
            "a mesh of one axis, or of axes that have names",
            f"{mesh.ndim} axes without names",
            'init_device_mesh(..., mesh_dim_names=("cp", "tp")), and of it mesh["cp"]',
        )
    for name, value, known in (
        ("outputs", outputs, ("sharded", "whole")),
        ("gradients", gradients, ("sum", "partial")),
    ):
        if value not in known:
            refuse(
                f"{name}={known[0]!r} or {known[1]!r}", f"{name}={value!r}", f"name one of {known}"
            )
    is_table = isinstance(seq_dims, Mapping) and all(
        isinstance(name, str) and (dim is None or type(dim) is int)
        for name, dim in seq_dims.items()
    )
    if seq_dims is not None and not is_table:
        refuse(
            "seq_dims as a dict of dims by names",
            f"{seq_dims!r:.80}",
            'seq_dims={"pixel_values": 2, "lengths": None}',
        )


def _check(model: nn.Module, options: Options) -> None:
    mesh = options.mesh
    if options.weights is not None:
        options.weights.check(model)
    for argument in ("tokenwise", "recurrent", "whole"):
        _check_found(model, argument, getattr(options, argument))
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UnsupportedPlacement(
                site=name,
                expected="a tensor with a shape",
                got=f"a {type(tensor).__name__}, which has none yet",
                remedy="call the model once before, on every rank",
            )
    _check_nesting(model, options)
    check_styles(model, mesh)
    ranks = set(mesh.mesh.flatten().tolist())
    # fully_shard hands out plain weights while the model runs.
    are_handed_out = any(isinstance(module, FSDPModule) for module in model.modules())
    for prefix, module in model.named_modules():
        reading = reading_of(module)
        sums_gradients = options.gradients == "sum"
        if reading and (reading.mesh, reading.sums_gradients) != (mesh, sums_gradients):
            raise InvalidArgument(
                site=f"{SITE}, {prefix}",
                expected="modules of no other model, or of one with the same mesh and gradients=",
                got=f"one on {reading.mesh}, whose gradients are"
                f" {'sums' if reading.sums_gradients else 'partial'}",
                remedy="parallelize the whole model, once, or all models that share it alike",
            )
        is_known = are_handed_out or is_tensor_parallel(module, mesh)
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            if not isinstance(tensor, DTensor) or tensor.device_mesh == mesh:
                continue
            others = tensor.device_mesh.mesh.flatten().tolist()
            if not is_known or len(ranks.intersection(others)) > 1:
                raise UnsupportedPlacement(
                    site=f"{prefix}.{name}".lstrip("."),
                    expected=f"a plain tensor, or a DTensor on {mesh.mesh_dim_names}; or"
                    " fully_shard, or a style of tensor parallelism, over other ranks",
                    got=f"a DTensor on {tensor.device_mesh.mesh_dim_names}",
                    remedy='pass fully_shard a mesh of other ranks, as in mesh["dp"]; or'
                    ' parallelize(..., gradients="partial") first, and then fully_shard; beside'
                    " other DTensors use context_parallel (docs/fsdp.md)",
                )


def _check_nesting(model: nn.Module, options: Options) -> None:
    """Refuse modules that mix tokens within those that have a rank's own alone."""
    for outer in model.modules():
        is_tokenwise = isinstance(outer, options.tokenwise)
        if not is_tokenwise and not isinstance(outer, options.recurrent):
            continue
        for name, inner in outer.named_modules():
            mixes = isinstance(inner, options.whole) or (
                is_tokenwise
                and (
                    isinstance(inner, options.recurrent)
                    or any(one.mixes_tokens(inner) for one in libraries())
                    or any(one.find_recurrence(inner) for one in libraries())
                )
            )
            if mixes and inner is not outer:
                raise InvalidArgument(
                    site=f"{SITE}, {type(outer).__name__}.{name}",
                    expected="no module that mixes tokens within one that has a rank's own alone",
                    got=f"a {type(inner).__name__}",
                    remedy="name the outer class in whole=, or neither of the two",
                )


def _check_classes(argument: str, classes: object) -> None:
    given = tuple(classes) if isinstance(classes, Iterable) else (classes,)
    if isinstance(classes, (str, type)) or not all(isinstance(one, type) for one in given):
        raise InvalidArgument(
            site=f"{SITE}(..., {argument}=)",
            expected="a list of classes of modules",
            got=f"{classes!r:.80}",
            remedy=f"pass the classes themselves, as in {argument}=[type(model.layers[0].mixer)]",
        )


def _check_found(model: nn.Module, argument: str, classes: Iterable[type[nn.Module]]) -> None:
    """Refuse names that nothing would follow, as the module would mix tokens of one rank alone."""
    for named in classes:
        if not any(isinstance(module, named) for module in model.modules()):
            kinds = {type(module).__name__ for module in model.modules()}
            raise InvalidArgument(
                site=f"{SITE}(..., {argument}=)",
                expected="classes of modules that the model has",
                got=f"{named.__module__}.{named.__qualname__}, of which it has none",
                remedy="leave it out, or name one of " + ", ".join(sorted(kinds)),
            )
