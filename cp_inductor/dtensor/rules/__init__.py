"""What DTensor does with ops that it has no rule for, or a wrong one: a file for each family.

attention           attention over a sharded sequence
loss, dropout       means over the tokens of all ranks; seeds by global position
pointwise           ops that compute every element alone
concatenate         with empty tensors, as caches begin
convolve, gather    along a sharded dim
prefix              sums that accumulate along a sharded dim
linear              batches of more than one, on old versions of torch
on_whole            all other ops without a rule, on all tokens
partials            numbers of which each rank would hold a part
writes              writes in place that DTensor would lose
draws, numbers      one draw, and one number for Python, for all ranks
own_parts           parts of replicated tensors, in graphs that do not know their rank

All are registered here. Importing the package registers attention alone, so that programs which do
not use it keep DTensor's own rules.
"""

from cp_inductor.dtensor.rules.attention import register_dtensor_attention
from cp_inductor.dtensor.rules.concatenate import skip_empty_in_cat
from cp_inductor.dtensor.rules.convolve import gather_in_convolutions
from cp_inductor.dtensor.rules.draws import draw_alike
from cp_inductor.dtensor.rules.gather import add_up_gathered
from cp_inductor.dtensor.rules.numbers import read_on_all
from cp_inductor.dtensor.rules.on_whole import compute_on_whole
from cp_inductor.dtensor.rules.pointwise import shard_pointwise
from cp_inductor.dtensor.rules.prefix import accumulate_in_parts
from cp_inductor.dtensor.rules.writes import refuse_lost_writes


def register_rules() -> None:
    """Register all, when a backend is loaded or a model parallelized; again, nothing changes."""
    register_dtensor_attention()
    refuse_lost_writes()
    skip_empty_in_cat()
    shard_pointwise()
    compute_on_whole()
    read_on_all()
    gather_in_convolutions()
    add_up_gathered()
    accumulate_in_parts()
    draw_alike()
