"""The backends of torch.compile: "cp_inductor", and "cp_aot_eager" for debugging.

compile         the backends: capture, differentiate, lower, and compile or interpret
captured        what calling a captured graph takes
progress        say that a compile takes long
steps           name the exchange that failed
failed_trace    name what Dynamo could not trace
graph_passes    two stages of the passes, for compilers of other libraries
gradients       give every output a gradient, where the program differentiates only some
versions        refuse the backward of DTensors that were written to
"""

from cp_inductor.backend.compile import cp_aot_eager, cp_inductor

__all__ = ["cp_aot_eager", "cp_inductor"]
