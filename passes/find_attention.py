"""Find the attentions of a Dynamo graph that run over a sharded sequence. Changes nothing.

    out = scaled_dot_product_attention(q, k, v, is_causal=True)     q, k, v: DTensor [Shard(2)]
      => Site(name="sdpa_0 (model.py:41)", axis=..., is_causal=True, kernel="flash_cpu", ...)
    out, lse, _ = flex_attention(q, k, v, score_mod, block_mask, ...)
      => Site(name="flex_0 (model.py:52)", axis=..., kernel="flash_cpu", ...)

Subgraphs (checkpointed regions and other higher-order ops) are searched as well. All attentions are
checked before any is changed; one that is sharded along the sequence and cannot be rewritten
raises.

Assumes: nodes carry `example_value`, as Dynamo leaves them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from sympy import Symbol
from torch import SymInt, Tensor, fx
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import sdpa_kernel

from cp_inductor.dtensor.axis import (
    SequenceAxis,
    axis_and_placements,
    check_shards_of_named_mesh,
    is_sequence_sharded,
    sequence_groups,
)
from cp_inductor.dtensor.limits import check_attention, refuse_both_masks, refuse_permuted
from cp_inductor.dtensor.recipe import PlanOptions, make_recipe, shape_on_rank, whole_lengths
from cp_inductor.errors import CPError, UnsupportedAttention, UnsupportedStrategy
from cp_inductor.graph.nodes import nodes_of, place_of
from cp_inductor.graph.subgraphs import Calls, calls_of, source_of
from cp_inductor.mask.language import BATCH, CAUSAL, FULL, HEAD, is_of_pairs
from cp_inductor.mask.reader.lengths import LEAST, MOST, MaskOfLengths
from cp_inductor.mask.reader.read import Recognized, read_mask
from cp_inductor.mask.reader.trace import Trace, lengths_as
from cp_inductor.mask.rule import Rule
from cp_inductor.passes.attentions import (
    CAPTURED,
    KERNELS_OF_SDPA,
    Site,
    Verdict,
    bind_sdpa,
    calls_to,
)
from cp_inductor.plan.batch_nodes import Nodes
from cp_inductor.region.flex_calls import OUT, FlexMasks, bind_flex
from cp_inductor.region.marks import FLEX, region_of_query, regions_of
from cp_inductor.region.modes import OPAQUE_ATTENTION, words_of_opaque
from cp_inductor.run.attention import ANY_RANK, Attention, PerBatch
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.kernel_table import KERNELS, choose_kernel
from cp_inductor.torch_private.arguments import sdpa_backends_at
from cp_inductor.torch_private.sizes import Multiple, size_hint, solve

# Exchanges of a plan at run time, forward, if the user names no number: half of a rank's own cells
# are computed before what it brings, and half behind it.
STAGES_OF_BATCHES = 1

# Symbols of lengths, and the lengths for which a mask is read.
Numbers = Mapping[Symbol, int]


@dataclass
class _Masks:
    """The masks of a graph and of the bodies below it.

    Each is read once, as layers share them, for the same symbols of lengths: that of the keys may
    serve attentions whose queries are as many, and others.
    """

    calls: Calls
    flex: FlexMasks
    known: dict[Any, tuple[Recognized, Trace]] = field(default_factory=dict)
    of_lengths: dict[Any, MaskOfLengths | None] = field(default_factory=dict)

    def read(self, mask: fx.Node, numbers: Numbers) -> Recognized:
        """Return what a mask is where symbols are these numbers; others become the graph's."""
        source = source_of(mask, self.calls)
        place = (source, *numbers.items())
        if place not in self.known:
            with lengths_as(numbers):
                self.known[place] = read_mask(source)
        return self.known[place][0]

    def read_of_lengths(
        self, mask: fx.Node, numbers: Numbers, query: Tensor, key: Tensor
    ) -> MaskOfLengths | None:
        """Return a mask that was read as what can be read at other lengths; None if it differs.

        Its graph is guarded to lengths at which it is the same.
        """
        source = source_of(mask, self.calls)
        sizes = [tensor.shape[SEQUENCE_DIM] for tensor in (query, key)]
        lengths: Any = tuple(Multiple.of(size) or size for size in sizes)
        place, numbers_place = (source, lengths), (source, *numbers.items())
        if place in self.of_lengths:
            return self.of_lengths[place]
        mask_of_lengths = MaskOfLengths.of(source, *self.known[numbers_place], lengths)
        bounds = mask_of_lengths.bounds(numbers)
        self.of_lengths[place] = None if bounds is None else mask_of_lengths
        for size, multiple in zip(sizes, lengths, strict=True):
            if bounds is not None and isinstance(multiple, Multiple):
                # Let Dynamo compile anew where a symbol is not within these bounds.
                low, high = bounds[multiple.symbol]
                assert low <= LEAST or size >= low * multiple.factor
                assert high >= MOST or size <= high * multiple.factor
        return self.of_lengths[place]


def find_attention(
    gm: fx.GraphModule, axis: SequenceAxis | None, plan_options: PlanOptions
) -> Iterator[tuple[str, Verdict]]:
    """Yield the name and the verdict of every attention of a Dynamo graph and its subgraphs.

    Plain tensors are shards on the `axis` that the user named, if any, and else just local.
    """
    calls, regions = calls_of(gm), regions_of(gm)
    masks = _Masks(calls, FlexMasks(calls))
    for node in calls_to(gm, KERNELS_OF_SDPA | OPAQUE_ATTENTION):
        is_of_shards = axis is not None or node.graph in regions
        # Among what is read there is a DTensor (B, H, S, D) that shards S.
        values = [source.meta.get("example_value") for source in node.all_input_nodes]
        is_distributed = any(
            isinstance(value, DTensor) and value.ndim == 4 and is_sequence_sharded(value)
            for value in values
        )
        is_handled = is_distributed and node.target in KERNELS_OF_SDPA
        if (is_of_shards or is_distributed) and not is_handled:
            site, words = f"{node.name} ({place_of(node)})", words_of_opaque(node.target)
            yield site, UnsupportedAttention(site=site, **words)
    counts = {"sdpa": count(), "flex": count()}
    for node in calls_to(gm, CAPTURED):
        kind = "flex" if node.target is FLEX else "sdpa"
        name = f"{kind}_{next(counts[kind])} ({place_of(node)})"
        region = region_of_query(node) or regions.get(node.graph)
        own_axis, options = axis, plan_options
        if region is not None:
            own_axis, options = region.axis, replace(plan_options, lengths=region.lengths)
        try:
            yield name, _as_site(node, name, own_axis, options, masks)
        except CPError as error:
            yield name, error


def groups_of_sequence(gm: fx.GraphModule, axis: SequenceAxis | None) -> list[str]:
    """Return the groups whose ranks share a sequence of the attentions, also if it is refused."""
    axes = {region.axis for region in regions_of(gm).values()} | ({axis} if axis else set())
    of_tensors = {
        name
        for node in nodes_of(gm)
        if node.target in CAPTURED
        for source in node.all_input_nodes
        if isinstance(value := source.meta.get("example_value"), Tensor)
        for name in sequence_groups(value)
    }
    return sorted({axis.group_name for axis in axes} | of_tensors)


def _as_site(
    node: fx.Node, name: str, mesh_axis: SequenceAxis | None, options: PlanOptions, masks: _Masks
) -> Site | None:
    flex, example = None, node.meta["example_value"]
    if node.target is FLEX:
        flex, example = bind_flex(node, name), example[OUT]
    call = bind_sdpa(node, name) if flex is None else flex.as_sdpa()
    sides = (call["query"], call["key"], call["value"])
    query, key, value = (side.meta["example_value"] for side in sides)
    dtype = example.dtype
    axis, _ = axis_and_placements(query, key, value, site=name)
    if axis is None and mesh_axis is not None:
        check_shards_of_named_mesh(query, key, value, site=name)
        axis = mesh_axis
    if axis is None:
        return None
    check_attention(query=query, key=key, site=name)
    refuse_permuted(name)
    numbers = {} if call["attn_mask"] is None else _numbers_of_lengths(query, key, options)
    if flex is None:
        mask = _read_mask(call, dtype, numbers, axis.name, name, masks)
    else:
        lengths = whole_lengths(options, axis, query, key, site=name)
        mask = masks.flex.read(flex, lengths, name)
    _check_mask(mask, query, name)
    rule = mask.rule.format()
    with _switches_at(node, masks.calls):
        where: Any = {"device": options.device, "capability": options.capability}
        where |= {"dtype": dtype, "has_bias": rule not in ("full", "causal")}
        kernel, why = choose_kernel(query, key, value, site=name, **where)
    dropout_p = float(call["dropout_p"])
    obstacle = KERNELS[kernel].under_rule.obstacle(mask.rule, query.shape[-1])
    is_at_run_time = _is_planned_at_run_time(options, mask, dropout_p, obstacle, name)
    of_lengths = None
    if numbers and is_at_run_time:
        of_lengths = masks.read_of_lengths(call["attn_mask"], numbers, query, key)
    if numbers and of_lengths is None:
        # What was read holds for these lengths.
        for tensor in (query, key):
            int(tensor.shape[SEQUENCE_DIM])
    if is_at_run_time:
        # Refuses what it cannot.
        whole_lengths(options, axis, query, key, site=name, is_dynamic=True)
        stages = options.stages or STAGES_OF_BATCHES
        shape = shape_on_rank(query, key, dtype)
        nodes = Nodes.of(options.machine_of(axis, query), axis.world_size, shape)
        source: Any = PerBatch(rule, stages, nodes.format() if nodes else "")
    else:
        source = make_recipe(options, axis, query, key, rule=rule, dtype=dtype, site=name)
    attention = Attention(
        source,
        ANY_RANK if is_at_run_time else axis.rank,
        call["scale"],
        kernel,
        axis.group_name,
        dropout_p=dropout_p,
        has_bias=mask.has_bias,
        kernel_options="" if flex is None else flex.kernel_options,
    )
    return Site(name, node, *sides, dtype, axis, attention, mask, options, of_lengths, why)


def _numbers_of_lengths(query: Tensor, key: Tensor, plan_options: PlanOptions) -> Numbers:
    """Return the numbers for which a mask is read, by symbols that may have others in other calls.

    Empty if the plan is made when compiling: then lengths are numbers of the graph.
    """
    if plan_options.plan == "static" or not isinstance(query, DTensor):
        return {}
    sizes = [tensor.shape[SEQUENCE_DIM] for tensor in (query, key)]
    multiples = [Multiple.of(size) or size for size in sizes]
    if any(isinstance(multiple, SymInt) for multiple in multiples):
        return {}
    numbers = solve(multiples, [size_hint(size) for size in sizes])
    assert numbers is not None
    return numbers


def _is_planned_at_run_time(
    options: PlanOptions, mask: Recognized, dropout_p: float, of_kernel: str | None, site: str
) -> bool:
    """Whether the batch decides the plan; refused is a user's wish for it that cannot be met."""
    if options.plan == "static":
        return False
    obstacles = {
        "dropout": dropout_p > 0,
        "a bias with a gradient, or one that is made as a tensor": mask.has_bias
        or mask.is_bias_made,
        "a mask that is a tensor of queries and keys": mask.rule.reads_pairs,
        of_kernel: of_kernel is not None,
        f"strategy={options.strategy!r}": options.strategy != "auto",
    }
    names = [name for name, is_there in obstacles.items() if name and is_there]
    if options.plan == "auto":
        return bool(mask.rule.tables) and not names
    if names:
        raise UnsupportedStrategy(
            site=site,
            expected="an attention whose plan can be made at run time",
            got=", ".join(names),
            remedy="use options={'plan': 'auto'}, which plans this one when it is compiled",
        )
    return True


def _switches_at(node: fx.Node, calls: Calls) -> ExitStack:
    """Enable the kernels that the innermost `sdpa_kernel` around a node enables, in its order."""
    contexts = ExitStack()
    for with_priority in (True, False):
        inner = node
        backends = sdpa_backends_at(inner, with_priority=with_priority)
        while backends is None and inner.graph in calls:
            inner = calls[inner.graph]
            backends = sdpa_backends_at(inner, with_priority=with_priority)
        if backends is not None:
            contexts.enter_context(sdpa_kernel(backends, set_priority=with_priority))
    return contexts


def _read_mask(
    call: dict[str, Any], dtype: torch.dtype, numbers: Numbers, axis: str, site: str, masks: _Masks
) -> Recognized:
    node, is_causal = call["attn_mask"], call["is_causal"]
    if node is None:
        return Recognized(Rule(CAUSAL if is_causal else FULL))
    query, mask = (side.meta["example_value"] for side in (call["query"], node))
    if is_causal:
        refuse_both_masks(site, mask)
    if not 2 <= mask.ndim <= 4:
        raise UnsupportedAttention(
            site=site,
            expected="an attn_mask of 2 to 4 dims",
            got=f"one of {mask.ndim} dims",
            remedy="broadcast it to (batch, heads, S, T)",
        )
    if is_sequence_sharded(query):
        recognized = masks.read(node, numbers)
        if not recognized.rule.bias or query.dtype != dtype:  # autocast would round it
            return recognized
        # SDPA adds it as it is; in bfloat16, ALiBi of distant keys would be far off.
        is_wide = mask.dtype.itemsize > dtype.itemsize
        return replace(recognized, rule=replace(recognized.rule, is_wide=is_wide))
    # Indices in a local shard are not those of the sequence; nor in DTensors of which only the
    # named mesh says that their sequence is sharded.
    raise UnsupportedAttention(
        site=site,
        expected=f"attn_mask=None over plain shards on {axis}",
        got=f"an attn_mask of shape {tuple(mask.shape)}",
        remedy="use is_causal=True if it says no more, else flex_attention, or DTensors (any mask)",
    )


def _check_mask(mask: Recognized, query: Tensor, site: str) -> None:
    """Refuse a mask of which a rank would have to take its part, or which counts from 0 in one.

    That are tensors over plain shards; and indices of heads or batch entries that are sharded.
    """
    is_plain = not isinstance(query, DTensor)
    for node, indices in zip(mask.tables, mask.indices, strict=True) if is_plain else ():
        is_distributed = isinstance(node.meta["example_value"], DTensor)
        if is_distributed or is_of_pairs(indices):
            raise UnsupportedAttention(
                site=site,
                expected="plain tensors, the same on every rank, captured over plain shards",
                got=f"{node.name}, {'a DTensor' if is_distributed else 'a tensor of pairs'}",
                remedy="pass DTensors, or compute what it holds from indices",
            )
    placements = query.placements if isinstance(query, DTensor) else ()
    sharded = {placement.dim for placement in placements if isinstance(placement, Shard)}
    symbols = {symbol for dim, symbol in ((0, BATCH), (1, HEAD)) if dim in sharded}
    if symbols & mask.rule.computed_with:
        raise UnsupportedAttention(
            site=site,
            expected="a mask that does not use the index of a head or batch entry",
            got=f"{mask.rule.format()}, and a query with {placements}",
            remedy="shard only the sequence, or read values that depend on the head from a tensor",
        )
