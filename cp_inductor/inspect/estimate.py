"""Estimate memory and time of a training step on GPUs that need not be there.

    estimate(model, args, mesh_shape=(8,), target="h100")
      =>
    8 x h100, rank 4, 36 layers (from programs of 1 and 2), 1,048,576 tokens
      peak     53.1 GiB of 80: weights 3.8, optimizer states 7.6, saved activations 36.2, ...
      step     372 s: attention 331, matmuls 15, elementwise 9, exchanges 17 exposed

The model is compiled with one and with two layers, without data, up to the graphs that Inductor is
given. Both are priced by `price_graph`, and what the second layer adds is added for each further
one. Weights, gradients and optimizer states follow from the parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor.experimental import implicit_replication

from cp_inductor.backend.compile import kind_of
from cp_inductor.dtensor.recipe import PlanOptions
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import InvalidArgument, UnsupportedTarget
from cp_inductor.flags import AUTO
from cp_inductor.inspect.compile_for import Target, target_for_code
from cp_inductor.inspect.cross_compile import compile_and_stop, stop
from cp_inductor.inspect.layers import Layers, find_layers
from cp_inductor.inspect.price_graph import Price, Pricing, price_graph, shared_with_inputs
from cp_inductor.inspect.world import Example, place, pretended_world
from cp_inductor.mask.grammar import shortened
from cp_inductor.plan import Machine
from cp_inductor.plan.checks import check_count, refuse
from cp_inductor.plan.machine import known_machine

MIB, GIB = 2**20, 2**30

# The share of a GPU's memory for a program; the context, NCCL and fragmentation have the rest.
USABLE = 0.93

# PCIe 5.0 x16 in one direction, as far as copies of pinned memory reach it.
HOST_BYTES_PER_S = 50e9


def machine_for(target: Target, text: str, world_size: int) -> Machine:
    """Return the machine that so many ranks see, by its text or, if that is empty, a usual one.

    Raises:
        UnsupportedTarget: it is a CPU, of whose speed nothing is known.
        InvalidArgument: the machine is not one of this target.
    """
    text = text.removeprefix(AUTO)
    if not text and target.gpu is None:
        raise UnsupportedTarget(
            site="estimate(target='cpu')",
            expected="a GPU, or a machine",
            got="a CPU, of whose speed nothing is known",
            remedy="measure it by cp_inductor.calibrate, and pass"
            " options={'machine': 'calibrated'}",
        )
    machine = Machine.parse(text) if text else known_machine(target.chip, world_size)
    known = ("cpu",) if target.gpu is None else ("gpu", target.chip)
    if machine.device.name not in known:
        raise InvalidArgument(
            site=f"estimate(target={target.name!r})",
            expected=f"a machine of {' or '.join(known)}",
            got=shortened(text),
            remedy="name the same device as target and in the machine",
        )
    device, inside = machine.device, machine.levels[0].ranks or world_size
    # Where ranks of a node share its cores, each has its part of the speed.
    share = min(1.0, device.at_once / min(inside, world_size)) if device.at_once else 1.0
    rates = ("flops_per_s", "matmul_flops_per_s", "bytes_per_s")
    device = replace(device, **{rate: share * getattr(device, rate) for rate in rates})
    return replace(machine, device=device).among(range(world_size))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a training step takes on one rank.

    Attributes:
        target: such as "cuda:h100".
        world_size, rank: of whom.
        num_layers: of the model; 0 if no list of layers that are alike was found.
        compiled_layers: of the programs that were compiled. Beyond the last, numbers are
            extrapolated; none are if it is `num_layers`, or 0.
        checkpoint: as in `estimate`.
        sharding: of weights, gradients and optimizer states: "none" or "fsdp".
        num_tokens: of the whole sequence, and of all sequences.
        memory: bytes at the peak, by what they are for.
        exchange_bytes: of `memory`, most bytes of received buffers at once.
        logits_bytes: of `memory`, the most that a chunk of the loss holds; 0 without chunks.
        largest: the largest buffers at the peak of the larger program, as (op, bytes).
        parts_s: seconds, by what they are for.
        model_flops: of the model on this rank, forward and, if trained, backward, without repeats.
        peak_flops: that the device could do in a second; 0 if unknown.
        capacity_bytes: of the device's memory; 0 if unknown.
        smallest_world: the fewest ranks, among powers of 2, on which the same step is taken to
            fit: activations shrink with ranks, FSDP's shards as well. 0 if none does, or if the
            device's memory is unknown.
    """

    target: str
    world_size: int
    rank: int
    num_layers: int
    compiled_layers: tuple[int, ...]
    checkpoint: str
    sharding: str
    num_tokens: int
    memory: Mapping[str, int]
    exchange_bytes: int
    logits_bytes: int
    largest: tuple[tuple[str, int], ...]
    parts_s: Mapping[str, float]
    model_flops: float
    peak_flops: float
    capacity_bytes: int
    smallest_world: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes that are alive at once."""
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.parts_s.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.num_tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Operations of the model, divided by what the device could do meanwhile; 0 if unknown."""
        return self.model_flops / (self.seconds * self.peak_flops) if self.peak_flops else 0.0

    @property
    def is_fine(self) -> bool:
        """Whether a step fits into the memory."""
        return not self.capacity_bytes or self.peak_bytes <= USABLE * self.capacity_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as plain data, for JSON."""
        names = ("peak_bytes", "seconds", "tokens_per_s", "mfu", "is_fine")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        """Return the estimate as a few lines of text."""
        compiled = " and ".join(map(str, self.compiled_layers))
        layers = f", {self.num_layers} layers (from programs of {compiled})" * bool(compiled)
        has = f" of {_size(self.capacity_bytes)}" if self.capacity_bytes else ""
        smallest = self.smallest_world or "no number of"
        fits = f"  fits on    {smallest} rank{'s' * (smallest != 1)}"
        memory = ", ".join(f"{name} {_size(size)}" for name, size in self.memory.items() if size)
        largest = ", ".join(f"{name} {_size(size)}" for name, size in self.largest)
        seconds = ", ".join(f"{name} {value:.3g}" for name, value in self.parts_s.items() if value)
        mfu = f", {self.mfu:.1%} of the operations that the device could do" * bool(self.peak_flops)
        return "\n".join(
            [
                f"{self.world_size} x {self.target}, rank {self.rank}{layers},"
                f" {self.num_tokens:,} tokens;"
                f" checkpoint {self.checkpoint}, sharding {self.sharding}",
                f"  peak       {_size(self.peak_bytes)}{has}: {memory}",
                f"  of these   {_size(self.exchange_bytes)} received at once,"
                f" {_size(self.logits_bytes)} in a chunk of logits",
                f"  largest    {largest}",
                f"  step       {self.seconds:.3g} s: {seconds}",
                f"  speed      {self.tokens_per_s:,.0f} tokens/s{mfu}",
            ]
            + [fits] * bool(self.capacity_bytes)
        )


def _size(num_bytes: int) -> str:
    is_large = num_bytes >= GIB
    return f"{num_bytes / (GIB if is_large else MIB):.3g} {'GiB' if is_large else 'MiB'}"


def estimate(
    model: Callable[..., Any],
    args: Sequence[Any] | Callable[[DeviceMesh], Sequence[Any]] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] | None = None,
    placements: Sequence[Placement] | None = None,
    target: str = "h100",
    rank: int | None = None,
    checkpoint: str = "none",
    sharding: str = "none",
    held_dtype: torch.dtype | None = None,
    optimizer_states: int = 2,
    options: Mapping[str, Any] | None = None,
) -> Estimate:
    """Estimate the peak memory and the seconds of a training step, on paper.

    Args:
        model: as in `cross_compile`; it may be on the "meta" device. It returns a loss, or what is
            to have gradients.
        args, kwargs, mesh_dim_names, placements, options: as in `cross_compile`. The machine of
            the options is also what prices; by default, nodes of 8 of the target, NVLink within
            and 400 Gbit/s for each rank between them.
        mesh_shape: of the mesh over all ranks, such as (8,).
        target: as in `cross_compile`, such as "h100"; "cpu" with a machine.
        rank: the global rank; by default the middle one.
        checkpoint: "layers": each layer is computed again in the backward, from its inputs.
            "offload": the same, and the inputs wait in the host's memory. "none": as the model has
            it.
        sharding: "fsdp": ranks hold their part of weights, gradients and optimizer states, and
            gather a layer's weights before it runs. "none": all ranks hold all.
        held_dtype: of weights, gradients and optimizer states between steps; the model's if None.
            FSDP with mixed precision holds torch.float32.
        optimizer_states: numbers that the optimizer keeps for each parameter: 2 for Adam.

    Returns:
        The estimate; ``print`` shows it as text.

    Raises:
        CPError: an attention cannot be rewritten; the target or the mesh does not exist; the
            machine is none of the target, or none is given for a CPU.
    """
    chip = target_for_code(target)
    world_size = math.prod(mesh_shape)
    rank = world_size // 2 if rank is None else rank
    with pretended_world(rank, world_size, mesh_shape, mesh_dim_names) as mesh:
        example = place(Example(model, args, kwargs or {}, options or {}), mesh, placements)
        states = States(sharding, held_dtype, optimizer_states)
        with nullcontext() if example.like is None else implicit_replication():
            return estimate_here(example, target=chip, checkpoint=checkpoint, states=states)


@dataclass(frozen=True, slots=True)
class States:
    """How weights, gradients and optimizer states are held, as in `estimate`."""

    sharding: str
    held_dtype: torch.dtype | None
    optimizer_states: int

    def __post_init__(self) -> None:
        _check_choice("sharding", self.sharding, ("none", "fsdp"))
        check_count("optimizer_states", self.optimizer_states, 0, 64, site="estimate")

    @property
    def is_fsdp(self) -> bool:
        """Whether ranks hold their parts, rather than all."""
        return self.sharding == "fsdp"


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        refuse(name, f"one of {', '.join(known)}", value, site="estimate")


def estimate_here(example: Example, *, target: Target, checkpoint: str, states: States) -> Estimate:
    """Estimate for this rank in the current process group; the model loses layers."""
    world_size = torch.distributed.get_world_size()
    machine = machine_for(target, PlanOptions.read(example.options)[0].machine, world_size)
    _check_choice("checkpoint", checkpoint, ("none", "layers", "offload"))
    model: Any = example.model
    layers = find_layers(model) if isinstance(model, nn.Module) else None
    weights = _Weights.of(model, layers)
    price = partial(_price, example, target, machine, sums_gradients=not states.is_fsdp)
    counts: tuple[int, ...] = () if layers is None else layers.fewest
    further = 0
    if layers is not None:
        layers.keep(model, counts[1])
        if checkpoint != "none":
            layers.checkpoint(model)
        more = price()
        layers.keep(model, counts[0])
        few = price()
        further = (layers.count - counts[1]) // layers.period
    elif checkpoint == "none":
        few = more = price()
    else:
        raise InvalidArgument(
            site=f"estimate(checkpoint={checkpoint!r})",
            expected="a module with a list of layers that are alike",
            got=type(model).__name__,
            remedy="checkpoint in the model, and leave checkpoint out",
        )
    is_offloaded = checkpoint == "offload"
    memory, smallest_world = _memory(
        few, more, 0 if is_offloaded else further, weights, states, _capacity(target), world_size
    )
    parts, flops = defaultdict[str, float](float), 0.0
    for kind in more:
        for name, value in more[kind].seconds.items():
            parts[name] += value + further * (value - few[kind].seconds.get(name, 0.0))
        flops += (1 + further) * more[kind].model_flops - further * few[kind].model_flops
    is_trained = "backward" in more
    if states.is_fsdp and layers is not None:
        compute = sum(parts.values()) / layers.count
        # Weights are gathered in forward and backward, and gradients summed.
        exposed_s = weights.exposed(3 if is_trained else 1, compute, machine, world_size)
        parts["exposed weights"] = layers.count * exposed_s
    if is_offloaded and is_trained:
        # Inputs of layers leave while the forward computes, and return while the backward does.
        moved_s = (more["forward"].saved_bytes - few["forward"].saved_bytes) / HOST_BYTES_PER_S
        layer_s = [sum(more[k].seconds.values()) - sum(few[k].seconds.values()) for k in more]
        parts["exposed offload"] = further * sum(max(0.0, moved_s - item) for item in layer_s)
    if is_trained:
        # Gradients, weights and states are read, and all but the gradients are written.
        moved = (3 + 2 * states.optimizer_states) * weights.held_bytes(states, world_size)
        parts["optimizer"] = moved / machine.device.bytes_per_s
    return Estimate(
        target=target.name,
        world_size=world_size,
        rank=torch.distributed.get_rank(),
        num_layers=0 if layers is None else layers.count,
        compiled_layers=counts,
        checkpoint=checkpoint,
        sharding=states.sharding,
        num_tokens=_num_tokens(example),
        memory=memory,
        exchange_bytes=max(item.exchange_bytes for item in more.values()),
        logits_bytes=max(item.chunk_bytes for item in more.values()),
        largest=max(more.values(), key=lambda item: item.peak_bytes).largest,
        parts_s=dict(parts),
        model_flops=flops,
        peak_flops=machine.device.peak_flops,
        capacity_bytes=_capacity(target),
        smallest_world=smallest_world,
    )


def _price(
    example: Example, target: Target, machine: Machine, *, sums_gradients: bool
) -> dict[str, Price]:
    """Compile up to the lowered graphs, and price them."""
    graphs: dict[str, fx.GraphModule] = {}

    def keep(gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Callable[..., Any]:
        graphs[kind_of(keywords)] = gm
        return stop

    compile_and_stop(example, target, keep)
    free = shared_with_inputs(graphs["forward"]) if "forward" in graphs else frozenset[str]()
    pricing = Pricing(machine, torch.distributed.get_world_size(), free, sums_gradients)
    return {kind: price_graph(gm, kind, pricing) for kind, gm in graphs.items()}


def _capacity(target: Target) -> int:
    return 0 if target.gpu is None else target.gpu.total_memory


@dataclass(frozen=True, slots=True)
class _Weights:
    """The parameters on this rank: how many there are, and their bytes as the model has them."""

    count: int
    num_bytes: int
    layer_bytes: int
    outside_bytes: int  # of those in no layer

    @staticmethod
    def of(model: Any, layers: Layers | None) -> _Weights:
        weights = model.parameters() if isinstance(model, nn.Module) else ()
        local = {id(weight): held_by_rank(weight) for weight in weights}
        total = sum(weight.nbytes for weight in local.values())
        count = sum(weight.numel() for weight in local.values())
        if layers is None:
            return _Weights(count, total, 0, total)
        held = {id(p) for layer in layers.left_in(model) for p in layer.parameters()}
        inside = sum(local[key].nbytes for key in held)
        return _Weights(count, total, inside // layers.count, total - inside)

    def held_bytes(self, states: States, world_size: int) -> int:
        """Return the bytes of one number per parameter that a rank holds between steps."""
        dtype = states.held_dtype
        held = self.num_bytes if dtype is None else self.count * dtype.itemsize
        return -(-held // world_size) if states.is_fsdp else held

    def exposed(self, times: int, layer_s: float, machine: Machine, world_size: int) -> float:
        """Return the seconds of so many gathers or sums of weights that a layer does not hide."""
        moved = times * self.layer_bytes * (world_size - 1) / world_size
        return max(0.0, moved / machine.levels[-1].bytes_per_s - layer_s)


def _memory(
    few: Mapping[str, Price],
    more: Mapping[str, Price],
    further: int,
    weights: _Weights,
    states: States,
    capacity_bytes: int,
    world_size: int,
) -> tuple[dict[str, int], int]:
    """Return the bytes at the peak, and the fewest ranks on which they fit."""
    first = "forward" if "forward" in more else "inference"
    saved_by_layer = more[first].saved_bytes - few[first].saved_bytes
    is_trained, is_fsdp = "backward" in more, states.is_fsdp
    held = weights.held_bytes(states, world_size)
    saved = more[first].saved_bytes + further * saved_by_layer
    peak = more[first].peak_bytes + further * saved_by_layer
    if is_trained:
        # At the loss all activations are there, and in the end all gradients: the layers between
        # add the larger of both. FSDP sums and frees the gradients of a layer at once.
        results = 0 if is_fsdp else more["backward"].saved_bytes - few["backward"].saved_bytes
        added = further * max(saved_by_layer, results)
        peak = max(peak, more["backward"].peak_bytes + added)
    memory = {
        "weights": held,
        # The next layer is gathered while one runs; what is in no layer stays.
        "gathered weights": weights.outside_bytes + 2 * weights.layer_bytes if is_fsdp else 0,
        "gradients": held if is_fsdp and is_trained else 0,
        "optimizer states": states.optimizer_states * held if is_trained else 0,
        "saved activations": min(saved, peak),
        "what runs": peak - min(saved, peak),
    }
    capacity = USABLE * capacity_bytes

    def peak_of(ranks: int) -> float:
        total = memory["gathered weights"] + peak * world_size / ranks
        own = weights.held_bytes(states, ranks)
        return total + own * (1 + is_trained * (is_fsdp + states.optimizer_states))

    fitting = (ranks for ranks in (1 << power for power in range(15)) if peak_of(ranks) <= capacity)
    return memory, next(fitting, 0)


def _num_tokens(example: Example) -> int:
    """Return the numbers in the largest tensor of integers, or rows of the largest tensor."""
    leaves = pytree.tree_leaves((example.args, example.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    mesh = example.options.get("mesh")
    ids = [tensor.numel() for tensor in tensors if not tensor.is_floating_point()]
    rows = [tensor.numel() // tensor.shape[-1] for tensor in tensors if tensor.ndim > 1]
    return max(ids or rows, default=0) * (1 if mesh is None else mesh.size())
