"""How fast attention kernels have been measured to run on GPUs, for predictions.

    rate_of("h100", "cuDNN")     =>  595e12 flops per second forward, 516e12 backward
    rate_of("h100", "MyKernel")  =>  None

bfloat16, head dim 128, 16,384 tokens, no mask: the best that long tiles can expect. `explain`
prices plans by these rates. Plans are chosen without them, so that ranks choose alike on any GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cp_inductor.plan.cost import Device

# Of the forward's rate, where no backward was published: all three kernels have it on the H100.
BACKWARD_RATIO = 0.87
TERA = 10**12

FA2 = "FlashAttention-2 paper (arXiv 2307.08691), 73% and 63% of 312 TFLOP/s"
FA3 = "FlashAttention-3 paper (arXiv 2407.08608), figures 5 and 6, H100 80GB SXM5"
FA4 = "FlashAttention-4 paper (March 2026): 1613 TFLOP/s, up to 1.3 x cuDNN 9.13, 2.7 x Triton"
H200 = "as the H100, whose chip it has"


@dataclass(frozen=True, slots=True)
class Rate:
    """Floating-point operations per second of a kernel, forward and backward.

    Attributes:
        forward, backward: as tiles count them: 4 and 10 per pair, head and coordinate.
        source: who measured it.
    """

    forward: float
    backward: float
    source: str

    def device(self, *, is_forward: bool) -> Device:
        """Return the device whose tiles run at this rate."""
        return Device(flops_per_s=self.forward if is_forward else self.backward)


def _rate(forward: float, backward: float | None, source: str) -> Rate:
    backward = forward * BACKWARD_RATIO if backward is None else backward
    return Rate(forward * TERA, backward * TERA, source)


_H100 = {
    "flash": _rate(370, 322, FA3),
    "cuDNN": _rate(595, 516, FA3),
    "FA3": _rate(648, 561, FA3),
    "flex": _rate(395, None, f"{FA3}, Triton's forward"),
}
# chip => kernel => rate
RATES: Mapping[str, Mapping[str, Rate]] = {
    "a100": {"flash": _rate(228, 197, FA2)},
    "h100": _H100,
    "h200": {name: Rate(one.forward, one.backward, H200) for name, one in _H100.items()},
    "b200": {
        "cuDNN": _rate(1613 / 1.3, None, FA4),
        "FA4": _rate(1613, None, FA4),
        "flex": _rate(1613 / 2.7, None, FA4),
    },
}


def rate_of(chip: str, kernel: str) -> Rate | None:
    """Return the measured rate of a kernel on a chip; None if nobody measured it."""
    return RATES.get(chip, {}).get(kernel)
