"""Count collectives, in eager and in compiled code."""

from __future__ import annotations

import torch
from torch.distributed.tensor.debug import CommDebugMode

ALL_TO_ALL = torch.ops.c10d_functional.all_to_all_single


class Counts(CommDebugMode):
    """CommDebugMode without its hooks on modules.

    They tell modules apart, which is not needed here, and make Dynamo recompile. As a mode of
    infrastructure it may be entered around compiled code; Dynamo guards on the modes at hand, so
    run the code inside such a mode to compile it, and count the second time: else it is compiled
    twice.
    """

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __enter__(self) -> Counts:
        super().__enter__()
        tracker = self.advanced_module_tracker
        for handle in (tracker._fw_pre_handle, tracker._fw_post_handle, tracker._bw_handle):
            handle.remove()
        return self

    def exchanges(self) -> int:
        """How many all_to_all there were."""
        return self.get_comm_counts().get(ALL_TO_ALL, 0)
