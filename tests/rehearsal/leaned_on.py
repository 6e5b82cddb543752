"""What the rehearsal uses inside torch and triton, beside what the package uses."""

from __future__ import annotations

from collections.abc import Mapping

# As in `cp_inductor.torch_private.leaned_on`: module:name => parameters that it must take.
LEANED_ON: Mapping[str, tuple[str, ...]] = {
    "torch._inductor.select_algorithm:extern_kernels": (),
    "torch._inductor.async_compile:AsyncCompile": (),
    "torch._C._dynamo:guards.assert_size_stride": (),
    "torch._inductor.runtime.triton_heuristics:GridExpr.from_meta": ("inductor_meta", "cfg"),
    "torch._inductor.runtime.triton_heuristics:GridExpr.eval_slow": ("meta",),
    "torch._inductor.runtime.hints:TRITON_MAX_BLOCK": (),
    "torch._inductor.runtime.triton_helpers:maximum": (),
    "torch._inductor.runtime.triton_helpers:minimum": (),
    "torch._inductor.runtime.triton_helpers:maximum_with_index": (),
    "torch._inductor.runtime.triton_helpers:minimum_with_index": (),
    "triton.language.extra:libdevice": (),
    "triton.runtime.interpreter:interpreter_builder": (),
    "triton.runtime.interpreter:interpreter_semantic": (),
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_load": ("ptrs", "mask", "other"),
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_store": ("ptrs", "value", "mask"),
    "triton.runtime.interpreter:InterpreterBuilder.create_atomic_rmw": ("rmwOp", "ptr", "val"),
    "triton.runtime.interpreter:InterpreterBuilder.cast_impl": ("src", "dst_type"),
    "triton.runtime.interpreter:InterpreterBuilder.binary_op": ("lhs", "rhs", "op"),
    "triton.runtime.interpreter:InterpreterBuilder.unary_op": ("arg", "op"),
    "triton.runtime.interpreter:InterpretedFunction.rewrite": (),
    "triton.runtime.interpreter:ReduceOps.generic_reduce": ("input",),
    "triton.runtime.interpreter:ScanOps.generic_scan": ("input",),
    "triton.runtime.interpreter:TensorHandle": ("data", "dtype"),
    "triton.runtime.interpreter:_get_np_dtype": ("tt_dtype",),
    "triton.runtime.interpreter:_patch_lang": ("fn",),
    "triton.runtime.jit:_normalize_ty": ("ty",),
}
TEXTS: Mapping[str, tuple[str, ...]] = {
    "torch._inductor.runtime.triton_heuristics": ("extra_launcher_args", "mutated_arg_names"),
}
