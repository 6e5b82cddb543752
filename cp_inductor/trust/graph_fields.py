"""What a compiled graph says of itself: its program, what it starts, and what inputs begin with."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from cp_inductor.errors import SequenceWarning
from cp_inductor.graph.collectives import Collective
from cp_inductor.graph.nodes import graphs_of
from cp_inductor.torch_private.dynamo import graph_inputs, is_argument
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.modes import without_modes
from cp_inductor.trust.agreement import beginning_of, describe_table
from cp_inductor.trust.claims import digest
from cp_inductor.trust.record import Entry

# So many tokens of a shard are compared, and a power of two: of 5 and of 4 tokens, 4.
MOST_TOKENS = 16


def describe_collectives(
    direction: str, started: Sequence[Collective], group_name: str
) -> Iterator[tuple[str, str]]:
    """Say what a graph starts, in which order and how large, as far as all ranks know it alike."""
    # The names of other groups differ between ranks, and so may the sizes of what they reduce.
    own = [collective.group_name == group_name for collective in started]
    among = [dist.get_world_size(group_of(collective.group_name)) for collective in started]
    order = [(collective.op, *rest) for collective, *rest in zip(started, own, among, strict=True)]
    counts = Counter(collective.op for collective in started).items()
    numbers = ", ".join(f"{count} {op}" for op, count in counts) or "none"
    yield f"collectives of its {direction}", f"{numbers}, in order {digest(repr(order).encode())},"
    sizes = [collective.shape for collective, is_own in zip(started, own, strict=True) if is_own]
    # A rank that compiles alone may have sizes as symbols, and leaves this out.
    if None not in sizes:
        yield f"sizes of these in its {direction}", f"in order {digest(repr(sizes).encode())}"


def describe_beginnings(
    shards: Mapping[int, tuple[str, int]], args: Sequence[Any]
) -> dict[str, str]:
    """Return digests of what inputs begin with, by name, where each rank is to have its own.

    Nothing about a plain tensor says that it is a shard. A batch that nobody has cut, and positions
    that each rank counts from 0, fit the graph as well as shards do, and make other numbers. Masks
    of True and numbers that are all equal, such as padding, tell nothing and are left out.
    """
    # Regions, and modes of the user, are not to see what is read here.
    with torch._C.DisableTorchFunction(), without_modes(), torch.no_grad():
        texts = {name: _beginning(args[at], dim) for at, (name, dim) in shards.items()}
    return {name: text for name, text in texts.items() if text}


def _beginning(value: Any, dim: int) -> str:
    """Return a digest of a shard's first tokens; nothing if they tell nothing."""
    if type(value) is not Tensor or value.dtype == torch.bool or not value.numel():
        return ""
    if value.is_meta or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ""
    length = min(MOST_TOKENS, 1 << (value.shape[dim].bit_length() - 1))
    some = beginning_of(value.narrow(dim, 0, length))
    if some.numel() == 1 or bool((some == some.flatten()[0]).all()):
        return ""
    return digest(describe_table(some).encode())


def warn_of_alike(begins: Mapping[str, str], others: Sequence[Entry]) -> None:
    """Warn of inputs that begin alike on all ranks."""
    names = [n for n, own in begins.items() if all(other.begins.get(n) == own for other in others)]
    if not names:
        return
    begin = "input {} begins" if len(names) == 1 else "inputs {} begin"
    warnings.warn(
        f'options={{"mesh": ...}}: {begin.format(", ".join(names))} with the same numbers on all'
        f" {len(others) + 1} ranks. Each rank is to pass its own part of the sequence, as"
        " torch.chunk cuts it, and positions count from the start of the whole sequence. Where"
        " ranks really have the same tokens, filter this SequenceWarning",
        SequenceWarning,
        stacklevel=2,
    )


def describe_program(gm: fx.GraphModule) -> dict[str, str]:
    """Return fields that must be equal on all ranks; none if ranks may run other programs.

        dropout(x, 0.1, True) * 2   =>   calls of dropout: 1 as 5be1, calls of mul: 1 as 03ac

    Over DTensors all ranks run one program. A rank that runs another one, such as a model in eval()
    among models in train(), or one whose weights are frozen, fits the attentions of the others, and
    computes other numbers, or waits for a backward in vain.

    The order of calls is left out: it may come from a set, whose order differs by process. So are
    whole numbers, and what is computed of sizes: a rank that compiles alone may have sizes as
    symbols. A graph that takes DTensors apart, or makes them of a rank's own tensors, is left out.

    Args:
        gm: from Dynamo, before any pass.
    """
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    shared = [value for value in values if isinstance(value, DTensor)]
    shared += _made_whole(gm).values()
    lines = defaultdict[str, list[str]](list)
    for node in (node for graph in graphs_of(gm) for node in graph.nodes):
        if _is_made_whole(node):
            continue
        if node.op in ("call_function", "call_method") and _has_tensor(node):
            name = getattr(node.target, "__name__", type(node.target).__name__)
            name = node.target if isinstance(node.target, str) else name
            lines[name].append(_words((node.args, node.kwargs)))
    if not shared or any(own in name for name in lines for own in OF_A_RANK):
        return {}
    fields = {
        "inputs that require gradients": str(sum(value.requires_grad for value in shared)),
        **{f"calls of {n}": f"{len(lines[n])} as {_digest(lines[n])}" for n in sorted(lines)},
    }
    needed = [f"{value.ndim} {value.dtype} {value.requires_grad}" for value in shared]
    # A field that a rank leaves out is not compared, but this one is.
    return fields | {"program": _digest([*needed, *fields])}


def batches_of(gm: fx.GraphModule) -> dict[int, str]:
    """Return which arguments every rank has whole, if plain, by place: the name of the group.

    Args:
        gm: from Dynamo. If it makes DTensors of plain inputs, all are whole.
    """
    made = next(iter(_made_whole(gm).values()), None)
    if made is None:
        return {}
    name = str(made.device_mesh.get_group(0).group_name)
    given = {node for node, source, _ in graph_inputs(gm.graph) if is_argument(source)}
    inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
    return {place: name for place, node in inputs if node in given}


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


# What they return, or take, is each rank's own.
OF_A_RANK = ("to_local", "from_local")


def _digest(lines: Sequence[str]) -> str:
    return digest("\n".join(sorted(lines)).encode())


def _has_tensor(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return _has_tensor(value.meta.get("example_value"))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


def _words(value: Any) -> str:
    """Write the flags and fractions that a call is given; of the rest only that it is there."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_words, value))})"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key}={_words(item)}' for key, item in value.items())})"
    if isinstance(value, str):
        return value.partition(":")[0]  # "cuda:1" is the device of a rank
    if value is None or isinstance(value, (bool, float, torch.dtype)):
        return repr(value)
    return "tensor" if _has_tensor(value) else "."
