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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from sympy import Symbol
from torch import SymInt, Tensor, fx
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import sdpa_kernel

from cp_inductor.dtensor.axis import (
    SequenceAxis,
    axis_of_tensors,
    check_shards_of_named_mesh,
    is_sequence_sharded,
)
from cp_inductor.dtensor.layout import AUTO, agree_on_layout, marked_layout
from cp_inductor.dtensor.limits import check_attention, refuse_both_masks
from cp_inductor.dtensor.recipe import (
    PlanOptions,
    lengths_at_run_time,
    make_recipe,
    whole_lengths,
)
from cp_inductor.errors import CPError, UnsupportedAttention, UnsupportedStrategy
from cp_inductor.graph.nodes import graphs_of, source_line
from cp_inductor.graph.subgraphs import Calls, bodies_of, calls_of, source_of
from cp_inductor.mask.language import BATCH, CAUSAL, FULL, HEAD, SCORE, is_of_pairs
from cp_inductor.mask.reader.lengths import as_number, lengths_as
from cp_inductor.mask.reader.to_rule import Recognized
from cp_inductor.mask.reader.trace import Trace
from cp_inductor.mask.rows import can_be_on_rows
from cp_inductor.mask.rule import Rule
from cp_inductor.passes.recognize_mask import LEAST, MOST, MaskOfLengths, read_mask
from cp_inductor.region.flex_calls import FLEX, OUT, FlexCall, FlexMasks, bind_flex
from cp_inductor.region.traced import LEFT_ALONE, MARK, PER_RANK
from cp_inductor.run.batch import BatchAttention
from cp_inductor.run.execute import Attention
from cp_inductor.tiles.dims import SEQUENCE_DIM
from cp_inductor.tiles.flex_tiles import MIN_HEAD_DIM
from cp_inductor.tiles.kernel_choice import choose_kernel
from cp_inductor.torch_private.arguments import bind_arguments, sdpa_backends_at
from cp_inductor.torch_private.modes import name_of_function
from cp_inductor.torch_private.sizes import Multiple, size_hint, solve
from cp_inductor.torch_private.varlen import VARLEN_OPS

# Frames of a user's stack that are in here, such as a region's, say nothing to the user.

# As Dynamo captures the call, and as `inline_multi_head` leaves it.
SDPA = frozenset(
    {
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    }
)

# Exchanges of a plan at run time, forward, if the user names no number: half of a rank's own cells
# are computed before what it brings, and half behind it.
STAGES_OF_BATCHES = 1

# What becomes a site.
CAPTURED = SDPA | {FLEX}

# Attention that Dynamo captures whole, and that would run over the local shard alone.
OPAQUE_ATTENTION = VARLEN_OPS | {
    torch._transformer_encoder_layer_fwd,
    torch._native_multi_head_attention,
}

# What SDPA comes down to, called by name. DTensor's handlers compute it, plain shards have none.
KERNELS = frozenset(
    called
    for packet in (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention,
        torch.ops.aten._scaled_dot_product_efficient_attention,
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        torch.ops.aten._scaled_dot_product_attention_math,
    )
    for called in (packet, packet.default)
)


@dataclass(frozen=True, slots=True)
class Site:
    """An attention over a sharded sequence.

    Attributes:
        name: for messages, with the source line.
        node: the call of SDPA, or of flex_attention.
        query, key, value: its inputs.
        dtype: in which it computes; under autocast its inputs may still be wider.
        axis: the mesh axis that shards the sequence.
        attention: what to compute, with the recipe of its plan, or by a plan of its batch.
        mask: the tensors that the mask reads.
        is_layout_found: the layout was not named, but derived from what torch's context parallelism
            was doing.
        plan_options: the choices that hold for it.
        of_lengths: the mask, if its lengths are symbols that only a call gives numbers.
    """

    name: str
    node: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    dtype: torch.dtype
    axis: SequenceAxis
    attention: Attention | BatchAttention
    mask: Recognized
    is_layout_found: bool
    plan_options: PlanOptions | None = None
    of_lengths: MaskOfLengths | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether the graph holds DTensors here, rather than this rank's shards."""
        return isinstance(self.query.meta["example_value"], DTensor)

    @property
    def is_flex(self) -> bool:
        """Whether it is flex_attention, which returns more than its output."""
        return self.node.target is FLEX

    @property
    def batch(self) -> int:
        """The number of batch entries on this rank, in the call being compiled."""
        query = self.query.meta["example_value"]
        return size_hint((query.to_local() if self.is_distributed else query).shape[0])


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

    def read(self, mask: fx.Node, numbers: Mapping[Symbol, int]) -> Recognized:
        """Return what a mask is where symbols are these numbers; others become the graph's."""
        source = source_of(mask, self.calls)
        place = (source, *numbers.items())
        if place not in self.known:
            with lengths_as(numbers):
                self.known[place] = read_mask(source)
        return self.known[place][0]

    def read_of_lengths(
        self, mask: fx.Node, numbers: Mapping[Symbol, int], query: Tensor, key: Tensor
    ) -> MaskOfLengths | None:
        """Return a mask that was read as what can be read at other lengths; None if it differs.

        Its graph is guarded to lengths at which it is the same.
        """
        source = source_of(mask, self.calls)
        sizes = [tensor.shape[SEQUENCE_DIM] for tensor in (query, key)]
        lengths: Any = tuple(Multiple.of(size) or size for size in sizes)
        place = (source, lengths)
        if place not in self.of_lengths:
            of_numbers = (source, *numbers.items())
            read = self.known[of_numbers]
            found = MaskOfLengths.of(source, *read, lengths)
            bounds = found.bounds((size_hint(sizes[0]), size_hint(sizes[1])))
            self.of_lengths[place] = None if bounds is None else found
            for size, of_size in zip(sizes, lengths, strict=True):
                if bounds is not None and isinstance(of_size, Multiple):
                    _guard(size, of_size.factor, *bounds[of_size.symbol])
        return self.of_lengths[place]


def _guard(size: int | SymInt, factor: int, low: int, high: int) -> None:
    """Let Dynamo compile anew where a symbol is not within these bounds."""
    if low > LEAST:
        assert size >= low * factor
    if high < MOST:
        assert size <= high * factor


def find_attention(
    gm: fx.GraphModule, axis: SequenceAxis | None, plan_options: PlanOptions
) -> tuple[Site, ...]:
    """Return the sites of a Dynamo graph and its subgraphs, in order.

    Args:
        gm: a graph from Dynamo.
        axis: the axis of the mesh that the user named: plain tensors are shards on it. None if
            plain tensors are just local.
        plan_options: the choices for plans.

    Raises:
        CPError: an attention is sharded along the sequence and cannot be rewritten.
    """
    sites = []
    for _, verdict in judge_attention(gm, axis, plan_options):
        if isinstance(verdict, CPError):
            raise verdict
        if verdict is not None:
            sites.append(verdict)
    return tuple(sites)


def judge_attention(
    gm: fx.GraphModule, axis: SequenceAxis | None, plan_options: PlanOptions
) -> Iterator[tuple[str, Site | CPError | None]]:
    """Yield the name of every attention and its verdict; takes the arguments of `find_attention`.

    The verdict is a site to rewrite, an error that refuses it, or None if it is not sharded.
    """
    nodes = [
        node
        for graph in graphs_of(gm)
        for node in graph.nodes
        if node.op == "call_function" and not is_left_alone(node)
    ]
    calls = calls_of(gm)
    masks = _Masks(calls, FlexMasks(calls))
    regions = regions_of(gm)
    for node in nodes:
        is_kernel = node.target in KERNELS
        if not is_kernel and node.target not in OPAQUE_ATTENTION:
            continue
        is_of_shards = axis is not None or node.graph in regions
        is_distributed = _reads_sharded_sequence(node)
        is_handled = is_kernel and is_distributed
        if (is_of_shards or is_distributed) and not is_handled:
            yield f"{node.name} ({source_line(node)})", _refuse_opaque(node)
    counts = dict.fromkeys(("sdpa", "flex"), 0)
    for node in (node for node in nodes if node.target in CAPTURED):
        kind = "flex" if node.target is FLEX else "sdpa"
        name = f"{kind}_{counts[kind]} ({source_line(node)})"
        counts[kind] += 1
        try:
            region = _region_of_query(node) or regions.get(node.graph)
            if region is None:
                yield name, _as_site(node, name, axis, plan_options, masks)
            else:
                lengths = replace(plan_options, lengths=region.lengths)
                yield name, _as_site(node, name, region.axis, lengths, masks, region.layout)
        except CPError as error:
            yield name, error


@dataclass(frozen=True, slots=True)
class Region:
    """A context in which plain tensors are shards.

    Attributes:
        axis: the axis that shards them.
        lengths: the known lengths of whole sequences.
        layout: in which the ranks hold them; None if the context does not say.
    """

    axis: SequenceAxis
    lengths: tuple[int, ...]
    layout: str | None


def regions_of(gm: fx.GraphModule) -> dict[fx.Graph, Region]:
    """Return the graphs that are called with marked tensors, and the graphs below them."""
    regions: dict[fx.Graph, Region] = {}
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for mark in module.graph.find_nodes(op="call_function", target=MARK):
            region = _region_of(mark)
            for user in mark.users:
                for body in bodies_of(user, module):
                    regions.update((graph, region) for graph in graphs_of(body))
    return regions


def _region_of_query(node: fx.Node) -> Region | None:
    """Return the context of a call of flex_attention, whose query is marked."""
    query: Any = node.args[0] if node.target is FLEX else None
    return _region_of(query) if query is not None and query.target is MARK else None


def _region_of(mark: fx.Node) -> Region:
    arguments: Any = mark.args
    _, group_name, rank, world_size, lengths, layout = arguments
    axis = SequenceAxis(f"group {group_name!r}", group_name, rank, world_size)
    return Region(axis, tuple(lengths), layout)


def remove_marks(gm: fx.GraphModule) -> None:
    """Remove the marks from all graphs."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for mark in module.graph.find_nodes(op="call_function", target=MARK):
            mark.replace_all_uses_with(mark.args[0])
            module.graph.erase_node(mark)
        module.recompile()


def is_left_alone(node: fx.Node) -> bool:
    """Whether the user asked for local attention at this node."""
    return LEFT_ALONE.items() <= node.meta.get("custom", {}).items()


def is_per_rank(node: fx.Node) -> bool:
    """Whether the user said that each rank computes this within its own shard."""
    return PER_RANK.items() <= node.meta.get("custom", {}).items()


def has_attentions(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph has any attention, sharded or not."""
    return any(
        node.op == "call_function"
        and (
            node.target in CAPTURED | OPAQUE_ATTENTION | KERNELS
            or node.target is F.multi_head_attention_forward
        )
        for graph in graphs_of(gm)
        for node in graph.nodes
    )


def has_masks(gm: fx.GraphModule) -> bool:
    """Whether any attention of a Dynamo graph has a mask or dropout, or is flex_attention."""
    for graph in graphs_of(gm):
        for node in graph.nodes:
            if node.op == "call_function" and node.target is FLEX:
                return True
            if node.op == "call_function" and node.target in SDPA:
                call = _bind(node, node.name)
                if call["attn_mask"] is not None or call["dropout_p"]:
                    return True
    return False


def _reads_sharded_sequence(node: fx.Node) -> bool:
    """Whether among what is read there is a DTensor (B, H, S, D) that shards S."""
    values = [source.meta.get("example_value") for source in node.all_input_nodes]
    return any(
        isinstance(value, Tensor) and value.ndim == 4 and is_sequence_sharded(value)
        for value in values
    )


def _refuse_opaque(node: fx.Node) -> UnsupportedAttention:
    return UnsupportedAttention(
        site=f"{node.name} ({source_line(node)})",
        expected="attention as torch.nn.functional.scaled_dot_product_attention",
        got=f"{name_of_function(node.target)}, which would attend within the local shard only",
        remedy=(
            "call varlen_attn on DTensors whose tokens are sharded, or flex_attention with a"
            " mask_mod that compares document numbers"
            if node.target in VARLEN_OPS
            else "call scaled_dot_product_attention; for nn.TransformerEncoderLayer, use"
            " torch.backends.mha.set_fastpath_enabled(False)"
        ),
    )


def _as_site(
    node: fx.Node,
    name: str,
    mesh_axis: SequenceAxis | None,
    plan_options: PlanOptions,
    masks: _Masks,
    layout: str | None = None,
) -> Site | None:
    call = _Call.of(node, name)
    query, key, value = (side.meta["example_value"] for side in call.tensors)
    axis = axis_of_tensors(query, key, value, site=name)
    if axis is None and mesh_axis is not None:
        check_shards_of_named_mesh(query, key, value, site=name)
        axis = mesh_axis
    if axis is None:
        return None
    check_attention(query=query, key=key, site=name)
    asked, of_region = plan_options.layout, layout or marked_layout(node.meta, site=name)
    plan_options = replace(plan_options, layout=agree_on_layout(asked, of_region, site=name))
    numbers = _numbers_of_lengths(call, query, key, plan_options)
    if call.flex is None:
        mask = _read_mask(call, numbers, query, axis, name, masks)
    else:
        lengths = whole_lengths(plan_options, axis, query, key, site=name)
        mask = masks.flex.read(call.flex, lengths, name)
        if not isinstance(query, DTensor):
            _check_tables_of_shards(mask, name)
    _check_heads_and_batch(mask, query, axis, name)
    rule = mask.rule.format()
    dtype, has_bias = call.dtype, rule not in ("full", "causal")
    with _switches_at(node, masks.calls):
        kernel = choose_kernel(
            query, key, value, dtype=dtype, site=name, device=plan_options.device, has_bias=has_bias
        )
    options = "" if call.flex is None else call.flex.kernel_options
    this: Attention | BatchAttention
    is_at_run_time = _is_planned_at_run_time(
        plan_options, mask, call, kernel, query.shape[-1], name
    )
    of_lengths = None
    if numbers:
        assert call.mask is not None
        if is_at_run_time:
            of_lengths = masks.read_of_lengths(call.mask, numbers, query, key)
        if of_lengths is None:
            # What was read holds for these lengths.
            for tensor in (query, key):
                int(tensor.shape[SEQUENCE_DIM])
    if is_at_run_time:
        lengths_at_run_time(plan_options, axis, query, key, site=name)  # refuses what it cannot
        stages = plan_options.stages or STAGES_OF_BATCHES
        this = BatchAttention(rule, stages, call.scale, kernel, axis.group_name, options)
    else:
        recipe = make_recipe(plan_options, axis, query, key, rule=rule, dtype=dtype, site=name)
        how = (call.scale, kernel, axis.group_name, call.dropout_p, mask.has_bias, options)
        this = Attention(recipe, axis.rank, *how)
    is_layout_found = asked == AUTO and of_region is None
    site = Site(name, node, *call.tensors, dtype, axis, this, mask, is_layout_found)
    return replace(site, plan_options=plan_options, of_lengths=of_lengths)


def _numbers_of_lengths(
    call: _Call, query: Tensor, key: Tensor, plan_options: PlanOptions
) -> dict[Symbol, int]:
    """Return the numbers for which a mask is read, by symbols that may have others in other calls.

    Empty if the plan is made when compiling: then lengths are numbers of the graph.
    """
    is_dynamic = call.mask is not None and plan_options.plan != "static"
    if not is_dynamic or not isinstance(query, DTensor):
        return {}
    sizes = [tensor.shape[SEQUENCE_DIM] for tensor in (query, key)]
    multiples = [Multiple.of(size) or size for size in sizes]
    if not any(isinstance(one, Multiple) for one in multiples):
        return {}
    if any(isinstance(one, SymInt) for one in multiples):
        return {}
    numbers = solve(multiples, [size_hint(size) for size in sizes])
    assert numbers is not None
    return numbers


def _is_planned_at_run_time(
    plan_options: PlanOptions,
    mask: Recognized,
    call: _Call,
    kernel: str,
    head_dim: int | SymInt,
    site: str,
) -> bool:
    """Whether the batch decides the plan of an attention.

    Raises:
        UnsupportedStrategy: the user wants it so, and it cannot be.
    """
    if plan_options.plan == "static":
        return False
    on_cpu = kernel == "flash_cpu"
    obstacles = {
        "dropout": call.dropout_p > 0,
        "a bias with a gradient, or one that is made as a tensor": mask.has_bias
        or mask.is_bias_made,
        "a mask that is a tensor of queries and keys": not can_be_on_rows(mask.rule),
        "a score_mod that computes with scores, on the CPU": on_cpu and mask.rule.score != SCORE,
        f"head dim {head_dim} on CUDA, where flex attention wants {MIN_HEAD_DIM}": not on_cpu
        and head_dim < MIN_HEAD_DIM,
        f"layout={plan_options.layout!r}": plan_options.layout != "contiguous",
        f"strategy={plan_options.strategy!r}": plan_options.strategy != "auto",
    }
    found = [name for name, is_there in obstacles.items() if is_there]
    if plan_options.plan == "auto":
        return bool(mask.rule.tables) and not found
    if found:
        raise UnsupportedStrategy(
            site=site,
            expected="an attention whose plan can be made at run time",
            got=", ".join(found),
            remedy="use options={'plan': 'auto'}, which plans this one when it is compiled",
        )
    return True


@dataclass(frozen=True, slots=True)
class _Call:
    """What a site's call says, whichever function it is of.

    Attributes:
        tensors: query, key and value.
        dtype: in which it computes.
        scale: of the scores; None is 1 / sqrt(D).
        dropout_p: probability with which a probability is dropped.
        mask: attn_mask of SDPA.
        is_causal: of SDPA.
        flex: the call of flex_attention, if it is one.
    """

    tensors: tuple[fx.Node, fx.Node, fx.Node]
    dtype: torch.dtype
    scale: float | None
    dropout_p: float = 0.0
    mask: fx.Node | None = None
    is_causal: bool = False
    flex: FlexCall | None = None

    @staticmethod
    def of(node: fx.Node, site: str) -> _Call:
        example = node.meta["example_value"]
        if node.target is FLEX:
            flex = bind_flex(node, site)
            tensors = (flex.query, flex.key, flex.value)
            return _Call(tensors, example[OUT].dtype, flex.scale, flex=flex)
        call = _bind(node, site)
        tensors = (call["query"], call["key"], call["value"])
        how = (float(call["dropout_p"]), call["attn_mask"], call["is_causal"])
        return _Call(tensors, example.dtype, call["scale"], *how)


def _switches_at(node: fx.Node, calls: Calls) -> AbstractContextManager[None]:
    """Enable the kernels that the innermost `sdpa_kernel` around a node enables."""
    backends = sdpa_backends_at(node)
    while backends is None and node.graph in calls:
        node = calls[node.graph]
        backends = sdpa_backends_at(node)
    return nullcontext() if backends is None else sdpa_kernel(backends)


def _read_mask(
    call: _Call,
    numbers: Mapping[Symbol, int],
    query: Tensor,
    axis: SequenceAxis,
    site: str,
    masks: _Masks,
) -> Recognized:
    if call.mask is None:
        return Recognized(Rule(CAUSAL if call.is_causal else FULL))
    mask = call.mask.meta["example_value"]
    if call.is_causal:
        refuse_both_masks(site, mask)
    if not 2 <= mask.ndim <= 4:
        raise UnsupportedAttention(
            site=site,
            expected="an attn_mask of 2 to 4 dims",
            got=f"one of {mask.ndim} dims",
            remedy="broadcast it to (batch, heads, S, T)",
        )
    if isinstance(query, DTensor) and any(
        isinstance(placement, Shard) and placement.dim == SEQUENCE_DIM
        for placement in query.placements
    ):
        recognized = masks.read(call.mask, numbers)
        if not recognized.rule.bias or query.dtype != call.dtype:  # autocast would round it
            return recognized
        # SDPA adds it as it is; in bfloat16, ALiBi of distant keys would be far off.
        is_wide = mask.dtype.itemsize > call.dtype.itemsize
        return replace(recognized, rule=replace(recognized.rule, is_wide=is_wide))
    # Indices in a local shard are not those of the sequence; nor in DTensors of which only the
    # named mesh says that their sequence is sharded.
    raise UnsupportedAttention(
        site=site,
        expected=f"attn_mask=None over plain shards on {axis.name}",
        got=f"an attn_mask of shape {tuple(mask.shape)}",
        remedy="use is_causal=True, or pass DTensors: their masks are understood",
    )


def _check_tables_of_shards(mask: Recognized, site: str) -> None:
    """Refuse tensors of which a rank would have to take its part, over plain shards."""
    for node, indices in zip(mask.tables, mask.indices, strict=True):
        is_distributed = isinstance(node.meta["example_value"], DTensor)
        if is_distributed or is_of_pairs(indices):
            raise UnsupportedAttention(
                site=site,
                expected="plain tensors, the same on every rank, captured over plain shards",
                got=f"{node.name}, {'a DTensor' if is_distributed else 'a tensor of pairs'}",
                remedy="pass DTensors, or compute what it holds from indices",
            )


def _check_heads_and_batch(mask: Recognized, query: Tensor, axis: SequenceAxis, site: str) -> None:
    """Refuse a mask that computes with head or batch indices, if those dims are sharded as well."""
    if not isinstance(query, DTensor):
        return
    sharded = {p.dim for p in query.placements if isinstance(p, Shard)}
    symbols = {symbol for dim, symbol in ((0, BATCH), (1, HEAD)) if dim in sharded}
    if symbols & mask.rule.computed_with:
        raise UnsupportedAttention(
            site=site,
            expected="a mask that does not use the index of a head or batch entry",
            got=f"{mask.rule.format()}, and a query with {query.placements}",
            remedy="shard only the sequence, or read values that depend on the head from a tensor",
        )


def _bind(node: fx.Node, site: str) -> dict[str, Any]:
    """Bind the arguments of an SDPA call; raise if one that shapes the plan is not a constant."""
    # The builtin has no signature; the aten op that it dispatches to has a schema.
    op = torch.ops.aten.scaled_dot_product_attention.default
    bound = bind_arguments(op, node.args, node.kwargs)
    for name in ("dropout_p", "is_causal", "scale", "enable_gqa"):
        if isinstance(bound[name], fx.Node):
            # With dynamic=True, Dynamo makes symbols of Python's numbers.
            bound[name] = as_number(bound[name].meta["example_value"])
        if isinstance(bound[name], Tensor):
            raise UnsupportedAttention(
                site=site,
                expected=f"a constant {name}",
                got="a value computed in the graph",
                remedy=f"pass {name} as a Python number",
            )
    return bound
