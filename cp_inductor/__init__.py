"""Compile long-context attention over a sharded sequence.

model = torch.compile(model, backend="cp_inductor", fullgraph=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cp_inductor import config
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
from cp_inductor.imported import when_imported
from cp_inductor.kept import reset
from cp_inductor.torch_private.first_dtensor import attend_with

if TYPE_CHECKING:
    from cp_inductor.batches.plans import batch_plans, prepared
    from cp_inductor.dtensor.packed import balanced, loss_weight, pad_packed
    from cp_inductor.dtensor.shard import shard, unshard
    from cp_inductor.inspect.calibrate import calibrate
    from cp_inductor.inspect.cross_compile import CrossCompiled, cross_compile
    from cp_inductor.inspect.estimate import Estimate, estimate
    from cp_inductor.inspect.explain import Report, explain
    from cp_inductor.modules.along_sequence import pass_states, tokens_before
    from cp_inductor.modules.parallelize import ParallelizeSequence, parallelize
    from cp_inductor.modules.recurrences import register_recurrence
    from cp_inductor.plan import Device, Level, Machine, Plan, plan_attention
    from cp_inductor.plan.batch import BatchPlan
    from cp_inductor.region.context import (
        ContextParallel,
        context_parallel,
        context_parallel_unshard,
    )
    from cp_inductor.region.modes import local_attention, per_rank
    from cp_inductor.region.reduce_gradients import reduce_gradients
    from cp_inductor.torch_private.flex import flex_gradients_on_cpu

# Errors.
__all__ = ["CPError", "ExchangeFailed", "InvalidArgument", "InvalidText", "MissingTriton"]
__all__ += ["ModifiedInPlace", "ProcessGroupError", "RanksDisagree", "SequenceMixed"]
__all__ += ["SequenceWarning", "UnevenSequence", "UnsupportedAttention", "UnsupportedBuffer"]
__all__ += ["UnsupportedKernel", "UnsupportedPlacement", "UnsupportedStrategy"]
__all__ += ["UnsupportedTarget", "UnsupportedWrite", "UntiedWeights"]
# Models and their inputs.
__all__ += ["ParallelizeSequence", "balanced", "loss_weight", "pad_packed", "parallelize"]
__all__ += ["pass_states", "register_recurrence", "shard", "tokens_before", "unshard"]
# Regions.
__all__ += ["ContextParallel", "context_parallel", "context_parallel_unshard"]
__all__ += ["flex_gradients_on_cpu", "local_attention", "per_rank", "reduce_gradients"]
# Plans, what they cost and what becomes of them.
__all__ += ["BatchPlan", "Device", "Level", "Machine", "Plan", "batch_plans", "plan_attention"]
__all__ += ["CrossCompiled", "Estimate", "Report", "cross_compile", "estimate", "explain"]
__all__ += ["calibrate", "config", "prepared", "reset"]

__version__ = "0.3.0"

# Names are imported when they are first asked for, so that `import cp_inductor` takes no longer
# than torch.
_HOMES = {
    "batches.plans": "batch_plans prepared",
    "dtensor.packed": "balanced loss_weight pad_packed",
    "dtensor.shard": "shard unshard",
    "inspect.calibrate": "calibrate",
    "inspect.cross_compile": "CrossCompiled cross_compile",
    "inspect.estimate": "Estimate estimate",
    "inspect.explain": "Report explain",
    "modules.along_sequence": "pass_states tokens_before",
    "modules.parallelize": "ParallelizeSequence parallelize",
    "modules.recurrences": "register_recurrence",
    "plan": "Device Level Machine Plan plan_attention",
    "plan.batch": "BatchPlan",
    "region.context": "ContextParallel context_parallel context_parallel_unshard",
    "region.modes": "local_attention per_rank",
    "region.reduce_gradients": "reduce_gradients",
    "torch_private.flex": "flex_gradients_on_cpu",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    attribute = getattr(import_module(f"cp_inductor.{_HOME_OF[name]}"), name)
    globals()[name] = attribute
    return attribute


def __dir__() -> list[str]:
    """List the names that are not imported yet as well."""
    return sorted({*globals(), *__all__})


config.check_by(lambda *flag: import_module("cp_inductor.flags").check_flag(*flag))
if config.names_of_environment():
    import_module("cp_inductor.flags")
attend_with(lambda: import_module("cp_inductor.dtensor.rules").register_rules())
when_imported(
    {"accelerate.parallelism_config"},
    lambda: import_module("cp_inductor.integrations.by_name").register_when_named(),
)
when_imported(
    {"cp_inductor.modules.model"},
    lambda: import_module("cp_inductor.integrations.transformers_models"),
)
