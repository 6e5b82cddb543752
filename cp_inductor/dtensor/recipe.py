"""From tensors to the recipe of a plan: lengths, heads and dtype, and what the user asked for.

q (B, H, 512, D) on each of 2 ranks, PlanOptions(strategy="auto")
  =>  world_size=2 query_length=1024 ... strategy=blocks stages=3 chunks=8

And from what the user says of the machine to the machine of the ranks of a group:

"8xh100:nvlink4 x 8:ib400", ranks 0, 8, 16, ...                =>   one level, ib400
"calibrated"                                                   =>   what `calibrate` measured
"auto", on 16 H100, 8 on each host                             =>   "8xh100:nvlink4 x ib400"
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import SymInt, Tensor
from torch.distributed.tensor import DTensor

from cp_inductor import config
from cp_inductor.dtensor.axis import SequenceAxis, whole_of_shard
from cp_inductor.dtensor.wrap import held_by_rank
from cp_inductor.errors import InvalidArgument, UnevenSequence
from cp_inductor.flags import AUTO
from cp_inductor.plan import Machine, Recipe, forward_plan, resolve
from cp_inductor.plan.checks import MAX_LENGTH, check_count
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.plan.ir import Shape
from cp_inductor.plan.machine import CALIBRATED, CHIPS, DEVICES, known_machine, read_calibrated
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.inductor import cache_folder
from cp_inductor.torch_private.sizes import is_demanded, is_number, size_hint

# GPUs of a node, where none can be counted.
USUAL_NODE = 8


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the user asked for, by flags or options (docs/options.md), for all graphs of a compile.

    Attributes beside those of docs/options.md:
        machine: as `Machine.format` writes it; "" is the default machine, "auto" what is known of
            this one.
        seq_len: tokens of the whole sequence, if plain shards differ in length; else None.
        lengths: of whole sequences, if there may be several and their shards differ in length.
        device: type of the device that code is generated for, if it is not the tensors' device.
        capability: of that device, if it is a GPU.
        can_keep: whether the forward can hand what it fetched to the backward.
    """

    strategy: str
    stages: int
    keep_bytes: int
    link_bytes_per_s: float = 0.0
    device_flops_per_s: float = 0.0
    machine: str = ""
    seq_len: int | None = None
    lengths: tuple[int, ...] = ()
    device: str | None = None
    capability: tuple[int, int] | None = None
    can_keep: bool = True
    plan: str = "auto"
    schedule: str = "global"
    memory_budget_bytes: int = -1

    def __post_init__(self) -> None:
        if self.seq_len is not None:
            check_count("seq_len", self.seq_len, 1, MAX_LENGTH, site="options['seq_len']")

    @staticmethod
    def read(options: Mapping[str, Any]) -> tuple[PlanOptions, dict[str, Any]]:
        """Return the plan_options from flags and options, and all other options."""
        no_options = ("device", "capability", "lengths", "can_keep")
        names = [field.name for field in fields(PlanOptions) if field.name not in no_options]
        own = {name: options.get(name, getattr(config, name, None)) for name in names}
        own["machine"] = machine_text(own["machine"], site="options and flags")
        rest = {name: value for name, value in options.items() if name not in names}
        return PlanOptions(**own), rest

    @property
    def priced_by(self) -> str:
        """What plans are priced by, for ranks to compare; what is found, plans tell."""
        if self.machine == AUTO:
            return f"{AUTO} {self.link_bytes_per_s} {self.device_flops_per_s}"
        machine = Machine.parse(self.machine) if self.machine else Machine()
        return machine.with_speeds(self.link_bytes_per_s, self.device_flops_per_s).format()

    def machine_of(self, axis: SequenceAxis, tensor: Tensor) -> Machine:
        """Return the machine as an axis sees it, with the speeds that the user gave apart."""
        device, capability = self.device or tensor.device.type, self.capability
        group, world_size = group_of(axis.group_name), dist.get_world_size()
        node_size = 0 if dist.get_backend(group) == "fake" else config.ranks_of_this_host()
        if self.machine != AUTO or device not in ("cpu", "cuda"):
            machine = Machine() if self.machine in ("", AUTO) else Machine.parse(self.machine)
        elif device == "cpu":
            num_cores = os.cpu_count() or 1
            machine = known_machine("cpu", world_size, node_size or world_size, num_cores)
        else:
            is_here = capability is None and torch.cuda.is_available()
            chip = chip_of_this_process() if is_here else CHIPS.get(capability or (0, 0), "gpu")
            usual = torch.cuda.device_count() if is_here else USUAL_NODE
            machine = known_machine(chip, world_size, node_size or usual)
        machine = machine.among(dist.get_process_group_ranks(group))
        return machine.with_speeds(self.link_bytes_per_s, self.device_flops_per_s)


def machine_text(machine: object, *, site: str) -> str:
    """Return as text a `Machine`, its text, "calibrated", "auto", or "", which is the default."""
    if isinstance(machine, Machine):
        return machine.format()
    if not isinstance(machine, str):
        raise InvalidArgument(
            site=site,
            expected="machine to be a cp_inductor.Machine, or its text",
            got=repr(machine)[:60],
            remedy="write '8xh100:nvlink4 x 8:ib400' for 8 nodes of 8 H100",
        )
    if machine == CALIBRATED:
        return read_calibrated(cache_folder()).format()
    return Machine.parse(machine, site=site).format() if machine not in ("", AUTO) else machine


def chip_of_this_process() -> str:
    """Return the name in `DEVICES` of the GPU of this process; "gpu" if nothing is known of it."""
    name = torch.cuda.get_device_name().lower()
    return next((chip for chip in DEVICES if chip in name), "gpu")


def make_recipe(
    plan_options: PlanOptions,
    axis: SequenceAxis,
    query: Tensor,
    key: Tensor,
    *,
    rule: str,
    dtype: torch.dtype,
    site: str,
) -> Recipe:
    """Return the resolved recipe of an attention, the same on all ranks.

    Query (B, H, S, D) and key (B, G, T, D) are DTensors, or this rank's shards. The rule says which
    pairs exist (`cp_inductor.mask.rule`). Data is computed and moved in the dtype.
    """
    shape = shape_on_rank(query, key, dtype)
    query_length, key_length = whole_lengths(plan_options, axis, query, key, site=site)
    # What is empty under other rules depends on lengths: those are constants of the graph.
    is_dynamic = rule in ("full", "causal") and not all(
        is_number(t.shape[SEQUENCE_DIM]) for t in (query, key)
    )
    recipe = Recipe(
        world_size=axis.world_size,
        query_length=query_length,
        key_length=key_length,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        itemsize=shape.itemsize,
        rule=rule,
        strategy=plan_options.strategy,
        stages=plan_options.stages,
        # Halves of a shard exist at any length; finer chunks might not.
        chunks=2 if is_dynamic else 0,
    )
    recipe = resolve(recipe, site=site, machine=plan_options.machine_of(axis, query))
    if not plan_options.can_keep or not torch.is_grad_enabled():
        return replace(recipe, keep=0)
    batch = size_hint(held_by_rank(query).shape[0])
    return _keep(recipe, plan_options.keep_bytes, batch=batch)


def whole_lengths(
    plan_options: PlanOptions,
    axis: SequenceAxis,
    query: Tensor,
    key: Tensor,
    *,
    site: str,
    is_dynamic: bool = False,
) -> tuple[Any, Any]:
    """Return the lengths of the whole sequences of queries and keys.

    If the plan is made at run time, symbols stay symbols, and need not divide by the ranks.
    """
    context = (axis, plan_options, site, is_dynamic)
    return _whole_length(query, "query", *context), _whole_length(key, "key", *context)


def shape_on_rank(query: Tensor, key: Tensor, dtype: torch.dtype) -> Shape:
    """Return the heads that this rank has, of one batch entry, as they are computed and moved."""
    num_heads, num_kv_heads = (size_hint(held_by_rank(side).shape[1]) for side in (query, key))
    return Shape(1, num_heads, num_kv_heads, size_hint(query.shape[-1]), dtype.itemsize)


def _whole_length(
    tensor: Tensor, name: str, axis: SequenceAxis, options: PlanOptions, site: str, is_dynamic: bool
) -> int | SymInt:
    length = tensor.shape[SEQUENCE_DIM]
    if is_dynamic and isinstance(length, SymInt):
        return length if isinstance(tensor, DTensor) else length * axis.world_size
    if isinstance(tensor, DTensor):
        if isinstance(length, SymInt) and length % axis.world_size:
            if not is_demanded(length):
                return int(length)  # a constant of the graph
            length = size_hint(length)
            raise UnevenSequence(
                site=site,
                expected=f"a length that divides by the {axis.world_size} ranks of {axis.name},"
                " as mark_dynamic demands one graph for all",
                got=f"a {name} of length {length}",
                remedy="mark it with torch._dynamo.maybe_mark_dynamic, which lets such lengths have"
                f" a graph each, or pad the sequence to"
                f" {-(-length // axis.world_size) * axis.world_size}",
            )
        return size_hint(length)
    if options.seq_len is None:
        remedy = "pass a buffer of each length to context_parallel"
        known = whole_of_shard(options.lengths, axis.world_size, axis.rank)
    else:
        remedy = "shard the sequence as torch.chunk does, or correct options['seq_len']"
        known = {shard_lengths(options.seq_len, axis.world_size)[axis.rank]: options.seq_len}
    if not known:
        return size_hint(length) * axis.world_size
    for shard, whole in known.items():
        if length == shard:  # a symbol has no hash
            return whole
    parts = " or ".join(f"{shard} of {whole}" for shard, whole in known.items())
    raise UnevenSequence(
        site=site,
        expected=f"{parts} tokens on rank {axis.rank} of {axis.name}",
        got=f"a {name} of {size_hint(length)} tokens",
        remedy=remedy,
    )


def _keep(recipe: Recipe, budget: int, *, batch: int) -> Recipe:
    """Keep the fetched data of as many stages, from the first, as fit the budget on every rank.

    What the recipe keeps already does not count: it takes the place of the shard's own tensors.
    """
    if not budget:
        return recipe
    fetched = forward_plan(recipe).loads[recipe.keep :, 0, 1]
    fits = (batch * fetched.cumsum(0) <= budget).all(1)
    return replace(recipe, keep=recipe.keep + int(fits.sum()))
