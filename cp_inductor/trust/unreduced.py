"""Notice gradients of shards that nobody sums over the ranks before an optimizer uses them.

    rank 0: weight.grad = 0.3        rank 1: weight.grad = 0.1        weight is the same on both
      => SequenceWarning at the first optimizer step: ranks will train apart

Every way to sum gradients ends with the same numbers on all ranks. So ranks compare a few numbers
of each gradient once, through the store, when the first optimizer is about to use them; clipping
and unscaling do not change the result. Until then regions and compiled graphs note the parameters
that they use together with shards.

Not noticed are gradients that are wrong on all ranks in the same way; optimizers that are compiled,
or not of torch.optim; parameters that differ between ranks, such as experts and shards of FSDP; and
programs that stop reducing later.
"""

from __future__ import annotations

import gc
import math
import pickle
import warnings
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from cp_inductor import config
from cp_inductor.errors import SequenceWarning
from cp_inductor.kept import on_reset
from cp_inductor.trust.agreement import agreed_of
from cp_inductor.trust.claims import is_readable
from cp_inductor.trust.log import SOON_S, Log

# How many numbers of a parameter, and of its gradient, are compared beside their norms.
NUM_SAMPLES = 8

# Gradients of different tokens differ by at least this part of their norms. Sums in different
# orders differ by much less, also in bfloat16.
LEAST_DIFFERENCE = 0.05

# How many parameters a warning names.
MOST_NAMED = 4

# At how many optimizer steps this is tried; a rank waits for the others at each, but not for long.
MOST_TRIES = 8


class _GradientWatch:
    """The parameters that were used with the shards of a group, until they are judged."""

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name
        self.noted: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        self.samples: dict[Tensor, Any] = {}
        self.num_tries, self.is_over = 0, False
        self.handle: Any = register_optimizer_step_pre_hook(self._look)

    def _look(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.is_over or torch.compiler.is_compiling():
            return
        self.num_tries += 1
        self.samples = self.samples or self._samples_of(optimizer)
        compared, own = list(self.samples), list(self.samples.values())
        log = agreed_of(self.group_name) if own else None
        told = [] if log is None else _swap(log, own)
        if told or (own and log is None) or self.num_tries == MOST_TRIES:
            self.is_over, self.samples = True, {}
            self.noted.clear()
        apart = {number for other in told for number in _apart(own, other)}
        if apart and log is not None and log.rank == log.ranks[0]:  # for all ranks
            _warn([compared[number] for number in sorted(apart)])

    def _samples_of(self, optimizer: Optimizer) -> dict[Tensor, Any]:
        """Return an optimizer's parameters, and samples, as soon as it has gradients."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        compared = [p for p in held if p in self.noted and is_readable(p.grad)]
        samples = {p: (p.shape, _sample(p), _sample(p.grad)) for p in compared}
        # Before there is a gradient there is nothing to compare.
        norms = [grad[0] for _, _, grad in samples.values()]
        return samples if any(math.isfinite(norm) and norm > 0 for norm in norms) else {}


_watches: dict[str, _GradientWatch] = {}


def watch_gradients(group_name: str, tensors: Sequence[Any]) -> None:
    """Note parameters among the arguments of an op, or of a graph, that are used with shards."""
    watch = _watches.get(group_name)
    if watch is not None and watch.is_over:
        watch.handle.remove()  # not from within the hook: an optimizer is iterating over all hooks
        return
    if not config.check_agreement:
        return
    plain = [t for t in tensors if type(t) is nn.Parameter and t.requires_grad]
    if plain and torch.is_grad_enabled():
        watch = watch or _watches.setdefault(group_name, _GradientWatch(group_name))
        for parameter in plain:
            watch.noted[parameter] = None


@on_reset
def forget_watches() -> None:
    """Let gradients be compared anew."""
    for watch in _watches.values():
        watch.handle.remove()
    _watches.clear()


def _swap(log: Log, samples: object) -> list[Any]:
    """Leave samples for the other ranks, and return theirs; none if some leave none in time."""
    own: Any = pickle.dumps(samples)
    key = "gradients/"
    with suppress(DistError):
        log.ask(lambda: log.store.set(f"{key}{log.rank}", own), SOON_S)
        for waited_s in log.rounds():
            told = log.ask(partial(log.told, log.others, key), SOON_S)
            if len(told) == len(log.others):
                return list(told.values())
            if waited_s > SOON_S:
                break
    return []


def _sample(tensor: Tensor | None) -> list[float]:
    """Return the norm of a tensor, and some of its numbers."""
    assert tensor is not None
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    some = flat[:: max(1, flat.numel() // NUM_SAMPLES)][:NUM_SAMPLES]
    return [float(torch.linalg.vector_norm(flat, dtype=torch.float64)), *some.tolist()]


def _apart(own: Sequence[Any], other: Sequence[Any]) -> list[int]:
    """Return which parameters are the same on two ranks, but have gradients of different tokens."""
    if len(own) != len(other):
        return []
    return [
        number
        for number, ((*here, grad), (*there, their)) in enumerate(zip(own, other, strict=True))
        if here == there and math.dist(grad, their) > LEAST_DIFFERENCE * max(grad[0], their[0])
    ]


def _warn(parameters: Sequence[Tensor]) -> None:
    """Warn of parameters by their names in their models, which only this needs."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    known = {
        id(parameter): name.replace("_orig_mod.", "")  # of a model that is compiled
        for module in modules
        if id(module) not in inner
        for name, parameter in module.named_parameters()
    }
    names = [known.get(id(p), f"a parameter of shape {tuple(p.shape)}") for p in parameters]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    warnings.warn(
        "ranks that share a sequence are about to train apart: the gradients of"
        f" {', '.join(names[:MOST_NAMED])}{more} are of each rank's own tokens; call"
        " cp_inductor.reduce_gradients(model, mesh) after the backward, or let"
        ' DistributedDataParallel or FSDP reduce them; or leave out gradients="partial"',
        SequenceWarning,
        stacklevel=4,
    )
