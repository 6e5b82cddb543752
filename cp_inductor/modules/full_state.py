"""State of a model and its optimizer without DTensors: for one file, and other numbers of ranks.

    weight: DTensor (Replicate or Shard), on every rank
      => full_state_dict        {"model": {"weight": whole Tensor on the CPU}}   on the first rank
      => load_full_state_dict   weight: DTensor with its placements, on every rank

torch.distributed.checkpoint.state_dict does the work; it knows FSDP1, FSDP2, DDP, compiled modules,
and names the state of optimizers by parameters. Assumes that every rank holds the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from cp_inductor.errors import InvalidArgument


def full_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return the state of a model, and of its optimizer, as whole tensors on the CPU.

    Call it on all ranks. The first rank writes it: ``if rank == 0: torch.save(state, path)``.

    Args:
        model: distributed by `distribute`, FSDP or DDP, or plain; compiled or not.
        optimizer: of its parameters, after its first step.

    Returns:
        On the first rank ``{"model": ...}``, which ``load_state_dict`` of the model on one process
        reads, and ``"optimizer"`` if one was given, for `load_full_state_dict`. On the other ranks
        the same keys, with nothing in them.

    Raises:
        InvalidArgument: the optimizer holds parameters that are not the model's.
    """
    if optimizer is not None:
        _check_owner(model, optimizer, "full_state_dict")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=options)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=options)
    return state


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any] | None, optimizer: Optimizer | None = None
) -> None:
    """Load what `full_state_dict` returned, on any number of ranks, or on one process.

    Call it on all ranks. The values are those that the first rank passes.

    Args:
        model: built and distributed as for training. Parameters stay the same objects.
        state: on the first rank, as `full_state_dict` returned it; on other ranks it is not read.
        optimizer: built of the model's parameters.

    Raises:
        InvalidArgument: the state lacks "model", or "optimizer" although one was given; the
            optimizer's is what ``optimizer.state_dict()`` returns, is of another class of
            optimizers, or lacks a parameter; names or shapes are not those of the model; or the
            optimizer holds parameters that are not the model's. All ranks refuse, before anything
            is loaded.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    if optimizer is not None:
        _check_owner(model, optimizer, "load_full_state_dict")
    wanted = {"model"} if optimizer is None else {"model", "optimizer"}
    is_first = not several or dist.get_rank() == 0
    said: list[Any] = [_say(state, wanted) if is_first else None]
    if several:
        # All ranks refuse, or none waits for the others.
        dist.broadcast_object_list(said, src=0)
    malformed, missing, has_numbers, entries, saved, shapes = said[0]
    if malformed:
        raise InvalidArgument(
            site="load_full_state_dict",
            expected="a state that full_state_dict(model, optimizer) returned on the first rank",
            got=f"one that cannot be read, of {malformed}",
            remedy="load the file with torch.load, and pass what it holds",
        )
    if missing:
        raise InvalidArgument(
            site="load_full_state_dict",
            expected="a state that full_state_dict(model, optimizer) returned on the first rank",
            got=f"one without {' and '.join(map(repr, missing))}",
            remedy=(
                'give what model.state_dict() returned as {"model": state}'
                if "model" in missing
                else "pass the optimizer to full_state_dict as well, or load the model alone"
            ),
        )
    if has_numbers:
        raise InvalidArgument(
            site="load_full_state_dict",
            expected="the state of an optimizer by names of parameters, as full_state_dict has it",
            got="one by numbers, as optimizer.state_dict() has it",
            remedy="save full_state_dict(model, optimizer), on one process as well",
        )
    _check_shapes(model, shapes)
    if optimizer is not None:
        _check_state(model, optimizer, saved)
    given = state if is_first and state is not None else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several)
    set_model_state_dict(model, dict(given.get("model", {})), options=options)
    if optimizer is not None:
        moments = dict(given.get("optimizer", {}))
        # Schedulers add entries to groups (`initial_lr`), which torch does not load otherwise.
        for group in optimizer.param_groups:
            for entry in entries:
                group.setdefault(entry, None)
        set_optimizer_state_dict(model, optimizer, moments, options=options)


def _say(state: Any, wanted: set[str]) -> tuple[Any, ...]:
    """Return what the first rank says of its state.

    Returns:
        What it is instead of a state, or ""; which of its parts are missing; whether those of the
        optimizer are named by numbers; entries of its groups; and of its state, by parameter; and
        the shapes of the model's tensors, by name.
    """
    parts, kinds = {}, type(state).__name__
    try:
        parts = dict(state or {})
        kinds = f"{ ({name: type(part).__name__ for name, part in parts.items()}) }"
        given = {name: dict(part) for name, part in parts.items() if name in wanted}
        moments = given.get("optimizer", {})
        groups, kept = (moments.get(name, {}) for name in ("param_groups", "state"))
        # Those of optimizer.state_dict() are numbers, of which torch would load nothing.
        has_numbers = any(not isinstance(name, str) for one in groups for name in one["params"])
        entries = sorted({key for one in groups for key in one})
        saved = {name: sorted(of_one) for name, of_one in kept.items()}
    except (TypeError, ValueError, AttributeError, KeyError):
        return kinds, [], False, [], {}, {}
    shapes = {name: _shape(value) for name, value in given.get("model", {}).items()}
    return "", sorted(wanted - given.keys()), has_numbers, entries, saved, shapes


def _shape(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _check_shapes(model: nn.Module, given: Mapping[str, str]) -> None:
    """Refuse a state of another model, which torch would refuse on the first rank alone."""
    own = {name: _shape(value) for name, value in get_model_state_dict(model).items()}
    wrong = [name for name in {**own, **given} if own.get(name) != given.get(name)]
    if wrong:
        has, gets = (one.get(wrong[0], "nothing of this name") for one in (own, given))
        more = f", and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise InvalidArgument(
            site=f"load_full_state_dict, {wrong[0]}{more}",
            expected=f"{has}, as the model has it",
            got=gets,
            remedy="build the model as it was when the state was saved; give names as"
            " model.state_dict() has them, without prefixes of wrappers",
        )


def _check_owner(model: nn.Module, optimizer: Optimizer, site: str) -> None:
    """Refuse an optimizer of parameters that the model does not have, as before `distribute`."""
    own = {id(one) for one in model.parameters()}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    strange = [one for one in held if id(one) not in own]
    if strange:
        raise InvalidArgument(
            site=site,
            expected="an optimizer of the model's parameters",
            got=f"one that holds {len(strange)} of {len(held)} parameters that the model has not:"
            " distribute, FSDP and to_empty make new ones",
            remedy="build the optimizer after them: it would train nothing",
        )


def _check_state(
    model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Sequence[str]]
) -> None:
    """Refuse what was saved of another optimizer, of which torch would load a part, or wait."""
    own = get_optimizer_state_dict(model, optimizer)["state"]
    assert isinstance(own, dict)
    for name, entries in own.items():
        assert isinstance(entries, dict)
        if sorted(entries) != list(saved.get(name, ())):
            raise InvalidArgument(
                site=f"load_full_state_dict, state of {name}",
                expected=f"{', '.join(sorted(entries)) or 'nothing'}: what this"
                f" {type(optimizer).__name__} keeps of it",
                got=", ".join(saved.get(name, ())) or "nothing",
                remedy="build the optimizer as it was when the state was saved, with the same"
                " parameters; or load the model alone: load_full_state_dict(model, state)",
            )
