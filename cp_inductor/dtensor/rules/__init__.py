"""What DTensor does with ops that it has no rule for, or a wrong one: a file for each family.

attention           attention over a sharded sequence
loss                means over the tokens of all ranks
prefix              sums that accumulate along a sharded dim
on_whole            all other ops without a rule, on all tokens
partials            numbers of which each rank would hold a part
writes              writes in place that DTensor would lose
draws, numbers      one draw, and one number for Python, for all ranks
single_ops          empty tensors, and ops that compute every element alone

All are registered here. Where no sequences lie (`sequence_meshes`), losses, partials, draws and
numbers stay DTensor's own. Programs that do not use the library keep all of its rules.
"""

from cp_inductor.dtensor.rules.attention import register_dtensor_attention
from cp_inductor.dtensor.rules.draws import draw_alike
from cp_inductor.dtensor.rules.loss import correct_losses
from cp_inductor.dtensor.rules.numbers import read_on_all
from cp_inductor.dtensor.rules.on_whole import compute_on_whole
from cp_inductor.dtensor.rules.prefix import accumulate_in_parts
from cp_inductor.dtensor.rules.single_ops import complete_single_ops
from cp_inductor.dtensor.rules.writes import refuse_lost_writes


def register_rules() -> None:
    """Register all, when the library is first used over DTensors; again, nothing changes.

    That is when a backend is loaded, a model parallelized, a tensor sharded, or an attention met.
    """
    register_dtensor_attention()
    correct_losses()
    refuse_lost_writes()
    complete_single_ops()
    compute_on_whole()
    read_on_all()
    accumulate_in_parts()
    draw_alike()
