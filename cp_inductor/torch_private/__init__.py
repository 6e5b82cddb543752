"""The private and moving corners of torch that this package leans on, and nothing else.

    groups              ranks of a process group, and its store
    dtensor             handlers of DTensor's dispatcher
    context_parallel    what torch's own context parallelism is doing
    modes               function and dispatch modes, autocast
    checkpoint          what torch.utils.checkpoint runs again
    dynamo              what Dynamo is compiling, and for whom
    tracing             graphs and fakes
    arguments           of ops, by their schemas
    sizes               of symbols
    inductor            passes, the order of nodes, strides of kernels
    triton              its compiler, without a GPU
    leaned_on           all of the above by name, for `doctor` and tests/test_torch_private.py

Read in torch 2.11.0, 2.13.0 and 2.15.0; each function names what it stands on. What only pretends
a device or a world is in `cp_inductor.inspect.pretend`. What torch's compilers offer their backends
is imported where it is used; tests/test_layout.py says what, and where.
"""
