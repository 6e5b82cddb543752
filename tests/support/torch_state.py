"""What of torch, and of this library, a compile might change in a process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.callback import callback_handler
from torch._functorch import config as functorch_config
from torch._inductor import codecache, compile_fx, cpp_builder, ir, lowering, output_code
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental import proxy_tensor

import cp_inductor
from cp_inductor.torch_private.traces import traces


def state_of_torch() -> dict[str, Any]:
    """Return it by name; objects stand for themselves."""
    dispatcher = DTensor._op_dispatcher
    propagator = dispatcher.sharding_propagator
    return {
        "DTensor's handlers": dict(dispatcher._custom_op_handlers),
        "DTensor's strategies": dict(propagator.op_strategy_funcs),
        "DTensor's rules": dict(propagator.op_to_rules),
        "DTensor's propagator": sorted(vars(propagator)),
        "Inductor's config": inductor_config.get_config_copy(),
        "functorch's config": functorch_config.get_config_copy(),
        "Dynamo's config": torch._dynamo.config.get_config_copy(),
        "our config": cp_inductor.config.get_config_copy(),
        "lowerings": dict(lowering.lowerings),
        "constraints": dict(lowering._maybe_layout_constraints),
        "patched": [
            ir.StorageBox.__dict__["has_exceeded_max_reads"],
            ir.Loops.__dict__["has_large_inner_fn"],
            codecache.write,
            codecache.PyCodeCache.__dict__["load_by_key_path"],
            codecache.CppCodeCache.__dict__["_load_library"],
            output_code.CompiledFxGraph.__dict__["write_to_disk"],
            F.scaled_dot_product_attention,
            F.cross_entropy,
            Tensor.backward,
            proxy_tensor.set_proxy_slot,
            Shard.__dict__["_replicate_to_shard"],
            cpp_builder.CppBuilder,
            compile_fx.fx_codegen_and_compile,
            codecache.FxGraphCache.__dict__["load_with_key"],
        ],
        "callbacks": (list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)),
        "whether Dynamo traces for us": traces.is_ours,
    }
