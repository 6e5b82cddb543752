"""Have DTensor call this library for attention, although its rules are imported when needed.

    import cp_inductor                neither DTensor nor the rules of attention are imported
    import torch.distributed.tensor   =>  DTensor's table has `_stand_in` for every op of attention
    attention over DTensors           =>  the first call imports the rules, which replace it

Importing DTensor and the rules takes longer than importing torch (2.13), and a program that plans,
or only shards plain tensors, needs neither. The other two modules register ops of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from cp_inductor.imported import when_imported

aten = torch.ops.aten

FORWARD_OPS = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
BACKWARD_OPS = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)

DTENSOR = "torch.distributed.tensor"
VARLEN = "torch.nn.attention.varlen"
FLEX = "torch.nn.attention.flex_attention"

_load: list[Callable[[], object]] = []


def attend_with(load: Callable[[], object]) -> None:
    """Call `load` when attention over DTensors is first computed; it registers the handlers."""
    _load.append(load)
    when_imported({DTENSOR, VARLEN, FLEX}, _register_stand_ins)


def _register_stand_ins() -> None:
    """Register stand-ins for the ops that there are by now, unless their rules are registered."""
    if DTENSOR not in sys.modules:
        return
    from cp_inductor.torch_private import dtensor

    ops: list[Any] = [*FORWARD_OPS, *BACKWARD_OPS]
    if VARLEN in sys.modules:
        ops += [op for op in [dtensor.varlen_op()] if op is not None]
    if FLEX in sys.modules:
        ops.append(dtensor.flex_attention_op())
    for op in ops:
        if dtensor.dtensor_handler(op) is dtensor.dispatch_as_dtensor:
            dtensor.register_dtensor_handler(op, _stand_in)


def _stand_in(op: Any, args: Any, kwargs: Any) -> Any:
    from cp_inductor.torch_private.dtensor import dtensor_handler

    _load[-1]()
    return dtensor_handler(op)(op, args, kwargs)
