"""What a rank says of an attention that it is about to run, of tables, and of a compiled graph.

    describe_attention(Planned(attention, float32, (1, 128, 128), "sdpa_0 (model.py:41)"))
      =>  Entry(fields: mask = causal, num_heads = 8, ..., queries = 128 on each rank, ...)

Two ranks run the same attention if all fields are equal.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cp_inductor.graph.collectives import Collective
from cp_inductor.graph.nodes import graphs_of
from cp_inductor.kept import lru_cache
from cp_inductor.mask.language import is_of_pairs
from cp_inductor.plan import Recipe, forward_plan
from cp_inductor.plan.grid import shard_lengths
from cp_inductor.run.attention import Attention
from cp_inductor.source import source_hash
from cp_inductor.torch_private.dynamo import graph_inputs, is_argument
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.modes import without_modes
from cp_inductor.torch_private.tracing import tensors_in
from cp_inductor.trust.record import NUM_DIGITS, Entry, digest

UNKNOWN = "not known before the graph runs"

# How many are kept: more attentions than a model has, at several lengths each.
NUM_KEPT = 1024

# This many elements of a tensor that is drawn are compared: seeds that differ show in the first.
MOST_OF_DRAW = 1 << 14

# What follows from the other fields.
PLANNED = ("plan", "stages", "chunks", "strategy", "late")

# What a claim says in other words, or what differs between ranks.
SAID_APART = {
    *("rule", "query_length", "key_length", "itemsize"),
    *("source", "rank", "world_size", "group_name"),
}


@dataclass(frozen=True, slots=True)
class Planned:
    """An attention that is about to run, or is in a graph that is being compiled."""

    attention: Attention  # what it is
    dtype: torch.dtype  # of its tensors
    # Batch entries, queries and keys that this rank really holds; some may depend on the inputs of
    # a graph, None for what only the graph knows, while it runs. If the batch decides the plan,
    # before the last two the queries and keys of the whole sequence.
    sizes: tuple[Any, ...]
    site: str  # for people
    heads: tuple[int, ...] = ()  # H, G and D, if the batch decides the plan


@lru_cache(maxsize=NUM_KEPT)
def describe_attention(planned: Planned, *, has_grad: bool | None) -> Entry:
    """Return the event that an attention is run, with sizes as numbers.

    Whether gradients are on may be None, where nobody knows it.
    """
    attention, source = planned.attention, planned.attention.source
    batch, *lengths = planned.sizes
    heads = zip(("num_heads", "num_kv_heads", "head_dim"), map(str, planned.heads), strict=False)
    said = {
        "what": "an attention planned once per batch" if attention.is_per_batch else "an attention",
        "mask": source.rule,
        "dtype": str(planned.dtype).removeprefix("torch."),
        **_values_of(attention),
        **_values_of(source),
        **dict(heads),
        "batch entries": UNKNOWN if batch is None else str(batch),
        "torch": str(torch.__version__),
        "source of cp_inductor": source_hash()[:NUM_DIGITS],
    }
    if isinstance(source, Recipe):
        said["plan"] = digest(forward_plan(source).stages)
        lengths = [source.query_length, source.key_length, *lengths]
    for name, length, held in zip(("queries", "keys"), lengths[:2], lengths[2:], strict=True):
        said[name] = _describe_tokens(attention, length, held)
    if has_grad is not None:
        said["gradients"] = "on" if has_grad else "off"
    kind = f"{kind_of(attention, planned.dtype)} {has_grad}"
    return Entry(planned.site, said, PLANNED, kind=kind)


def _values_of(options: Any) -> dict[str, str]:
    """Return what an attention, or the source of its plan, says of itself, by name."""
    named = {field.name: getattr(options, field.name) for field in fields(options)}
    return {n: str(value) or "none" for n, value in named.items() if n not in SAID_APART}


def _describe_tokens(attention: Attention, length: Any, held: Any) -> str:
    """Say how many tokens a sequence has, and how many this rank has if they are not its part."""
    is_recipe, group = isinstance(attention.source, Recipe), attention.group_name
    if length is None or (held is None and is_recipe):
        return UNKNOWN
    rank, world_size = dist.get_rank(group_of(group)), dist.get_world_size(group_of(group))
    if is_recipe and length % world_size == 0:
        # Whatever length the plan was made for: all ranks hold as many.
        return f"{held} on each rank"
    planned = shard_lengths(length, world_size)[rank]
    if held is None or held == planned:
        return f"{length} in all"
    return f"{held} where the plan of {length} has {planned}, at position {rank},"


def kind_of(attention: Attention, dtype: torch.dtype) -> str:
    """Say of what kind an attention is: all that tells it from others of a model but its sizes."""
    source, heads = attention.source, tuple[Any, ...]()
    if isinstance(source, Recipe):
        is_cross = source.query_length != source.key_length
        heads = (is_cross, source.num_heads, source.num_kv_heads, source.head_dim)
    # A mask may be written with lengths.
    rule = re.sub(r"\d+", "#", source.rule)
    return repr((rule, heads, dtype, *_values_of(attention).values()))


def tables_to_note(attention: Attention) -> list[int]:
    """Return which extras of an attention must be alike on all ranks.

    A table of queries and keys is not compared: a rank has the rows of its own queries.
    """
    if attention.is_per_batch:
        return []  # compared where the batch is planned
    places = sorted(place for place, at in attention.rule.tables.items() if not is_of_pairs(at))
    return places + [attention.num_extras - 1] * (attention.dropout_p > 0)


# --- Tables and draws ------------------------------------------------------------------------


def name_tables(tables: Sequence[Tensor], *, has_seed: bool = False) -> dict[str, Tensor]:
    """Return the tables of an attention by name, of which the last may be a seed of dropout."""
    names = [f"table {number}" for number in range(len(tables))]
    if has_seed:
        names[-1] = "dropout's seed"
    return dict(zip(names, tables, strict=True))


def is_captured(tensor: Tensor) -> bool:
    """Whether a graph of CUDA is captured, so that nobody can read a tensor."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def is_readable(value: Any) -> bool:
    """Whether the numbers of a plain tensor, and no parameter, can be read now."""
    is_plain = type(value) is Tensor and value.layout == torch.strided and not value.is_meta
    return is_plain and not is_captured(value)


def beginning_of(tensor: Tensor) -> Tensor:
    """Return the first elements along each dim, of which there are at most `MOST_OF_DRAW`."""
    room = MOST_OF_DRAW
    for dim in reversed(range(tensor.ndim)):
        tensor = tensor.narrow(dim, 0, min(room, tensor.shape[dim]))
        room = max(1, room // max(1, tensor.shape[dim]))
    return tensor


def describe_table(table: Tensor) -> str:
    """Say what a table holds: a number as it is, or a digest of all bits."""
    if table.ndim == 0:
        return str(table.detach().clone().item())
    shape = "x".join(map(str, table.shape))
    return f"{str(table.dtype).removeprefix('torch.')} of {shape}, digest {digest_of(table)},"


def digest_of(tensor: Tensor) -> str:
    """Return a digest of all bits of a tensor."""
    # To copy it waits for a collective that still has to bring it.
    copy = tensor.detach().clone(memory_format=torch.contiguous_format).cpu()
    return digest(copy.reshape(-1).view(torch.uint8).numpy().tobytes())


# --- Graphs --------------------------------------------------------------------------------

# So many tokens of a shard are compared, and a power of two: of 5 and of 4 tokens, 4.
MOST_TOKENS = 16


def describe_collectives(
    direction: str, started: Sequence[Collective], group_name: str
) -> dict[str, str]:
    """Say what a graph starts, in which order and how large, as far as all ranks know it alike."""
    # The names of other groups differ between ranks, and so may the sizes of what they reduce.
    own = [collective for collective in started if collective.group_name == group_name]
    order = [
        (collective.op, collective in own, dist.get_world_size(group_of(collective.group_name)))
        for collective in started
    ]
    counts = Counter(collective.op for collective in started).items()
    numbers = ", ".join(f"{count} {op}" for op, count in counts) or "none"
    said = {f"collectives of its {direction}": f"{numbers}, in order {digest(order)},"}
    sizes = [collective.shape for collective in own]
    # A rank that compiles alone may have sizes as symbols, and leaves this out.
    if None not in sizes:
        said[f"sizes of these in its {direction}"] = f"in order {digest(sizes)}"
    return said


def describe_beginnings(
    shards: Mapping[int, tuple[str, int]], args: Sequence[Any]
) -> dict[str, str]:
    """Return digests of what inputs begin with, by name, where each rank is to have its own.

    A batch that nobody has cut, and positions that each rank counts from 0, fit the graph as well
    as shards do, and make other numbers. Masks, and numbers that are all equal, tell nothing.
    """
    begins = {}
    # Regions, and modes of the user, are not to see what is read here.
    with torch._C.DisableTorchFunction(), without_modes(), torch.no_grad():
        for at, (name, dim) in shards.items():
            value = args[at]
            if is_readable(value) and value.dtype != torch.bool and value.numel():
                length = min(MOST_TOKENS, 1 << (value.shape[dim].bit_length() - 1))
                some = beginning_of(value.narrow(dim, 0, length))
                if bool((some != some.flatten()[0]).any()):
                    begins[name] = digest_of(some)
    return begins


def describe_program(gm: fx.GraphModule) -> dict[str, str]:
    """Return fields that must be equal on all ranks; none if ranks may run other programs.

        dropout(x, 0.1, True) * 2   =>   calls of dropout: 1 as 5be1, calls of mul: 1 as 03ac

    Over DTensors all ranks run one program. A rank that runs another one, such as a model in eval()
    among models in train(), or one whose weights are frozen, fits the attentions of the others, and
    computes other numbers, or waits for a backward in vain.

    The order of calls is left out: it may come from a set, whose order differs by process. So are
    whole numbers, and what is computed of sizes: one rank may have these as symbols, which bodies
    take. A graph that takes DTensors apart, or makes them of a rank's own tensors, is left out.

    Args:
        gm: from Dynamo, before any pass.
    """
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    shared = [value for value in values if isinstance(value, DTensor)]
    shared += _made_whole(gm).values()
    calls = defaultdict[str, list[str]](list)
    for node in (node for graph in graphs_of(gm) for node in graph.nodes):
        is_call = node.op in ("call_function", "call_method") and not _is_made_whole(node)
        if is_call and tensors_in(node.meta.get("example_value")):
            name = getattr(node.target, "__name__", type(node.target).__name__)
            name = node.target if isinstance(node.target, str) else name
            words = pytree.tree_map(_word, (node.args, node.kwargs))
            if isinstance(node.target, torch._ops.HigherOrderOperator):  # which has a body
                words = [word for word in pytree.tree_leaves(words) if word != "."]
            calls[name].append(repr(words))
    # What these return, or take, is each rank's own.
    if not shared or any("to_local" in name or "from_local" in name for name in calls):
        return {}
    fields = {"inputs that require gradients": str(sum(value.requires_grad for value in shared))}
    for name, words in sorted(calls.items()):
        fields[f"calls of {name}"] = f"{len(words)} as {digest(sorted(words))}"
    needed = [f"{value.ndim} {value.dtype} {value.requires_grad}" for value in shared]
    # A field that a rank leaves out is not compared, but this one is.
    return fields | {"program": digest([*needed, *fields])}


def batches_of(gm: fx.GraphModule) -> dict[int, str]:
    """Return which arguments every rank has whole, if plain, by place: the name of the group.

    Args:
        gm: from Dynamo. If it makes DTensors of plain inputs, all are whole.
    """
    made = next(iter(_made_whole(gm).values()), None)
    if made is None:
        return {}
    name = str(made.device_mesh.get_group(0).group_name)
    arguments = {node for node, source, _ in graph_inputs(gm.graph) if is_argument(source)}
    inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {place: name for place, node in inputs if node in arguments}


def _made_whole(gm: fx.GraphModule) -> dict[fx.Node, DTensor]:
    """Return the plain inputs that are whole on every rank, and the DTensors made of them."""
    made = (node for node in gm.graph.nodes if _is_made_whole(node))
    values = {node.args[0]: node.meta["example_value"] for node in made}
    return {node: value for node, value in values.items() if node.op == "placeholder"}


def _is_made_whole(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target != DTensor.from_local:
        return False
    made: DTensor = node.meta["example_value"]
    return all(place.is_replicate() for place in made.placements)


def _word(argument: Any) -> str:
    """Write a flag or fraction that a call is given; of the rest only that it is there."""
    if isinstance(argument, str):
        return argument.partition(":")[0]  # "cuda:1" is the device of a rank
    if argument is None or isinstance(argument, (bool, float, torch.dtype)):
        return repr(argument)
    is_tensor = isinstance(argument, fx.Node) and tensors_in(argument.meta.get("example_value"))
    return "tensor" if is_tensor else "."
