"""Every place at which torch does something else because of this package, and what ends it.

`python -m cp_inductor doctor` prints the table, docs/support.md has it, and a test finds each
function below torch_private/ and in inspect/pretend.py that changes torch without a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

IMPORTED = "from `import cp_inductor` on"
TRACED = "while Dynamo traces for our backends"
COMPILED = "while Inductor compiles a graph of ours"
INSPECTED = "within `explain`, `cross_compile` and `rehearse`"

NONE = "none found"


@dataclass(frozen=True, slots=True)
class Patch:
    """One change of torch.

    Attributes:
        by: our function, as module:name, below cp_inductor.
        what: the names of torch that are other objects meanwhile, without `torch.`.
        when: it is in place.
        why: it is needed.
        upstream: issue or pull request of pytorch/pytorch.
        until: what has to be true for it to go.
    """

    by: str
    what: str
    when: str
    why: str
    upstream: str
    until: str


PATCHES = (
    Patch(
        "torch_private.dtensor:register_dtensor_handler",
        "DTensor._op_dispatcher._custom_op_handlers",
        IMPORTED,
        "attention, dropout and losses over shards of the sequence are this library's",
        "https://github.com/pytorch/pytorch/issues/120333",
        "torch offers such a table to libraries",
    ),
    Patch(
        "torch_private.dtensor:register_loss_handler",
        "distributed.tensor.parallel.loss.customized_loss_ops",
        IMPORTED,
        "`loss_parallel` removes the handlers of losses when it is left, and would remove ours",
        NONE,
        "`loss_parallel` restores the handlers that it found",
    ),
    Patch(
        "torch_private.dtensor:without_handler",
        "DTensor._op_dispatcher._custom_op_handlers",
        "within one call of an op",
        "a handler of ours asks what DTensor itself would compute, its generator included",
        NONE,
        "a handler can call on",
    ),
    Patch(
        "torch_private.dtensor:register_dtensor_flex_attention",
        "ops.higher_order.flex_attention.python_key_table",
        IMPORTED,
        "DTensor has no rule for flex_attention over a sharded sequence",
        NONE,
        "torch has one, in whose presence ours is not added",
    ),
    Patch(
        "torch_private.dtensor:parts_taken_by",
        "distributed.tensor.placement_types.Shard._replicate_to_shard",
        "while AOTAutograd traces for our backends, if the batch decides all plans",
        "a constant of the rank would be in the graph, which is to be the same on all ranks",
        NONE,
        "DTensor can take the part by a rank that the graph reads",
    ),
    Patch(
        "torch_private.dispatch:on_failed_sharding",
        "DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path,"
        " ._dispatch_get_local_results_slow_path",
        IMPORTED,
        "an op without a rule, or with a wrong one, is computed on the whole; views of a part that"
        " lies otherwise than the whole are copied",
        NONE,
        "DTensor has rules for these ops",
    ),
    Patch(
        "torch_private.dispatch:_read_strided_shards_back",
        "DTensor.__tensor_unflatten__",
        IMPORTED,
        "AOTAutograd takes inputs and outputs apart that a linear layer has flattened, and fails to"
        " make them again",
        "https://github.com/pytorch/pytorch/pull/179208",
        "a supported release has that pull request, and no older one is supported",
    ),
    Patch(
        "torch_private.dispatch:_place_strided_shards_in_numbers",
        "distributed.tensor.placement_types._StridedShard.local_shard_size_and_offset",
        IMPORTED,
        "compilers take the places of a part for numbers that only data says",
        NONE,
        "it computes without a tensor",
    ),
    Patch(
        "torch_private.modes:let_modes_see",
        "_dynamo.variables.torch.get_overridable_functions()",
        "from the first region on",
        "Dynamo collects once which functions it calls modes for; within torch's"
        " `context_parallel`, which replaces SDPA, the set lacks it",
        NONE,
        "torch's `context_parallel` no longer replaces the function",
    ),
    Patch(
        "torch_private.traces:_wrap_once",
        "_dynamo.convert_frame._compile",
        "from the import of the backends on; other backends pass through",
        "Dynamo tells a backend of a function only after it has traced it",
        NONE,
        "Dynamo has a hook for a backend before it traces",
    ),
    Patch(
        "torch_private.symbolic_dtensor:SymbolicLengths.start",
        "DTensor._op_dispatcher._custom_op_handlers",
        TRACED,
        "DTensor's C++ dispatch takes no symbolic sizes of plain tensors, and gathers whole slices"
        " of a symbolic dim",
        NONE,
        "it takes both",
    ),
    Patch(
        "torch_private.symbolic_dtensor:first_symbols_kept",
        "fx.experimental.proxy_tensor.set_proxy_slot",
        "while AOTAutograd traces for our backends",
        "make_fx takes the last value that equals a symbol for it, which may be computed from it",
        NONE,
        "make_fx keeps the first",
    ),
    Patch(
        "torch_private.shardings:RememberedShardings.start",
        "DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached",
        TRACED,
        "with symbols DTensor chooses a sharding anew for each call, most of the time of a compile",
        NONE,
        "its cache takes symbols",
    ),
    Patch(
        "torch_private.sizes:forget_fakes",
        "_subclasses.fake_tensor.FakeTensorMode.cache_enabled",
        "in the fake mode of a compile whose lengths are symbols",
        "an entry of the cache costs more than the op, where sizes are symbols",
        NONE,
        "it does not",
    ),
    Patch(
        "torch_private.sizes:number_sizes_from",
        "fx.experimental.symbolic_shapes.ShapeEnv.unbacked_symint_counter",
        "in the shapes of a compile whose plans the batch decides",
        "names of sizes are in generated code and keys, and depend on what caches held",
        NONE,
        "Inductor names sizes by their place in a graph",
    ),
    Patch(
        "torch_private.sizes:hints_forgotten",
        "fx.experimental.symbolic_shapes.ShapeEnv.var_to_hint_override",
        COMPILED,
        "a later graph's key has all hints of the model, of graphs that were cached or not",
        NONE,
        "a key has the hints of its own graph",
    ),
    Patch(
        "torch_private.inductor:last_strides_kept",
        "_inductor.lowering._maybe_layout_constraints",
        COMPILED,
        "Inductor changes the innermost stride of what attention kernels read",
        NONE,
        "a tag of an op asks for a last stride of 1",
    ),
    Patch(
        "torch_private.inductor:cats_in_one_kernel",
        "_inductor.lowering.lowerings[aten.cat], _inductor.ir.StorageBox.has_exceeded_max_reads,"
        " _inductor.ir.Loops.has_large_inner_fn",
        COMPILED,
        "a concatenation of more than eight inputs takes a kernel for each of them on a GPU",
        NONE,
        "a node can ask for one kernel",
    ),
    Patch(
        "torch_private.inductor:changed_before_code",
        "_inductor.compile_fx.fx_codegen_and_compile",
        COMPILED,
        "a graph that Inductor's cache knows need not be lowered",
        NONE,
        "Inductor has a custom pass behind the look-up that may add ops",
    ),
    Patch(
        "torch_private.single_compile:compiled_once",
        "_inductor.codecache.FxGraphCache.load_with_key",
        "while Inductor compiles a graph that all ranks share",
        "ranks that start together on an empty cache would each compile it",
        NONE,
        "Inductor's cache waits for another process that compiles the same",
    ),
    Patch(
        "torch_private.tracing:replace_backward",
        "the `backward` of the autograd function of one compiled graph of ours",
        "from its first run on",
        "an exchange that fails in the backward is named",
        NONE,
        "a backend can wrap the backward",
    ),
    Patch(
        "torch_private.checkpoint:_Recomputation.run_within",
        "`recompute_fn` or `run_function` of one checkpoint that runs within a region",
        "until its backward",
        "a checkpoint recomputes outside of the function modes of its first run",
        NONE,
        "a checkpoint restores function modes",
    ),
    Patch(
        "torch_private.checkpoint:redraw_when_recomputed",
        "CheckpointWrapper.checkpoint_fn of the layers of one model",
        "for a model that was prepared by our accelerate integration",
        "layers that accelerate wraps drop out others in the backward than in the forward",
        NONE,
        "accelerate leaves `preserve_rng_state` on",
    ),
    Patch(
        "torch_private.flex:flex_gradients_on_cpu",
        "nn.attention.flex_attention._validate_device",
        "within `flex_gradients_on_cpu()`",
        "flex_attention refuses gradients on the CPU before a compiler sees it",
        "https://github.com/pytorch/pytorch/issues/148752",
        "torch has a backward of flex_attention on the CPU",
    ),
    Patch(
        "torch_private.context_parallel:torchs_load_balance",
        "distributed.tensor.experimental._context_parallel._attention._cp_options",
        "within `cp_inductor.context_parallel_unshard`",
        "torch's function reads there whether shards are permuted",
        NONE,
        "it takes that as an argument",
    ),
    Patch(
        "torch_private.dynamo:compile_state_kept",
        "_functorch.aot_autograd.AOT_COUNTER, _dynamo.utils.counters",
        INSPECTED,
        "a look at a model changes nothing of the compiles that follow",
        NONE,
        "never: nobody else needs it",
    ),
    Patch(
        "inspect.pretend:fakes_without_devices",
        "methods of _subclasses.fake_tensor.FakeTensor",
        INSPECTED,
        "some methods of tensors switch to their device, which is not there",
        NONE,
        "they do not for fake tensors",
    ),
    Patch(
        "inspect.pretend:constants_folded_on_cpu",
        "_inductor.fx_passes.joint_graph.UniformValueConstantFolder",
        INSPECTED,
        "it makes constants on the device of the graph, which is not there",
        NONE,
        "it folds fake tensors",
    ),
    Patch(
        "inspect.pretend:stashed_process_groups",
        "tables of distributed.distributed_c10d._world",
        INSPECTED,
        "a pretended world stands in for the one that is there, under the same names",
        NONE,
        "torch can keep two worlds apart",
    ),
    Patch(
        "inspect.pretend:code_loaded_by",
        "_inductor.graph.GraphLowering.compile_to_module",
        INSPECTED,
        "code for another device is read, or run otherwise, and not loaded",
        NONE,
        "Inductor hands out code without loading it",
    ),
    Patch(
        "inspect.pretend:pretend_gpu",
        "cuda.get_device_properties and three more, version.cuda,"
        " _dynamo.device_interface.device_interfaces, triton's active driver",
        INSPECTED,
        "Inductor and Triton ask the GPU that is there",
        NONE,
        "a target can be named instead",
    ),
)


def as_lines(patches: tuple[Patch, ...] = PATCHES) -> Iterator[str]:
    """Yield the table as text: a line for what is patched, and one each for the rest."""
    for patch in patches:
        yield f"{patch.what}  ({patch.by})"
        for name in ("when", "why", "upstream", "until"):
            yield f"  {name:<10}{getattr(patch, name)}"


def as_markdown(patches: tuple[Patch, ...] = PATCHES) -> str:
    """Return the table as Markdown."""
    names = [field.name for field in fields(Patch)]
    as_code: Callable[[str], str] = "`{}`".format
    rows = [names, ["---"] * len(names)]
    rows += [[as_code(patch.by), *(getattr(patch, n) for n in names[1:])] for patch in patches]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
