"""Compile long-context attention over a sharded sequence.

model = torch.compile(model, backend="cp_inductor", fullgraph=True)
"""

from typing import TYPE_CHECKING, Any

from cp_inductor import config
from cp_inductor.batches.plans import batch_plans
from cp_inductor.batches.prepare import PreparingCollator, prepare, prepared
from cp_inductor.dtensor.pad import pad_packed
from cp_inductor.dtensor.rules.attention import register_dtensor_attention
from cp_inductor.dtensor.shard import shard, unshard
from cp_inductor.errors import (
    CPError,
    ExchangeFailed,
    InvalidArgument,
    InvalidText,
    MissingTriton,
    ModifiedInPlace,
    ProcessGroupError,
    RanksDisagree,
    SequenceMixed,
    SequenceWarning,
    UnevenSequence,
    UnsupportedAttention,
    UnsupportedBuffer,
    UnsupportedKernel,
    UnsupportedPlacement,
    UnsupportedStrategy,
    UnsupportedTarget,
    UnsupportedWrite,
    UntiedWeights,
)
from cp_inductor.integrations.kernel_libraries import register_kernel_libraries
from cp_inductor.integrations.transformers_models import TransformersModels
from cp_inductor.kept import reset
from cp_inductor.modules.along_sequence import pass_states, tokens_before
from cp_inductor.modules.distribute import distribute
from cp_inductor.modules.libraries import register_library
from cp_inductor.modules.recurrences import register_recurrence
from cp_inductor.plan import Device, Link, Plan, plan_attention
from cp_inductor.plan.batch import BatchPlan
from cp_inductor.region.context import context_parallel, context_parallel_unshard
from cp_inductor.region.local import local_attention, per_rank
from cp_inductor.region.reduce_gradients import reduce_gradients
from cp_inductor.region.style import ContextParallel
from cp_inductor.torch_private.flex import flex_gradients_on_cpu

if TYPE_CHECKING:
    from cp_inductor.inspect.cross_compile import CrossCompiled, cross_compile
    from cp_inductor.inspect.explain import Report, explain
    from cp_inductor.inspect.rehearsal.rehearse import Rehearsal, rehearse

__all__ = [
    "BatchPlan",
    "CPError",
    "ContextParallel",
    "CrossCompiled",
    "Device",
    "ExchangeFailed",
    "InvalidArgument",
    "InvalidText",
    "Link",
    "MissingTriton",
    "ModifiedInPlace",
    "Plan",
    "PreparingCollator",
    "ProcessGroupError",
    "RanksDisagree",
    "Rehearsal",
    "Report",
    "SequenceMixed",
    "SequenceWarning",
    "UnevenSequence",
    "UnsupportedAttention",
    "UnsupportedBuffer",
    "UnsupportedKernel",
    "UnsupportedPlacement",
    "UnsupportedStrategy",
    "UnsupportedTarget",
    "UnsupportedWrite",
    "UntiedWeights",
    "batch_plans",
    "config",
    "context_parallel",
    "context_parallel_unshard",
    "cross_compile",
    "distribute",
    "explain",
    "flex_gradients_on_cpu",
    "local_attention",
    "pad_packed",
    "pass_states",
    "per_rank",
    "plan_attention",
    "prepare",
    "prepared",
    "reduce_gradients",
    "register_recurrence",
    "rehearse",
    "reset",
    "shard",
    "tokens_before",
    "unshard",
]

register_dtensor_attention()
register_library(TransformersModels())
register_kernel_libraries()

# What inspects compiles imports Inductor, which training scripts import when they compile.
_INSPECT = {
    "CrossCompiled": "cross_compile",
    "cross_compile": "cross_compile",
    "Report": "explain",
    "explain": "explain",
    "Rehearsal": "rehearsal.rehearse",
    "rehearse": "rehearsal.rehearse",
}


def __getattr__(name: str) -> Any:
    """Import what inspects compiles when it is first asked for."""
    if name not in _INSPECT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"cp_inductor.inspect.{_INSPECT[name]}"), name)
