"""Move a graph traced on CPU fakes to a GPU that need not exist.

    linear = aten.addmm(bias, x, w)             val: cpu
    mean = aten.native_layer_norm(x, ...)[1]    val: cpu, bfloat16
      =>
    linear = aten.addmm(bias, x, w)             val: cuda:0
    mean = ...                                  val: cuda:0, float32: decomposed as for a GPU

If torch was built without CUDA, autograd cannot run on fake GPU tensors. So AOTAutograd traces on
the CPU, without decompositions. Its joint graph is then traced again, on fake GPU tensors, with
Inductor's decompositions. They depend on the device, as do the shapes and dtypes of some results.
All later steps, from the partitioner on, see a graph on the GPU.

Assumes: runs as Inductor's custom pass before its other passes over the joint (or inference) graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table

from cp_inductor.errors import UnsupportedTarget
from cp_inductor.inspect.targets import Target
from cp_inductor.passes.nodes import insert_graph
from cp_inductor.tiles.kernel_table import choose_kernel, get_kernel
from cp_inductor.tiles.kernels import Partial, TileCall
from cp_inductor.torch_private.arguments import bind_arguments
from cp_inductor.torch_private.tracing import fake_on, retrace

CUDA = torch.device("cuda", 0)
# What SDPA computes an unsharded attention by on the CPU.
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Retarget(CustomGraphPass):
    """Replace a graph by its trace on fake tensors of a GPU, in place.

    Args:
        target: the GPU.
    """

    def __init__(self, target: Target) -> None:
        self.target = target

    def __call__(self, graph: fx.Graph) -> None:
        """Retarget a joint graph or an inference graph.

        Raises:
            UnsupportedTarget: the graph has subgraphs, or an unsharded attention with a mask or
                dropout.
        """
        gm = graph.owning_module
        assert gm is not None
        for node in graph.nodes:
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                raise UnsupportedTarget(
                    site=f"{node.name} in the graph from AOTAutograd",
                    expected="a graph without subgraphs, because it is traced again for the GPU",
                    got=str(node.target),
                    remedy="generate the code on a machine with a GPU, or use target='cpu'",
                )
        placeholders = graph.find_nodes(op="placeholder")
        for node in placeholders:
            node.meta["val"] = fake_on(node.meta["val"], CUDA)
        values = [node.meta["val"] for node in placeholders]
        traced = retrace(_OnGPU(gm, self.target).run, values, select_decomp_table())
        traced.graph.eliminate_dead_code()
        _adopt_constants(gm, traced)
        _replace(graph, traced)

    def uuid(self) -> object | None:
        """Return None, so that code for a pretended device is not cached."""
        return None


class _OnGPU(fx.Interpreter):
    """Runs a graph on fake GPU tensors, with the GPU's devices and attention kernels."""

    def __init__(self, gm: fx.GraphModule, target: Target) -> None:
        super().__init__(gm)
        self.target = target

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        # Move constants to the GPU, except scalars, which may be on the CPU in a GPU graph, too.
        if isinstance(value, Tensor) and value.ndim > 0:
            value = torch.ops.prims.device_put(value, CUDA)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.device, lambda device: CUDA if device.type == "cpu" else device, (args, kwargs)
        )
        if target not in (FLASH, FLASH_BACKWARD):
            return super().call_function(target, args, kwargs)
        kernel, tile, call = _bind(self.target, target, args, kwargs)
        if target is FLASH_BACKWARD:
            return kernel.backward(tile, call["grad_out"], Partial(call["out"], call["logsumexp"]))
        partial = kernel.forward(tile)
        return partial.out, partial.lse


def _bind(
    gpu: Target, op: torch._ops.OpOverload, args: Any, kwargs: Any
) -> tuple[Any, TileCall, dict[str, Any]]:
    """Return the kernel that SDPA chooses on the GPU, the call as a tile, and its arguments."""
    call = bind_arguments(op, args, kwargs)
    if call["attn_mask"] is not None or call["dropout_p"]:
        raise UnsupportedTarget(
            site=op.name(),
            expected="unsharded attention without a mask or dropout",
            got=f"dropout_p={call['dropout_p']} and"
            f" attn_mask={'a tensor' if call['attn_mask'] is not None else None}",
            remedy="generate the code on a machine with a GPU, or use target='cpu'",
        )
    query, key, value = call["query"], call["key"], call["value"]
    how: dict[str, Any] = {"dtype": query.dtype, "site": op.name(), "capability": gpu.capability}
    kernel = get_kernel(choose_kernel(query, key, value, **how)[0])
    return kernel, TileCall(query, key, value, call["is_causal"], call["scale"]), call


def _replace(graph: fx.Graph, traced: fx.GraphModule) -> None:
    """Replace the nodes between a graph's placeholders and its output by those of another graph."""
    output = graph.output_node()
    old = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    results, _ = insert_graph(traced, graph.find_nodes(op="placeholder"), before=output)
    structure = pytree.tree_structure(output.args[0])
    output.args = (pytree.tree_unflatten(pytree.tree_leaves(results), structure),)
    for node in reversed(old):
        graph.erase_node(node)
    graph.lint()


def _adopt_constants(gm: fx.GraphModule, traced: fx.GraphModule) -> None:
    for node in traced.graph.find_nodes(op="get_attr"):
        name = f"_retargeted{node.target}"
        setattr(gm, name, getattr(traced, node.target))
        node.target = name
