"""Published rates of kernels: below what the chips are specified for, and of kernels that exist."""

from __future__ import annotations

from cp_inductor.inspect.targets import GPUS
from cp_inductor.plan.machine import DEVICES
from cp_inductor.tiles.kernel_table import KERNELS

# TFLOP/s of dense bfloat16, from NVIDIA's data sheets.
SPECIFIED = {"a100": 312, "h100": 989, "h200": 989, "b200": 2250}


def test_rates_are_of_these_chips_and_kernels() -> None:
    rows = [row for row in KERNELS.values() if row.device == "cuda"]
    names = {row.plain.switch.name for row in rows} | {row.under_rule.name for row in rows}
    assert {*DEVICES} - {"gpu", "cpu"} == GPUS.keys() == SPECIFIED.keys()
    for chip in GPUS:
        of_chip = dict(DEVICES[chip].rates)
        assert of_chip.keys() <= names | {"FA3", "FA4"}
        for rate in of_chip.values():
            assert 0.2 * SPECIFIED[chip] < rate.forward / 1e12 < 0.8 * SPECIFIED[chip]
            assert 0.8 < rate.backward / rate.forward < 0.9
            assert rate.source


def test_a_kernel_that_nobody_measured_has_none() -> None:
    assert DEVICES["b200"].rate_of("flash") is None
    assert DEVICES["gpu"].rate_of("flash") is None
