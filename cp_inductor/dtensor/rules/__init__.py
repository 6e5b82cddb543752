"""What DTensor does with ops that it has no rule for, or a wrong one: a file for each family.

attention           attention over a sharded sequence
in_parts            draws, what accumulates, and others that ranks can compute in parts
on_whole            all other ops without a rule, on all tokens
partials            losses and other numbers of which each rank would hold a part
writes              writes in place that DTensor would lose

All are registered here. Where no sequences lie (`dtensor/axis.py`), losses, numbers and draws stay
DTensor's own. Programs that do not use the library keep all of its rules.
"""

from functools import cache, partial

import torch
from torch.distributed.tensor.experimental import register_sharding

from cp_inductor.dtensor.rules import attention, in_parts, on_whole, partials, writes
from cp_inductor.torch_private.arguments import ops_that_write
from cp_inductor.torch_private.dispatch import on_failed_sharding
from cp_inductor.torch_private.dtensor import (
    dispatch_as_dtensor,
    dtensor_handler,
    flex_attention_op,
    follow_memory,
    ops_that_draw,
    register_dtensor_handler,
    varlen_op,
)
from cp_inductor.torch_private.first_dtensor import BACKWARD_OPS, FORWARD_OPS

aten = torch.ops.aten


@cache
def register_rules() -> None:
    """Register all, once, when the library is first used over DTensors.

    That is when a backend is loaded, a model parallelized, a tensor sharded, or an attention met.
    Handlers of attention of torch's context parallelism stay while its dispatcher is on (on CUDA).
    """
    on_failed_sharding(
        on_whole.run_on_whole, on_whole.is_misjudged, partials.makes_parts, partials.compute_whole
    )
    follow_memory(partials.whole_of_sequence)
    for op in in_parts.ALONE:
        register_sharding(op)(partial(in_parts.places, len(op._schema.returns)))
    views = dict.fromkeys((*writes.VIEWS, *writes.RESHAPES), writes.view)
    for op, handler in (views | dict.fromkeys(ops_that_write(), writes.write)).items():
        if dtensor_handler(op) is dispatch_as_dtensor:
            register_dtensor_handler(op, handler)
    table = {
        attention.handle_forward: FORWARD_OPS,
        attention.handle_backward: BACKWARD_OPS,
        attention.handle_flex: (flex_attention_op(),),
        attention.handle_varlen: filter(None, [varlen_op()]),
        partials.compute_loss: partials.COMPUTED,
        in_parts.accumulate: in_parts.ACCUMULATED,
        in_parts.concatenate: (aten.cat.default,),
        lambda op, args, kwargs: on_whole.EQUALS[op](*args, **kwargs): on_whole.EQUALS,
        on_whole.view_as_strided: (aten.as_strided.default,),
        on_whole.run_if_right: on_whole.HANDLED,
        partials.read_item: (aten._local_scalar_dense.default,),
        in_parts.draw: (*in_parts.OF_VALUES, *in_parts.FILLS, *ops_that_draw()),
    }
    for handler, ops in table.items():
        for op in ops:
            register_dtensor_handler(op, handler, is_loss=handler is partials.compute_loss)
