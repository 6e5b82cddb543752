"""The backends of torch.compile: "cp_inductor", and "cp_aot_eager" for debugging.

settings        options and flags of one compile
capture_graph   find and capture the attentions of a Dynamo graph
progress        say that a compile takes long
compile         the backends: differentiate, lower, and compile or interpret
captured        what calling a captured graph takes
gradients       give every output a gradient, where the program differentiates only some
versions        refuse the backward of DTensors that were written to
"""

from cp_inductor.backend.compile import cp_aot_eager, cp_inductor

__all__ = ["cp_aot_eager", "cp_inductor"]
