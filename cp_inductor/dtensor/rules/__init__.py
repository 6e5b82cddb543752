"""What DTensor does with ops that it has no rule for, or a wrong one: a file for each family.

attention           attention over a sharded sequence
loss                means over the tokens of all ranks
on_whole            all other ops without a rule, on all tokens
partials            numbers of which each rank would hold a part, and those that Python reads
writes              writes in place that DTensor would lose
draws               one draw for all ranks
single_ops          sums along a sharded dim, empty tensors, ops that compute every element alone

All are registered here. Where no sequences lie (`dtensor/axis.py`), losses, partials, draws and
numbers stay DTensor's own. Programs that do not use the library keep all of its rules.
"""

from cp_inductor.dtensor.rules import draws, loss, partials
from cp_inductor.dtensor.rules.attention import register_dtensor_attention
from cp_inductor.dtensor.rules.on_whole import compute_on_whole
from cp_inductor.dtensor.rules.single_ops import complete_single_ops
from cp_inductor.dtensor.rules.writes import refuse_lost_writes
from cp_inductor.torch_private.dtensor import follow_memory, ops_that_draw, register_dtensor_handler


def register_rules() -> None:
    """Register all, when the library is first used over DTensors; again, nothing changes.

    That is when a backend is loaded, a model parallelized, a tensor sharded, or an attention met.
    """
    register_dtensor_attention()
    for op in loss.COMPUTED:
        register_dtensor_handler(op, loss.compute_loss, is_loss=True)
    refuse_lost_writes()
    complete_single_ops()
    compute_on_whole()
    register_dtensor_handler(partials.ITEM, partials.read_item)
    follow_memory(partials.whole_of_sequence)
    for op in (*draws.OF_VALUES, *draws.FILLS, *ops_that_draw()):
        register_dtensor_handler(op, draws.draw)
