"""Kernels that are known to compute wrong numbers, and what takes their place.

    FA4, head dim 256, two sequences, on a B200  =>  not chosen: the next kernel is
    cuDNN, a tile of one query                   =>  flash computes the tile

`kernel_table` asks before it chooses, `CudnnCUDA` for each tile, and `explain` prints the rows of
the kernel that it names. A row goes when no supported torch can meet what it is about. What was
read in the threads, and by which release each was mended, is of November 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.nn import attention as torchs


@dataclass(frozen=True, slots=True)
class KnownWrong:
    """A kernel that is wrong somewhere."""

    kernel: str  # "cuDNN", or an implementation of flash
    chips: tuple[int, ...]  # the first numbers of compute capabilities
    # Whether a version of its library is; None stands for one that is not known.
    is_wrong: Callable[[str | None], bool]
    versions: str  # those, for people
    what: str  # calls, and what comes of them
    instead: str  # what computes them
    source: str  # the thread

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.kernel} {self.versions}, {self.what}: {self.instead} ({self.source})"

    def is_met(self, chip: tuple[int, int] | None) -> bool:
        """Whether it is about the library here, on a GPU of this compute capability."""
        return chip is not None and chip[0] in self.chips and self.is_wrong(_version(self.kernel))


def _version(kernel: str) -> str | None:
    """Return the version of the library that a kernel is from; None if there is none here."""
    if kernel == "cuDNN":
        number = torch.backends.cudnn.version()
        return None if number is None else str(number)
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


def _cudnn_between(first: int, end: int, *fixed: int) -> Callable[[str | None], bool]:
    """Of cuDNN's numbers, such as 92600. One that is not known is taken for the newest."""
    return lambda text: text is not None and first <= int(text) < end and int(text) not in fixed


# The thread saw models of fewer than 8 KV heads; torch's main branch excludes one query, whatever
# the heads (`check_cudnn_sdpa_decode`).
ONE_QUERY = KnownWrong(
    *("cuDNN", (10, 11), _cudnn_between(91900, 92501, 92401), "9.19 to 9.25.0 but 9.24.1"),
    "one query: wrong outputs",
    "flash computes such tiles",
    "pytorch #193893, #194927",
)
# Rows of a tile of all keys, and of whole rows, whose lse is below -ln(FLT_MAX) = -88.7.
TAIL_OF_KEYS = KnownWrong(
    *("cuDNN", (9,), _cudnn_between(0, 92600), "before 9.26"),
    "64 keys beyond a multiple of 128: NaN in the query's gradient where the lse is below -88.7",
    "flash computes such gradients, unless the tile is causal",
    "pytorch #196678",
)
# No release is named that mends it; the thread is closed.
TWO_WIDE_SEQUENCES = KnownWrong(
    *("FA4", (10,), lambda text: text is None or text.startswith("4.0.0b"), "4.0.0 betas"),
    "head dim 256 and two sequences or more: wrong gradients",
    "not chosen",
    "TransformerEngine #3216",
)
# torch (2.13-2.15) hands None for -1: `_aten_to_fa4_window_size`.
OPEN_WINDOW = KnownWrong(
    *("FA4", (10,), lambda text: text is None or text.startswith("4.0.0b"), "4.0.0 betas"),
    "windows of -1: outputs 0 and an lse of -inf",
    "torch leaves such windows out",
    "TransformerEngine #3528",
)
ROWS = (ONE_QUERY, TAIL_OF_KEYS, TWO_WIDE_SEQUENCES, OPEN_WINDOW)


def flash_implementation() -> str:
    """Return what has taken the place of torch's flash kernel, such as "FA3"; "" if nothing has."""
    current = getattr(torchs, "current_flash_attention_impl", None)
    return "" if current is None else current() or ""


def chip_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a GPU that is here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)
