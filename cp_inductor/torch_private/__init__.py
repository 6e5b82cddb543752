"""Every use of torch's private API in this package.

    groups              ranks of a process group, and its store
    dtensor             handlers of DTensor's dispatcher, their ops, torch's context parallelism
    modes               function and dispatch modes, functions that they see, autocast
    checkpoint          what torch.utils.checkpoint recomputes
    dynamo              what Dynamo is compiling, and for which backend
    tracing             tracing graphs on fake tensors
    arguments           arguments of ops by name
    dispatch            where DTensor's dispatch gives up, or is about to go wrong
    symbolic_dtensor    DTensors whose lengths are symbols
    shardings           shardings that DTensor chose, within a compile
    traces              what Dynamo traces for our backends alone
    flex                the ops of FlexAttention, and what is private of it
    sizes               numbers for symbolic sizes
    inductor            custom passes, the order of nodes, strides, Triton without a GPU
    leaned_on           all names that are used, texts of sources that are read, what is replaced
    probes              what is expected of torch and has no name

"Read in torch 2.13.0 and 2.15.0" means that the sources of these releases were read. Each
function names the releases that have the private API it uses, as (2.13-2.15). The exceptions:
`cp_inductor.inspect.pretend` holds what pretends a device or a world, and the interfaces that
torch's compilers offer to backends are imported where they are used, which
tests/repository/test_layout.py lists by file. `doctor` and tests/backend/test_torch_private.py look
everything up.
"""
