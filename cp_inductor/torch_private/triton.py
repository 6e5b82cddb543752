"""Triton's compiler, called without a GPU.

Read in torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# As each release's CUDA build requires it. Read in the wheels' metadata; 2.13 from its source tree.
_TRITON_OF_TORCH = {
    "2.11": "3.6.0",
    "2.12": "3.7.0",
    "2.13": "3.7.1",
    "2.14": "3.8.0",
    "2.15": "3.9.0",
}


def triton_for_this_torch() -> str:
    """Return the version of triton that belongs to the installed torch; "any" if unknown."""
    return _TRITON_OF_TORCH.get(".".join(torch.__version__.split(".")[:2]), "any")


def compile_triton_kernel(autotuner: Any) -> Iterator[tuple[str, Any]]:
    """Compile a kernel of Inductor's in every configuration it would try; yield text and binary.

    `CachingAutotuner.configs` and `._precompile_config` (torch._inductor.runtime.triton_heuristics,
    2.11-2.15), which its compile workers call, under `pretend_gpu`.
    """
    import torch._inductor.config

    # A kernel compiled for a static launcher hands over a loader of machine code, not the code.
    with torch._inductor.config.patch(use_static_triton_launcher=False):
        for config in autotuner.configs:
            yield str(config).replace(",", ""), autotuner._precompile_config(config).kernel


def cuobjdump_path() -> str:
    """Return where the tool that reads machine code lies.

    `triton.knobs.nvidia.cuobjdump` (triton 3.6-3.9).
    """
    from triton import knobs

    return str(knobs.nvidia.cuobjdump.path)
