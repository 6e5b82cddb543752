"""Which kernel serves an attention: by device, dtype, head dim, and the switches of SDPA."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_inductor.errors import UnsupportedKernel


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dtype: torch.dtype,
    site: str,
    device: str | None = None,
    has_bias: bool = False,
) -> str:
    """Name the kernel that serves these tensors.

    Flash wherever it runs, memory-efficient attention where flash cannot: the order in which
    SDPA itself chooses, and the same switches (``torch.nn.attention.sdpa_kernel``).

    Args:
        query, key, value: (B, H, S, D), (B, G, T, D), (B, G, T, D); real or fake.
        dtype: what SDPA computes in: the inputs' dtype, or autocast's.
        site: for the error.
        device: type of the device it will run on, where that is not the tensors'.
        has_bias: some tiles are under a mask.

    Raises:
        UnsupportedKernel: no kernel serves the device, dtype or head dim, or it is disabled.
    """
    head_dim, device = query.shape[-1], device or query.device.type
    if not key.shape[-1] == value.shape[-1] == head_dim:
        raise UnsupportedKernel(
            site=site,
            expected="one head dim for query, key and value",
            got=f"{head_dim}, {key.shape[-1]} and {value.shape[-1]}",
            remedy="pad value to the head dim of query and slice the output",
        )
    half = (torch.bfloat16, torch.float16)
    is_of_cpu = device == "cpu" and dtype in (torch.float64, torch.float32, *half)
    if is_of_cpu and torch.backends.cuda.flash_sdp_enabled():
        return "flash_cpu"
    if device == "cuda":
        has_efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
        is_served = has_efficient or not has_bias
        if dtype in half and head_dim <= 256 and is_served and _is_flash_on(query.device):
            return "flash_cuda"
        if dtype in (torch.float32, *half) and has_efficient:
            return "efficient_cuda"
    raise UnsupportedKernel(
        site=site,
        expected=(
            "float64, float32, bfloat16 or float16 on cpu with the flash kernel enabled; bfloat16,"
            " float16 or float32 on cuda with the flash or memory-efficient kernel enabled"
        ),
        got=f"{dtype} with head dim {head_dim} on {device}{_describe_disabled()}",
        remedy=(
            "cast query, key and value, move them to a device with a flash kernel, or enable"
            " SDPBackend.FLASH_ATTENTION in the sdpa_kernel around the attention"
        ),
    )


# Dynamo evaluates it, where it would break the graph.
@torch.compiler.assume_constant_result
def is_a_kernel_enabled(device: str) -> bool:
    """Whether ``torch.nn.attention.sdpa_kernel`` leaves any kernel that a tile can be, on a device.

    The names of the switches are CUDA's; SDPA asks that of flash on the CPU, too.
    """
    has_efficient = device != "cpu" and torch.backends.cuda.mem_efficient_sdp_enabled()
    return has_efficient or torch.backends.cuda.flash_sdp_enabled()


def _describe_disabled() -> str:
    switches = {
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
    }
    disabled = [name for name, is_on in switches.items() if not is_on]
    return f", with {' and '.join(disabled)} attention disabled" if disabled else ""


def _is_flash_on(device: torch.device) -> bool:
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    if device.type != "cuda" or not torch.cuda.is_available():
        return True  # the graph is being cross-compiled, for chips that have the kernel
    return torch.cuda.get_device_capability(device) >= (8, 0)
