"""What ranks need, imported once: they are forked from a process that has imported this.

Importing torch, its compiler and what that imports at the first compile takes a process several
seconds, as long as compiling a small model by cp_aot_eager. Nothing is run here: a process that has
threads or a process group cannot be forked safely.
"""

# ruff: noqa: F401 - what is imported here is used by the ranks

from __future__ import annotations

import gc
import threading

import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.utils.cpp_extension

import cp_inductor.backend
import tests.support.combinations
import tests.support.ranks

assert threading.active_count() == 1
# What lives as long as the process is not looked at by the ranks' garbage collectors, which
# would write to it: its memory stays shared.
gc.collect()
gc.freeze()
gc.set_threshold(50_000)  # as in conftest.py
