"""Find out whether as many labels count on all ranks, where a loss is a mean over a rank's own.

    cross_entropy(scores, labels)  =>  cross_entropy(scores, count_labels(labels, ...))

Each rank divides by its own number of labels that are not `ignore_index`. The mean of the ranks'
means is the mean of the whole only if all ranks have the same number. These numbers are data, so
ranks compare them in every run, with one message of two numbers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cp_inductor.errors import SequenceMixed
from cp_inductor.torch_private.groups import group_of


def range_over_ranks(number: Tensor, group_name: str) -> tuple[int, int]:
    """Return the least and the greatest of the numbers, integers, that the ranks have."""
    ends = torch.stack([-number, number])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group_of(group_name))
    least, most = ends.tolist()
    return -least, most


c10d = torch.ops._c10d_functional
COUNTED_LOSSES = frozenset({F.cross_entropy, F.nll_loss})


def count_labels(
    labels: Tensor, scores: Tensor, ignore_index: int, group_name: str, site: str
) -> Tensor:
    """Return labels, after checking that equally many of them count on every rank.

    The message is a functional collective, so that a graph that sends parts of an attention keeps
    it in the order of all ranks. The scores, with which the integer labels are compared, only make
    attentions run before this. If the numbers differ, all ranks raise `SequenceMixed`.
    """
    none = scores.flatten()[:0].sum().to(torch.int64)
    count = (labels != ignore_index).sum() + none
    ends = c10d.all_reduce(torch.stack([-count, count]), "max", group_name)
    return check_labels(labels, c10d.wait_tensor(ends), site)


@torch.library.custom_op("cp_inductor::check_labels", mutates_args=())
def check_labels(labels: Tensor, ends: Tensor, site: str) -> Tensor:
    """Return labels, if `ends`, the least number on a rank, negated, and the greatest, agree."""
    least, most = (-ends[0]).item(), ends[1].item()
    if most != least:
        raise SequenceMixed(
            site=site,
            expected="a mean over as many labels on every rank",
            got=f"{least} labels that count on one rank and {most} on another, so that a mean of"
            " their means is not that of the whole sequence",
            remedy="use reduction='sum' and divide by the number of labels of the whole sequence;"
            " or pass DTensors",
        )
    return labels.clone()


@check_labels.register_fake
def _(labels: Tensor, ends: Tensor, site: str) -> Tensor:
    return torch.empty_like(labels)
