"""From what a user says of the machine to the machine of a sequence axis.

"8xh100:nvlink4 x 8:ib400", an axis over ranks 0, 8, 16, ...   =>   one level, ib400
"calibrated"                                                   =>   what `calibrate` measured
"""

from __future__ import annotations

import torch.distributed as dist

from cp_inductor.dtensor.axis import SequenceAxis
from cp_inductor.errors import InvalidArgument
from cp_inductor.plan.machine import Machine
from cp_inductor.plan.machine_file import CALIBRATED, read_calibrated
from cp_inductor.torch_private.groups import group_of
from cp_inductor.torch_private.inductor import cache_folder


def machine_text(machine: object, *, site: str) -> str:
    """Return a machine as text: a `Machine`, its text, "calibrated", or "" for the default one.

    Raises:
        InvalidArgument: it is none of these, or nothing was calibrated here.
        InvalidText: the text is no machine.
    """
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
    return Machine.parse(machine, site=site).format() if machine else ""


def machine_of(text: str, axis: SequenceAxis) -> Machine:
    """Return the machine as the ranks of an axis see it."""
    machine = Machine.parse(text) if text else Machine()
    if len(machine.levels) == 1:
        return machine
    return machine.among(dist.get_process_group_ranks(group_of(axis.group_name)))
