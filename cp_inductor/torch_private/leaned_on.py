"""Every name of torch that this package uses and a release may move, and what it replaces of torch.

`patches.md` is the table of what is replaced: our function (below cp_inductor), what it replaces
(below torch), when that is in place, why, the issue or pull request of pytorch/pytorch, and what
has to be true for it to go. `python -m cp_inductor doctor` prints it, and a test finds each
function below torch_private/ and in inspect/pretend.py that changes torch without a row. Settings
that torch offers to programs (`implicit_replication`, `_cp_options`, its configs) are no such
places, nor are objects that this package has made, nor Python's import hooks.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name

TORCHS_ATTENTION = "torch.distributed.tensor.experimental._context_parallel._attention"

C10D_TABLES = (
    *("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config"),
    *("tags_to_pg", "pg_to_tag", "pg_coalesce_state"),
    "pg_flight_recorder_hooks",  # in 2.15
)

# Messages of torch by which failures are told apart.
MIXED = "got mixed torch.Tensor and DTensor"
BOTH_MASKS = "Explicit attn_mask should not be set when is_causal=True"
TRANSFORMED = "autograd.Function with functorch transforms"
# An AssertionError for a plain tensor whose `grad` is of a subclass: Dynamo makes the fakes of both
# in the way of the first.
INPUT_NOT_FAKED = "Expected SubclassSymbolicContext or None"
# Sizes that differ and are not 1, in what fakes compute of a call over DTensors.
BROADCAST = "Attempting to broadcast a dimension of length"
# Sizes that only data says: an op must know one, has made and lost one, has computed another.
GUARD_ON_DATA = "Could not guard on data-dependent expression"
SIZE_LOST = "Pending unbacked symbols"
UNTRACKED = "is not tracked with proxy"

# module => texts that its source must have: what is leaned on and is no name of a module. Those are
# messages, local variables that are read from frames, attributes that only instances have, keys of
# `meta`, and what generated code looks like. `doctor` and the tests look every text up.
TEXTS: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.tensor._dispatch": (MIXED,),
    "torch._subclasses.meta_utils": (INPUT_NOT_FAKED,),
    "torch._refs": (BROADCAST,),
    "torch.fx.experimental.symbolic_shapes": (
        *(GUARD_ON_DATA, SIZE_LOST, "unbacked_bindings", "var_to_hint_override"),
        *("constraint_sizes", "tracked_fakes"),
    ),
    "torch.fx.proxy": ('node.meta["nn_module_stack"]',),
    "torch.nn.parameter": ("torch.Tensor._make_subclass(cls, data, requires_grad)",),
    "torch._dynamo.exc": ("Explanation:", "first_useful_frame"),
    "torch._dynamo.convert_frame": ("_torch_dynamo_tracer_output",),
    "torch._dynamo.output_graph": (
        *("output_graph_for_cleanup", "compile_subgraph_reason", 'meta["grapharg"]'),
        *("example_value", "stack_trace"),
    ),
    "torch._dynamo.eval_frame": ("_torchdynamo_orig_backend", "_orig_mod"),
    "torch._dynamo.decorators": ("_dynamo_",),
    "torch._dynamo.variables.higher_order_ops": ("_checkpoint_context_fn",),
    "torch._functorch._aot_autograd.runtime_wrappers": ("class CompiledFunction(",),
    "torch._functorch._aot_autograd.graph_compile": ("eager_input_vals",),
    "torch._functorch.partitioners": ('node.meta.get("recompute", None)',),
    "torch._functorch._aot_autograd.graph_capture": ('meta["desc"]',),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": ("_checkpoint_wrapped_module",),
    "torch.utils.checkpoint": (
        "gen = _checkpoint_without_reentrant_generator",
        "new_frame = _CheckpointFrame(",
        "ctx.run_function = ",
    ),
    "torch.fx.traceback": ('"custom"', '"from_node"', '"seq_nr"'),
    "torch.fx.experimental.proxy_tensor": ('meta["val"]', "sympy_expr_tracker", UNTRACKED),
    "torch._inductor.graph": ("inductor_realize_to_strides",),
    "torch._inductor.utils": ("Source Nodes: [",),
    "torch._inductor.codegen.wrapper": ("async_compile.triton(",),
    "torch.distributed.device_mesh": ("self._dim_group_names = ", "def _stable_hash("),
    "torch.distributed.fsdp._init_utils": ("_inter_node_pg",),
    "torch._library.custom_ops": ("_init_fn",),
    "torch._library.fake_impl": ("self._shape_env = ",),
    "torch._ops": ("self._schema = schema",),
    "torch.nn.modules.module": ("_parameters", "_modules", "_buffers"),
}


# What these have is not there before it is registered, or while nothing is compiled.
CHANGING = ("torch.ops.", "torch._inductor.virtualized:V.")

# module => names that are read off it, and by name the parameters that one must take. What files
# import or read by its full name, and need not take any, is not listed: see `names_in_source`.
_NAMES = {
    "torch": "Tensor._base Tensor._version",
    "torch._C": "FunctionSchema._is_view_op",
    "torch._C._distributed_c10d": "Backend.Options._timeout ProcessGroupGloo.options",
    "torch._C._dynamo.eval_frame": "_FrameAction.SKIP _FrameExecStrategy set_code_exec_strategy",
    "torch._dynamo.backends.distributed": "DDPOptimizer.__init__(backend_compile_fn)",
    "torch._dynamo.config": "automatic_dynamic_local_pgo",
    "torch._dynamo.convert_frame": "_compile(compiler_fn,locals,one_graph,skip)",
    "torch._dynamo.exc": "ShortenTraceback.remove_dynamo_frames",
    "torch._dynamo.guards": "GuardBuilder.EQUALS_MATCH(guard)",
    "torch._dynamo.output_graph": "DynamoTracerOutput",
    "torch._dynamo.source": "AttrSource(base,member) GetItemSource(base,index)",
    "torch._dynamo.utils": "run_node(node,args,kwargs)",
    "torch._dynamo.variables.builder": "GraphArg.example",
    "torch._functorch._aot_autograd.descriptors": "AOTInput.is_tangent",
    "torch._functorch.config": "enable_autograd_cache force_non_lazy_backward_lowering",
    "torch._guards": "Guard(originating_source,create_fn)",
    "torch._inductor.codecache": """
        CacheBase.get_system FxGraphCachePickler._reduce_fake_script_object(t)""",
    "torch._inductor.compile_fx": "compile_fx(inner_compile,config_patches,decompositions)",
    "torch._inductor.compiler_bisector": """
        CompilerBisector.disable_subsystem(backend,subsystem,debug_info)""",
    "torch._inductor.config": """
        custom_partitioner_fn force_pointwise_cat joint_custom_pre_pass
        post_grad_custom_post_pass""",
    "torch._inductor.fx_passes.auto_chunker": "chunk(gm) find_amplifier_node(graph)",
    "torch._inductor.fx_passes.auto_chunker.propagator": "get_fake_tensor_from_node_arg(node)",
    "torch._inductor.fx_passes.control_dependencies": """
        preserve_node_ordering(graph,additional_deps_map)""",
    "torch._inductor.fx_passes.joint_graph": "UniformValueConstantFolder.run",
    "torch._inductor.graph": "GraphLowering.codegen GraphLowering.compile_to_module",
    "torch._inductor.ir": "ExternKernel.require_contiguous(x) Loops.has_large_inner_fn(threshold)",
    "torch._inductor.pattern_matcher": "stable_topological_sort(graph)",
    "torch._inductor.runtime.hints": "DeviceProperties.create",
    "torch._library.fake_class_registry": "FakeScriptObject(wrapped_obj,script_class_name,x)",
    "torch._library.fake_impl": "FakeImplCtx(_fake_mode,_op) allocate_size(shape_env,min_val)",
    "torch._ops": "HigherOrderOperator.py_impl(k)",
    "torch.autograd.function": "BackwardCFunction.apply Function._backward_cls._forward_cls",
    "torch.distributed": """
        ProcessGroup._device_types ProcessGroup._get_backend ProcessGroup.get_group_store""",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": """
        CheckpointWrapper(mod) checkpoint_wrapper(module)""",
    "torch.distributed.distributed_c10d": """
        _default_pg_init_method _register_process_group _resolve_process_group
        _unregister_process_group _update_default_pg(pg) _world.group_count""",
    "torch.distributed.tensor": """
        DTensor.__tensor_unflatten__ DTensor._local_tensor
        DTensor._op_dispatcher._dispatch_get_local_results_slow_path(op_call,args,op_info)
        DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path(op_call,args,kwargs,op_info)
        DTensor._op_dispatcher.redistribute_local_args(op_info)
        DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        DTensor._op_dispatcher.sharding_propagator.op_to_rules
        DTensor._op_dispatcher.sharding_propagator.propagate(op_info)
        DTensor._op_dispatcher.unwrap_to_op_info DTensor._op_dispatcher.wrap DTensor._spec""",
    "torch.distributed.tensor._dtensor_spec": """
        DTensorSpec(mesh,placements,tensor_meta) TensorMeta(shape,stride,dtype)""",
    "torch.distributed.tensor._op_schema": """
        OpSchema(op,args_schema,kwargs_schema) OutputSharding(output_spec,redistribute_schema)""",
    "torch.distributed.tensor._random": "is_rng_supported_mesh(device_mesh)",
    TORCHS_ATTENTION: """
        _DispatchMode.MODULE_WRAPPER _cp_options.enable_load_balance _dispatch_mode
        _replaced_functions custom_ops""",
    "torch.distributed.tensor.parallel.loss": "customized_loss_ops",
    "torch.fx.experimental.proxy_tensor": """
        _SympyExprTrackerValue get_proxy_mode make_fx(f,tracing_mode,pre_dispatch) py_sym_types
        set_proxy_slot(obj,tracer,proxy)""",
    "torch.fx.experimental.symbolic_shapes": """
        ShapeEnv(tracked_fakes) ShapeEnv.ignore_fresh_unbacked_symbols
        TrackedFake(fake,source,symbolic_context) statically_known_true(x)""",
    "torch.fx.traceback": "NodeSource.NodeInfo(name) preserve_node_meta",
    "torch.nn.attention": "_sdpa_kernel(backends)",
    "torch.nn.attention.flex_attention": """
        _LARGE_SPARSE_BLOCK_SIZE _validate_device(query,key,value)
        _vmap_for_bhqkv(fn,prefix,suffix)""",
    "torch.nn.attention.varlen": "_varlen_attn",
    "torch.nn.functional": """
        has_torch_function multi_head_attention_forward(need_weights)
        scaled_dot_product_attention""",
    "torch.ops": """
        higher_order.flex_attention.python_key_table
        higher_order.invoke_subgraph(subgraph,identifier,operands)""",
    "torch.utils._python_dispatch": "return_and_correct_aliasing(func,args,kwargs,out)",
    "torch.utils.checkpoint": """
        CheckpointFunction.forward(run_function) _CachedTorchDispatchMode.__init__(policy_fn)
        _CachingTorchDispatchMode.__init__(policy_fn) _CheckpointFrame.__init__(recompute_fn)""",
    # These need triton.
    "torch._inductor.runtime.triton_helpers": "set_driver_to_gpu",
    "torch._inductor.runtime.triton_heuristics": "CachingAutotuner._precompile_config(cfg)",
    "triton": "knobs.nvidia.cuobjdump.path",
    "triton.backends.compiler": "GPUTarget(backend,arch,warp_size)",
    "triton.runtime.driver": "driver._active",
}


def leaned_on() -> Mapping[str, tuple[str, ...]]:
    """Return each place, as module:name, with the parameters that it must take, by name.

    `doctor` and the tests look every entry up.
    """
    listed = {
        f"{module}:{name}": tuple(parameters.rstrip(")").split(",")) if parameters else ()
        for module, words in _NAMES.items()
        for name, _, parameters in (word.partition("(") for word in words.split())
    }
    tables = (f"torch.distributed.distributed_c10d:_world.{name}" for name in C10D_TABLES[:-1])
    return {**dict.fromkeys((*names_in_source(), *tables), ()), **listed}


def names_in_source() -> Iterator[str]:
    """Yield what the files of this package import, or read by its full name, that is private."""
    root = Path(__file__).parents[1]
    for path in (*root.rglob("*.py"), *(root / "passes").glob("*.py")):  # which may be a link
        nodes = list(ast.walk(ast.parse(path.read_text())))
        places = {"torch": "torch"}  # what the file imports of torch, by the names that it gives it
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("torch."):
                places |= {
                    name.asname or name.name: f"{node.module}:{name.name}" for name in node.names
                }
        texts = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
        read = [text.split(".", 1) for text in texts if re.fullmatch(r"[\w.]+", text)]
        names = [f"{places[first]}.{rest}" for first, rest in read if first in places]
        names = [*places.values(), *(name for name in names if not name.startswith(CHANGING))]
        yield from (name for name in names if re.search(r"[.:]_(?!_)", name))


def text_gone(module: str, text: str) -> str | None:
    """Return what is wrong with an entry of `TEXTS`; None if the installed torch has it."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return "the module is gone"
    return None if text in Path(spec.origin).read_text() else f"its source has no {text!r}"


def what_moved(place: str, parameters: Sequence[str]) -> str | None:
    """Return how the installed torch differs from an entry of `leaned_on`; None if it does not."""
    try:
        value = resolve_name(place.replace(":", "."))
    except (ImportError, AttributeError) as error:
        return f"it is gone: {error}"
    if parameters:
        taken = signature(value).parameters
        missing = [name for name in parameters if name not in taken]
        if missing:
            return f"it no longer takes {', '.join(missing)}, but {', '.join(taken)}"
    return None


def patches() -> list[dict[str, str]]:
    """Return the rows of `patches.md`, by the names of its columns."""
    table = Path(__file__).with_name("patches.md").read_text()
    names, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    return [dict(zip(names, row, strict=True)) for row in rows]
