"""Sum the gradients of small weights together, in one collective for many.

    a = wait(all_reduce(da));  b = wait(all_reduce(db))
      =>
    both = wait(all_reduce(cat([da.reshape(-1), db.reshape(-1)])));  a, b = split(both)

A parallelized model reads its weights one by one, so their gradients are summed one by one. A small
sum takes as long as a message takes at all. Large ones stay alone: they hide behind the rest of the
backward, and are not copied.

Assumes: a backward of AOTAutograd, in which no attention was lowered yet. Gradients have the same
sizes on all ranks, and their sums the same order.
"""

from __future__ import annotations

from torch import fx

from cp_inductor.torch_private.inductor import merge_all_reduces

# A sum of more bytes is not waited for by its latency alone.
MOST_BYTES = 2**20
# What is summed at once: as in torch's DDP.
MOST_MB = 25


def bucket_sums(gm: fx.GraphModule) -> None:
    """Make one sum of adjacent sums of small gradients, in place."""
    merge_all_reduces(gm, MOST_MB, _is_of_small_gradient)


def _is_of_small_gradient(wait: fx.Node) -> bool:
    value = wait.meta["val"]
    is_known = all(type(size) is int for size in value.shape)
    is_result = all(user.op == "output" for user in wait.users)
    return is_result and is_known and value.nbytes <= MOST_BYTES
