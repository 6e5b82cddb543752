"""From what a user says of the machine to the machine of the ranks of a group.

"8xh100:nvlink4 x 8:ib400", ranks 0, 8, 16, ...                =>   one level, ib400
"calibrated"                                                   =>   what `calibrate` measured
"auto", on 16 H100, 8 on each host                             =>   "8xh100:nvlink4 x ib400"
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from cp_inductor import config
from cp_inductor.errors import InvalidArgument
from cp_inductor.flags import AUTO
from cp_inductor.plan.machine import CHIPS, DEVICES, Machine, known_machine
from cp_inductor.plan.machine_file import CALIBRATED, read_calibrated
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.inductor import cache_folder

# GPUs of a node, where none can be counted.
USUAL_NODE = 8


def machine_text(machine: object, *, site: str) -> str:
    """Return as text a `Machine`, its text, "calibrated", "auto", or "", which is the default."""
    if isinstance(machine, Machine):
        return machine.format()
    if not isinstance(machine, str):
        raise InvalidArgument(
            site=site,
            expected="machine to be a cp_inductor.Machine, or its text",
            got=repr(machine)[:60],
            remedy="write '8xh100:nvlink4 x 8:ib400' for 8 nodes of 8 H100",
        )
    if machine == CALIBRATED:
        return read_calibrated(cache_folder()).format()
    return Machine.parse(machine, site=site).format() if machine not in ("", AUTO) else machine


def machine_of(
    text: str, group_name: str, device: str, capability: tuple[int, int] | None = None
) -> Machine:
    """Return the machine as the ranks of a group see it.

    Args:
        text: what `machine_text` returned.
        group_name: c10d name of the group.
        device: type of the device that plans are made for.
        capability: of a GPU, if it is not this process's.
    """
    group, world_size = group_of(group_name), dist.get_world_size()
    node_size = 0 if dist.get_backend(group) == "fake" else config.ranks_of_this_host()
    if text != AUTO or device not in ("cpu", "cuda"):
        machine = Machine() if text in ("", AUTO) else Machine.parse(text)
    elif device == "cpu":
        num_cores = os.cpu_count() or 1
        machine = known_machine("cpu", world_size, node_size or world_size, num_cores)
    else:
        is_here = capability is None and torch.cuda.is_available()
        chip = chip_of_this_process() if is_here else CHIPS.get(capability or (0, 0), "gpu")
        usual = torch.cuda.device_count() if is_here else USUAL_NODE
        machine = known_machine(chip, world_size, node_size or usual)
    return machine.among(dist.get_process_group_ranks(group))


def chip_of_this_process() -> str:
    """Return the name in `DEVICES` of the GPU of this process; "gpu" if nothing is known of it."""
    name = torch.cuda.get_device_name().lower()
    return next((chip for chip in DEVICES if chip in name), "gpu")
