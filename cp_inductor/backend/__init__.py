"""The backends of torch.compile: "cp_inductor", and "cp_aot_eager" for debugging.

settings        options and flags of one compile
capture_graph   attentions found and captured in the Dynamo graph
compile         the backends: differentiate, lower, and compile or interpret
gradients       every input that wants a gradient gets one
"""

from cp_inductor.backend.compile import cp_aot_eager, cp_inductor

__all__ = ["cp_aot_eager", "cp_inductor"]
