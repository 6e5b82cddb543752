"""The table of kernels, and which of them serves an attention.

    query (B, H, S, D), bfloat16, on an H100  =>  "cudnn_cuda", tiles under a mask by flex attention
    the same on an A100                       =>  "flash_cuda", the same
    the same with sdpa_kernel(EFFICIENT)      =>  "efficient_cuda"

The order is that in which SDPA itself chooses on the device, under the same switches and priorities
(``torch.nn.attention.sdpa_kernel``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_inductor.errors import UnsupportedKernel
from cp_inductor.tiles import known_wrong
from cp_inductor.tiles.aten_kernels import CudnnCUDA, EfficientCUDA, FlashCPU, FlashCUDA
from cp_inductor.tiles.flex_tiles import FlexCUDA
from cp_inductor.tiles.kernels import PlainKernel, RuleKernel
from cp_inductor.tiles.masked_tiles import MaskedCPU
from cp_inductor.torch_private.arguments import sdpa_order


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What computes the tiles of an attention."""

    # Those that are FULL or CAUSAL, and those under a mask that `under_rule` leaves.
    plain: type[PlainKernel]
    under_rule: type[RuleKernel]  # those under a mask

    @property
    def device(self) -> str:
        """Type of the devices that both run on."""
        return self.plain.device


# The first row that serves is taken, in SDPA's order of their backends.
KERNELS: Mapping[str, KernelRow] = {
    "flash_cpu": KernelRow(FlashCPU, MaskedCPU),
    "flash_cuda": KernelRow(FlashCUDA, FlexCUDA),
    "cudnn_cuda": KernelRow(CudnnCUDA, FlexCUDA),
    "efficient_cuda": KernelRow(EfficientCUDA, FlexCUDA),
}


def get_kernel(name: str) -> PlainKernel:
    """Return the plain kernel of a row."""
    return KERNELS[name].plain()


def choose_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    dtype: torch.dtype,
    site: str,
    device: str | None = None,
    capability: tuple[int, int] | None = None,
    has_bias: bool = False,
) -> tuple[str, str]:
    """Name the row that serves these tensors, and say what kept those before it from serving.

    Args:
        query, key, value: (B, H, S, D), (B, G, T, D), (B, G, T, D); real or fake.
        dtype: what SDPA computes in: the inputs' dtype, or autocast's.
        site: for the error.
        device: type of the device it will run on, where that is not the tensors'.
        capability: of that device, if it is a GPU.
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
    reasons, order = list[str](), sdpa_order(query.device, capability)
    rows = [(name, row) for name, row in KERNELS.items() if row.device == device]
    for name, row in sorted(rows, key=lambda named: order.index(named[1].plain.switch.backend)):
        reason = _describe_wrong(row, query, capability)
        reason = reason or row.plain.obstacle(dtype, head_dim, has_bias=has_bias)
        if reason is None and row.plain.runs_on(query.device):
            return name, "; ".join(reasons) or "SDPA's first choice"
        reasons.append(reason or f"{row.plain.switch.name} does not run on {query.device}")
    switches = dict.fromkeys(row.plain.switch for row in _rows_of(device))
    disabled = " and ".join(switch.name for switch in switches if not switch.is_on())
    raise UnsupportedKernel(
        site=site,
        expected="; ".join(row.plain.describe() for row in _rows_of(device)),
        got=f"{dtype} with head dim {head_dim} on {device}"
        + (f", with {disabled} attention disabled" if disabled else ""),
        remedy=(
            "cast query, key and value, move them to a device with a flash kernel, or enable"
            " SDPBackend.FLASH_ATTENTION in the sdpa_kernel around the attention"
        ),
    )


def implementation_of(name: str) -> str:
    """Return what has taken the place of a row's kernel, such as "FA3"; "" if nothing has."""
    return known_wrong.flash_implementation() if KERNELS[name].plain is FlashCUDA else ""


def known_wrong_of(
    name: str, device: torch.device, capability: tuple[int, int] | None
) -> tuple[str, ...]:
    """Say where the kernel of a row is known to be wrong, and what computes that in its place.

    If the GPU is not here, of any version of the kernel's library.
    """
    kernel = implementation_of(name) or KERNELS[name].plain.switch.name
    chip, is_here = capability or known_wrong.chip_of(device), torch.cuda.is_available()
    return tuple(
        str(row)
        for row in known_wrong.ROWS
        if chip is not None and kernel == row.kernel and chip[0] in row.chips
        if not is_here or row.is_met(chip)
    )


def _describe_wrong(row: KernelRow, like: Tensor, capability: tuple[int, int] | None) -> str | None:
    """Say that the kernel of a row is known to be wrong for an attention; None if it is not."""
    wrong = known_wrong.TWO_WIDE_SEQUENCES
    if row.plain is not FlashCUDA or known_wrong.flash_implementation() != wrong.kernel:
        return None
    is_met = wrong.is_met(capability or known_wrong.chip_of(like.device))
    return str(wrong) if is_met and like.shape[-1] == 256 and like.shape[0] != 1 else None


# Dynamo evaluates it, where it would break the graph.
@torch.compiler.assume_constant_result
def is_a_kernel_enabled(device: str) -> bool:
    """Whether ``torch.nn.attention.sdpa_kernel`` leaves any kernel that a tile can be, on a device.

    A device of which no row says anything is for `choose_kernel` to refuse.
    """
    return any(row.plain.switch.is_on() for row in _rows_of(device))


def _rows_of(device: str) -> list[KernelRow]:
    """Return the rows of a type of device, or all of them if it has none."""
    return [row for row in KERNELS.values() if row.device == device] or [*KERNELS.values()]


# --- The ops that are tiles, for passes that look for them in a graph -----------------------------

_KERNELS = [kernel for row in KERNELS.values() for kernel in (row.plain, row.under_rule)]
BACKWARD_TILE_OPS: frozenset[Any] = frozenset(kernel.backward_op for kernel in _KERNELS)
TILE_OPS: frozenset[Any] = BACKWARD_TILE_OPS | {kernel.forward_op for kernel in _KERNELS}

# Those with subgraphs.
FLEX_OPS = frozenset({FlexCUDA.forward_op, FlexCUDA.backward_op})

# The arguments of aten's that `kernels.with_whole_rows` is for, and the places of these.
ROWS = frozenset({"query", "key", "value", "out"})
ROWS_OF_TILES = {
    op: tuple(place for place, argument in enumerate(op._schema.arguments) if argument.name in ROWS)
    for op in TILE_OPS
    if isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
}
