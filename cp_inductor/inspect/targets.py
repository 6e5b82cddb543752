"""The table of devices that code can be generated for, with the sources of its numbers.

    Target.parse("cuda:sm_90")  =>  the numbers of the H100
    Target.parse("cpu")         =>  the CPU of this machine

Per-chip figures: NVIDIA A100 Tensor Core GPU Architecture (whitepaper, 2020), table 4; NVIDIA H100
Tensor Core GPU Architecture (whitepaper, 2023), tables 2 and 3, SXM5; NVIDIA H200 data sheet
(2024), whose chip is the H100's; NVIDIA Blackwell architecture technical brief (2024) and Blackwell
tuning guide (CUDA 12.8). Per-capability limits: CUDA C++ Programming Guide 12.8, section 17.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_inductor.errors import UnsupportedTarget
from cp_inductor.plan.machine import CHIPS

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class GPU:
    """The properties of a GPU that Inductor and Triton read.

    Attributes are named as in `torch.cuda.get_device_properties`; sizes are in bytes.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    shared_memory_per_block: int = 48 * KIB
    regs_per_multiprocessor: int = 64 * KIB
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32


# fmt: off
GPUS = {
    "a100": GPU("NVIDIA A100-SXM4-80GB", 8, 0, 108, 80 * GIB, 164 * KIB, 163 * KIB, 40 * MIB),
    "h100": GPU("NVIDIA H100 80GB HBM3", 9, 0, 132, 80 * GIB, 228 * KIB, 227 * KIB, 50 * MIB),
    "h200": GPU("NVIDIA H200", 9, 0, 132, 141 * GIB, 228 * KIB, 227 * KIB, 50 * MIB),
    "b200": GPU("NVIDIA B200", 10, 0, 148, 180 * GIB, 228 * KIB, 227 * KIB, 126 * MIB),
}
# fmt: on

# The name of an architecture stands for one chip.
ARCHITECTURES = {f"sm_{major}{minor}": chip for (major, minor), chip in CHIPS.items()}

TARGETS = ("cpu", *(f"cuda:{name}" for name in (*ARCHITECTURES, *GPUS)))


@dataclass(frozen=True, slots=True)
class Target:
    """A device to generate code for."""

    name: str  # one of `TARGETS`
    chip: str  # the key of the GPU in `GPUS`; "" for the CPU of this machine

    @staticmethod
    def parse(name: str) -> Target:
        """Return the target called ``cpu``, ``cuda:sm_90``, ``cuda:h200``, ``h200``, ...

        Raises:
            UnsupportedTarget: the name is unknown.
        """
        lower = name.lower()
        lower = lower if lower == "cpu" or ":" in lower else f"cuda:{lower}"
        if lower not in TARGETS:
            raise UnsupportedTarget(
                site=f"target={name!r}",
                expected=f"one of {', '.join(TARGETS)}",
                got=repr(name),
                remedy="name the architecture or the chip, as in 'cuda:sm_90' or 'cuda:h200'",
            )
        chip = lower.removeprefix("cuda:")
        return Target(lower, "" if lower == "cpu" else ARCHITECTURES.get(chip, chip))

    @property
    def gpu(self) -> GPU | None:
        """The GPU; None for a CPU."""
        return GPUS.get(self.chip)

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of a GPU; None for a CPU."""
        return None if self.gpu is None else (self.gpu.major, self.gpu.minor)
