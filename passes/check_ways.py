"""Refuse ways of compiling that lose exchanges. Changes nothing.

compile_on_one_rank                     the graphs of ranks differ
torch.compiler.nested_compile_region    once it was called, Dynamo takes DTensors for plain tensors
aot_compile                             what is saved does not say of which rank it is

Assumes: a graph from Dynamo, whose nodes carry `example_value`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from cp_inductor.errors import CPError, InvalidArgument
from cp_inductor.graph.nodes import name_of
from cp_inductor.torch_private.dynamo import is_compiled_ahead, is_compiled_for_all_ranks
from cp_inductor.torch_private.tracing import INVOKE_SUBGRAPH


def check_ways(gm: fx.GraphModule) -> None:
    """Check how a graph is compiled.

    Raises:
        CPError: in a way that loses its exchanges.
    """
    if not dist.is_initialized():
        return
    if is_compiled_for_all_ranks():
        raise _refused(
            "a graph that each rank compiles for itself",
            "compile_on_one_rank, which gives all ranks one graph",
            "unset TORCH_COMPILE_ON_ONE_RANK and TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK",
        )
    if is_compiled_ahead():
        raise _refused(
            "a graph that runs where it is compiled",
            "aot_compile, which saves it without its rank and mesh",
            "call the compiled model: Inductor's cache keeps what it compiles",
        )
    for node in gm.graph.find_nodes(op="call_function", target=INVOKE_SUBGRAPH):
        values = [argument.meta.get("example_value") for argument in node.all_input_nodes]
        if any(isinstance(value, DTensor) for value in values):
            raise _refused(
                "plain tensors in a nested_compile_region",
                "DTensors, which torch (2.13 to 2.15) does not trace there",
                "call it without nested_compile_region",
                site=name_of(node),
            )


def _refused(expected: str, got: str, remedy: str, site: str = "torch.compile") -> CPError:
    return InvalidArgument(site=site, expected=expected, got=got, remedy=remedy)
