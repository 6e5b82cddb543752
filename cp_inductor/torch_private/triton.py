"""Call Triton's compiler without a GPU.

Read in torch 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# The version that each release's CUDA build requires, read in its wheel's metadata (2.13: in its
# source tree).
_TRITON_OF_TORCH = {"2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0"}


def triton_for_this_torch() -> str:
    """Return the triton version that the installed torch requires; "any" if unknown."""
    return _TRITON_OF_TORCH.get(".".join(torch.__version__.split(".")[:2]), "any")


def compile_triton_kernel(autotuner: Any) -> Iterator[tuple[str, Any]]:
    """Compile one of Inductor's Triton kernels in every configuration that it would try.

    `CachingAutotuner.configs` and `._precompile_config` (torch._inductor.runtime.triton_heuristics,
    2.13-2.15), which Inductor's compile workers call, too. Call this within `pretend_gpu`.

    Yields:
        The configuration as text, and the compiled kernel.
    """
    import torch._inductor.config

    # With the static launcher, a compiled kernel gives only a loader, not the machine code.
    with torch._inductor.config.patch(use_static_triton_launcher=False):
        for config in autotuner.configs:
            yield str(config).replace(",", ""), autotuner._precompile_config(config).kernel


def cuobjdump_path() -> str:
    """Return the path of cuobjdump, which reads machine code and comes with triton (3.7-3.9)."""
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)
