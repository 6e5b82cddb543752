"""Name what went wrong where Dynamo fails to trace a model, before it calls a backend.

    embedding(arange(...), DTensor)    torch: "got mixed torch.Tensor and DTensor"
      => UnsupportedPlacement: embedding (model.py:12): expected DTensors, got a plain tensor ...;
         call the compiled model within implicit_replication()

Dynamo runs every call on fake tensors. A call that fails there never reaches a graph pass, and
torch's error lists the call and its tensors, but neither the way out nor what was expected. For the
mistakes that this library invites, this module finds the call and says both. All other errors are
left as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from cp_inductor.dtensor.axis import is_sequence_sharded
from cp_inductor.dtensor.limits import (
    UNENDING,
    check_attention,
    refuse_both_masks,
    refuse_empty,
    refuse_plain_ids,
    refuse_transform,
)
from cp_inductor.errors import CPError, UnsupportedAttention, UnsupportedPlacement
from cp_inductor.graph.nodes import source_line
from cp_inductor.modules.parallelize import options_of
from cp_inductor.passes.attentions import SDPA
from cp_inductor.region.regions import groups_of_program
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.dynamo import as_backend_error, has_failed_to_run, last_call
from cp_inductor.torch_private.leaned_on import (
    BOTH_MASKS,
    BROADCAST,
    GUARD_ON_DATA,
    INPUT_NOT_FAKED,
    MIXED,
    SIZE_LOST,
    TRANSFORMED,
    UNTRACKED,
)
from cp_inductor.torch_private.modes import is_transformed, name_of_function
from cp_inductor.torch_private.traces import traces
from cp_inductor.trust.agreement import tell_refusal

OF_WEIGHT = "call cp_inductor.parallelize(model, mesh) first, which reads weights as DTensors"
IMPLICITLY = (
    "call the compiled model within torch.distributed.tensor.experimental.implicit_replication(),"
    " if it is the same on every rank, as positions are that the model makes itself"
)
OF_INPUT = f"pass it as a DTensor; or {IMPLICITLY}"


def trace_for(*backends: Callable[..., Any], is_run: bool = True) -> None:
    """Have Dynamo trace for these backends of torch.compile as they need it, and name failures.

    Args:
        backends: functions.
        is_run: what they return is run, so that other ranks may wait for it.
    """
    for backend in backends:
        traces.watch(backend, _name, _tell if is_run else None)


@contextmanager
def errors_unwrapped(gm: fx.GraphModule | None = None) -> Iterator[None]:
    """Let users catch our errors by their own classes, because Dynamo wraps other errors.

    Args:
        gm: the graph that is compiled inside. What AOTAutograd refuses of its sizes is named.
    """
    try:
        yield
    except CPError as error:
        raise as_backend_error(error) from None
    except RuntimeError as error:
        if gm is None or UNTRACKED not in str(error):
            raise
        for node in gm.graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, DTensor) and has_free_unbacked_symbols(value):
                with errors_unwrapped():
                    _check_sizes(node, f"{node.name} ({source_line(node)})")
        raise


def _tell(error: Exception, frame: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Let the ranks that share a sequence know that this one has no graph for what they may run."""
    named = options.get("mesh"), getattr(options_of(frame.get("self")), "mesh", None)
    meshes = [mesh for mesh in named if isinstance(mesh, DeviceMesh) and mesh.get_coordinate()]
    with suppress(RuntimeError, KeyError, ValueError):  # a group is gone
        names = set(groups_of_program())
        names.update(str(mesh.get_group(0).group_name) for mesh in meshes)
        for leaf in pytree.tree_leaves(dict(frame)):
            if isinstance(leaf, DTensor) and leaf.device_mesh.get_coordinate() is not None:
                axes = [i for i, p in enumerate(leaf.placements) if isinstance(p, Shard) and p.dim]
                names.update(str(leaf.device_mesh.get_group(axis).group_name) for axis in axes)
        for name in names:
            tell_refusal(name, error)


def _name(error: Exception) -> Exception | None:
    if isinstance(error, CPError):  # raised by what Dynamo called while it traced
        return as_backend_error(error)
    if has_failed_to_run(error):
        try:
            _refuse(last_call(error), str(error))
        except CPError as named:
            return as_backend_error(named, instead_of=error)
    return None


def _refuse(node: fx.Node | None, text: str) -> None:
    """Raise the error that says what was wrong with a call; none if that is not known."""
    if INPUT_NOT_FAKED in text:
        raise UnsupportedPlacement(
            site="a compiled model",
            expected="plain gradients of plain parameters",
            got="a plain parameter whose gradient is a DTensor, as eager code leaves it that"
            " computes with DTensors and plain weights",
            remedy="call cp_inductor.parallelize(model, mesh) before, which leaves gradients plain,"
            " or set the gradients to None (optimizer.zero_grad())",
        )
    if node is None or node.op not in ("call_function", "call_method"):
        return
    site = f"{name_of_function(node.target)} ({source_line(node)})"
    if GUARD_ON_DATA in text or SIZE_LOST in text:
        _check_sizes(node, f"{site}, or the op behind it")
    tensors = _tensors(node)
    for tensor in tensors.values():
        if isinstance(tensor, DTensor) and UNENDING in text and 0 in tensor.shape:
            refuse_empty(site, tensor)
    if node.target in SDPA:
        _check_sdpa(node, site, text)
    if TRANSFORMED in text and any(map(is_transformed, tensors.values())):
        refuse_transform(site)
    _check_write(node, site)
    if BROADCAST in text:
        _check_parts(node, site)
    if MIXED not in text:
        return
    plain = {read: value for read, value in tensors.items() if not isinstance(value, DTensor)}
    inputs = {source: value for source, value in plain.items() if source.op == "placeholder"}
    weights = [value for value in inputs.values() if isinstance(value, nn.Parameter)]
    if node.target is F.embedding and not weights:
        for ids in inputs.values():
            refuse_plain_ids(site, ids)
    names = [f"{source.name} of shape {tuple(value.shape)}" for source, value in plain.items()]
    raise UnsupportedPlacement(
        site=site,
        expected="DTensors alone, or plain tensors that torch may take for replicated",
        got=f"DTensors and {' and '.join(names) or 'a plain tensor'}",
        remedy=OF_WEIGHT if weights else OF_INPUT if inputs else IMPLICITLY,
    )


def _check_parts(node: fx.Node, site: str) -> None:
    """Refuse a tensor of this rank's tokens beside one of all tokens, as positions or a mask."""
    tensors = _tensors(node)
    shards = [value for value in tensors.values() if isinstance(value, DTensor)]
    for whole, place in ((read, place) for read in shards for place in read.placements):
        if not isinstance(place, Shard) or place.dim == 0:
            continue
        here, count = whole.to_local().shape[place.dim], whole.shape[place.dim]
        for source, part in tensors.items():
            # The keys of a mask are in its last dim.
            is_mask = node.target in SDPA and not is_sequence_sharded(part)
            sizes = [*part.shape[place.dim - whole.ndim :][:1], *part.shape[-1:] * is_mask]
            if here != count and here in sizes:
                raise UnsupportedPlacement(
                    site=site,
                    expected=f"positions, masks and the like of all {count} tokens, beside a"
                    f" DTensor that shards them, of which this rank has {here}",
                    got=f"{source.name} of shape {tuple(part.shape)}",
                    remedy="give the model the whole tensor, as distribute_tensor(whole, mesh,"
                    f" [Shard(dim)]), or plain, the same on every rank; not {here} of its tokens",
                )


def _check_sizes(node: fx.Node, site: str) -> None:
    """Refuse sizes that data decides where ops over DTensors must know them."""
    values = (other.meta.get("example_value") for other in node.graph.nodes)
    if any(isinstance(value, DTensor) for value in values):
        raise UnsupportedPlacement(
            site=site,
            expected="sizes of DTensors that are known when a graph is traced",
            got="a size that depends on data, such as how many tokens a mask has chosen",
            remedy="keep sizes, by torch.where, masked_fill or index_add_; or compute this part"
            " outside of the compiled function, because eager code over DTensors reads sizes from"
            " data",
        )


def _check_write(node: fx.Node, site: str) -> None:
    """Refuse to write a DTensor into a plain tensor, as caches do that are allocated ahead."""
    name = name_of_function(node.target)
    written = _value(node.args[0]) if node.args else None
    is_write = node.target is operator.setitem or (
        node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    )
    if not is_write or not isinstance(written, Tensor) or isinstance(written, DTensor):
        return
    if any(isinstance(tensor, DTensor) for tensor in _tensors(node).values()):
        raise UnsupportedPlacement(
            site=site,
            expected="a DTensor to write a DTensor into",
            got=f"a plain tensor of shape {tuple(written.shape)}, as of a cache that is allocated"
            " ahead",
            remedy="use a cache that grows (transformers' DynamicCache, its default), or none"
            " (use_cache=False)",
        )


def _check_sdpa(node: fx.Node, site: str, text: str) -> None:
    """Refuse what SDPA cannot do over a sharded sequence before a graph pass sees it."""
    op = torch.ops.aten.scaled_dot_product_attention.default
    call = bind_arguments(op, node.args, node.kwargs)
    sides = [_value(call[side]) for side in ("query", "key", "value")]
    if not all(isinstance(side, Tensor) for side in sides):
        return
    query, key, value = sides
    if BOTH_MASKS in text:
        refuse_both_masks(site, _value(call["attn_mask"]))
    if MIXED not in text or not any(map(is_sequence_sharded, sides)):
        return
    check_attention(query=query, key=key, site=site)
    check_attention(query=query, key=value, site=site)
    if call["dropout_p"]:
        raise UnsupportedAttention(
            site=site,
            expected="dropout within torch.distributed.tensor.experimental.implicit_replication()",
            got=f"dropout_p={call['dropout_p']} outside of it, where torch cannot trace dropout"
            " over DTensors",
            remedy="call the compiled model within implicit_replication(), or set dropout_p to 0",
        )


def _value(argument: object) -> Any:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else argument


def _tensors(node: fx.Node) -> dict[fx.Node, Tensor]:
    """Return the tensors that a call reads."""
    values = {source: source.meta.get("example_value") for source in node.all_input_nodes}
    return {source: value for source, value in values.items() if isinstance(value, Tensor)}
