"""Hand documents from one data-parallel replica to another, so that the work of all is even.

    replica 0   32k 32k                      a document of 32k, and 32 of 1k
    replica 1   1k 1k 1k ... (64 of them)    likewise

Tokens move before a batch is sharded: kilobytes, where attention would move its tensors. Which
document goes where, every replica derives alike from the lengths that they tell each other: the
dearest document first, to the replica that has least to do and has room for it. If that makes the
busiest replica's work no less, the batches stay as they are.

Every replica says in the same message what its batch cannot do, so that all refuse together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cp_inductor.dtensor.limits import check_mesh
from cp_inductor.dtensor.pad import IGNORED_LABEL, NUMBERED, pad_packed
from cp_inductor.errors import InvalidArgument
from cp_inductor.plan.checks import MAX_LENGTH, check_count

# The length of a document whose attention takes as long as all else for its tokens, if nobody says
# it: twelve times a hidden size of 4,096.
EVEN_LENGTH = 49_152
SITE = "cp_inductor.balanced"
# Of the longest batch, what a replica may get.
SLACK = 1.2


def balanced(
    batches: Iterable[Mapping[str, Any]],
    replicas: DeviceMesh,
    *,
    even_length: int = EVEN_LENGTH,
    max_tokens: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Hand documents from one data-parallel replica to another, before each step.

        for batch in cp_inductor.prepared(cp_inductor.balanced(loader, mesh["dp"])):
            weight = cp_inductor.loss_weight(batch, mesh["dp"])
            (model(**shard(batch)).loss * weight).backward()

    Replicas get batches of different lengths, each filled up by `pad_packed`, and together train on
    the documents that they would have trained on; multiply the loss by `loss_weight`. A process
    group of its own is made for it, so it may run in the thread of `prepared`.

    Args:
        batches: whole batches of this replica, the same on all ranks that share its sequences:
            inputs of the model by name, documents told apart as in `pad_packed`. Tensors
            (B, S, ...) move with their tokens, and become (1, T, ...); all else stays.
        replicas: one axis of a mesh, whose ranks train on batches of their own.
        even_length: tokens of a document whose attention takes as long as all else that is computed
            for it: about 12 times the hidden size of a dense transformer.
        max_tokens: that a replica may get; None: a fifth more than the longest batch.

    Yields:
        The batches. Where moving makes the busiest replica no faster, each replica has its own.

    Raises:
        InvalidArgument: on all replicas, if one of them has no batch left and another has one, or
            has a batch that does not say its documents, or whose positions do not begin at 0 in
            each, or in which a label of one document is predicted from another; or its loader
            raised, which that replica raises itself. There is no mesh; a number is not positive.
        UnsupportedPlacement: the mesh has several axes.
    """
    among = _Replicas(replicas, even_length, max_tokens)
    source = iter(batches)
    while (batch := among.exchange(source)) is not None:
        yield batch


@dataclass(frozen=True, slots=True)
class _Said:
    """What a replica tells the others of its batch.

    Attributes:
        has_batch: or it has had the last one.
        lengths: of its documents, one behind the other, in tokens.
        labelled: whether each has a token to learn from; true where the batch has no labels.
        kinds: names and dtypes of what moves.
        refusal: why its documents cannot move: expected, got, remedy.
    """

    has_batch: bool
    lengths: tuple[int, ...] = ()
    labelled: tuple[bool, ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    refusal: tuple[str, str, str] | None = None


class _Replicas:
    """The replicas of one position of the sequence. See `balanced`."""

    def __init__(self, mesh: DeviceMesh, even_length: int, max_tokens: int | None) -> None:
        check_mesh(mesh, site=SITE)
        check_count("even_length", even_length, 1, MAX_LENGTH, site=SITE)
        if max_tokens is not None:
            check_count("max_tokens", max_tokens, 1, MAX_LENGTH, site=SITE)
        self.even_length, self.max_tokens = even_length, max_tokens
        ranks = mesh.mesh.flatten().tolist()
        self.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def exchange(self, source: Iterator[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return this replica's batch after documents were handed over; None behind the last."""
        batch, fields, said, failed = None, dict[str, Tensor](), _Said(has_batch=False), None
        try:
            batch = next(source, None)
            if batch is not None:
                said, fields = _documents_of(batch)
        except InvalidArgument as error:
            said = _Said(True, refusal=(error.expected, error.got, error.remedy))
        except Exception as error:  # of the loader; the others would wait
            failed, got = error, f"{type(error).__name__}"
            said = _Said(True, refusal=("a batch", got, "see the error on that replica"))
        all_said: list[Any] = [None] * self.size
        dist.all_gather_object(all_said, said, group=self.group)
        if failed is not None:
            raise failed
        _check(all_said)
        if batch is None:
            return None
        lengths = [one.lengths for one in all_said]
        labelled = [one.labelled for one in all_said]
        goes = assign(lengths, labelled, self.even_length, self.max_tokens)
        if goes is None:
            return pad_packed(batch)
        moved = {name: self._move(tensor, lengths, goes) for name, tensor in fields.items()}
        own = torch.tensor([n for row in _of(self.rank, lengths, goes) for n in row])
        for name in moved.keys() & set(NUMBERED):
            numbers = torch.arange(len(own)).repeat_interleave(own)
            moved[name] = numbers.to(moved[name])[None]
        return pad_packed({**batch, **moved})

    def _move(
        self, tensor: Tensor, lengths: Sequence[Sequence[int]], goes: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return (1, T, ...), the documents that this replica gets of a field (B S, ...)."""
        to, own = goes[self.rank], tensor.cpu().split(list(lengths[self.rank]))
        by_goal = sorted(range(len(own)), key=to.__getitem__)  # else in their order
        sent = torch.cat([own[index] for index in by_goal])
        sizes = [sum(len(own[i]) for i in by_goal if to[i] == goal) for goal in range(self.size)]
        arriving = [sum(row) for row in _of(self.rank, lengths, goes)]
        arrived = sent.new_empty(sum(arriving), *sent.shape[1:])
        dist.all_to_all_single(arrived, sent, arriving, sizes, group=self.group)
        return arrived.to(tensor.device)[None]


def _of(
    rank: int, lengths: Sequence[Sequence[int]], goes: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return the lengths of what a replica gets, by the replica that it comes from."""
    return [
        [length for length, to in zip(row, places, strict=True) if to == rank]
        for row, places in zip(lengths, goes, strict=True)
    ]


def _check(all_said: Sequence[_Said]) -> None:
    """Refuse, on all replicas, what one of them cannot do."""
    for rank, one in enumerate(all_said):
        if one.refusal is not None:
            expected, got, remedy = one.refusal
            raise _refusal(expected, f"{got} on replica {rank}", remedy)
    ended = [rank for rank, one in enumerate(all_said) if not one.has_batch]
    if ended and len(ended) < len(all_said):
        remedy = "give all replicas as many batches (drop_last=True of DistributedSampler)"
        raise _refusal("a batch of every replica", f"none of replicas {ended}", remedy)
    kinds = {one.kinds for one in all_said}
    if len(kinds) > 1:
        got = " and ".join(str(dict(one)) for one in sorted(kinds))
        raise _refusal("the same inputs, of the same dtypes, on all replicas", got, "give them all")


def assign(
    lengths: Sequence[Sequence[int]],
    labelled: Sequence[Sequence[bool]],
    even_length: int,
    max_tokens: int | None,
) -> list[list[int]] | None:
    """Return the replica that each document goes to; None if all are best left where they are.

    Args:
        lengths: of each replica, tokens of its documents.
        labelled: whether they have a token to learn from; every replica needs one.
        even_length: tokens of a document whose attention takes as long as all else.
        max_tokens: that a replica may get; None: a fifth more than the longest batch has.
    """
    world = range(len(lengths))
    most = max_tokens or int(SLACK * max(map(sum, lengths)))
    work = [[length * (1 + length / even_length) for length in row] for row in lengths]
    documents = [(rank, index) for rank in world for index in range(len(lengths[rank]))]
    goes = [[0] * len(row) for row in lengths]
    load, tokens, learns = [0.0 for _ in world], [0 for _ in world], set[int]()
    for rank, index in sorted(documents, key=lambda at: (-lengths[at[0]][at[1]], at)):
        length = lengths[rank][index]
        room = [to for to in world if tokens[to] + length <= most]
        if not room:
            return None
        # Of those that have as little to do, its own.
        to = min(room, key=lambda to: (load[to], to != rank, to))
        goes[rank][index] = to
        load[to] += work[rank][index]
        tokens[to] += length
        learns |= {to} if labelled[rank][index] else set()
    is_better = max(load) < max(map(sum, work))
    return goes if is_better and len(learns) == len(world) else None


def _documents_of(batch: Mapping[str, Any]) -> tuple[_Said, dict[str, Tensor]]:
    """Tell the documents of a batch apart; return its tensors that have tokens as well, (B S, ...).

    Raises:
        InvalidArgument: as in `pad_packed`, or a label is predicted from another document.
    """
    pad_packed(batch)  # refuses what is not a batch of documents
    shape = batch["input_ids"].shape
    fields = {
        name: tensor
        for name, tensor in sorted(batch.items())
        if isinstance(tensor, Tensor) and tensor.shape[:2] == shape
    }
    begins = torch.zeros(shape, dtype=torch.bool)
    begins[:, 0] = True
    for name, step in (("position_ids", 1), *((name, 0) for name in NUMBERED)):
        if name in fields:
            begins[:, 1:] |= fields[name].cpu().diff(dim=1) != step
    begins = begins.flatten()
    flat = {name: tensor.flatten(0, 1) for name, tensor in fields.items()}
    if "position_ids" in flat and bool(flat["position_ids"].cpu()[begins].any()):
        raise _refusal(
            "positions that begin at 0 in each document",
            "one that begins elsewhere, as branches of a tree do",
            "balance batches of documents; a branch needs its prompt on the same replica",
        )
    for name, place, end in (
        ("labels", begins, "first"),
        ("shift_labels", begins.roll(-1), "last"),
    ):
        if name in flat and bool((flat[name].cpu()[place] != IGNORED_LABEL).any()):
            raise _refusal(
                f"{IGNORED_LABEL} as the {end} of the {name} of each document",
                "a label that is predicted from another document",
                "set it; transformers' DataCollatorWithFlattening does",
            )
    starts = [*begins.nonzero().flatten().tolist(), len(begins)]
    lengths = [end - start for start, end in pairwise(starts)]
    labels = flat.get("shift_labels", flat.get("labels"))
    learnt = torch.ones(len(begins)) if labels is None else labels.cpu() != IGNORED_LABEL
    labelled = tuple(bool(document.any()) for document in learnt.split(lengths))
    kinds = tuple((name, str(tensor.dtype)) for name, tensor in flat.items())
    return _Said(True, tuple(lengths), labelled, kinds), flat


def loss_weight(batch: Mapping[str, Any], replicas: DeviceMesh) -> float:
    """Return by what to multiply a replica's mean loss, so that all together train on one mean.

        (model(**shard(batch)).loss * cp_inductor.loss_weight(batch, mesh["dp"])).backward()

    Data parallelism takes the mean of the replicas' gradients. Where they have different numbers of
    labelled tokens, that is not the gradient of the mean over all tokens; with the weight it is.
    All ranks call it, in every step.

    Args:
        batch: whole, as before it is sharded, with "labels", which the model shifts, or
            "shift_labels", which it does not.
        replicas: one axis of a mesh, whose ranks train on batches of their own.

    Returns:
        The number of replicas times this one's part of all labelled tokens.

    Raises:
        InvalidArgument: on all ranks: a replica has no labels (B, S) by these names, or no labelled
            token, so that its mean is not a number. There is no mesh.
        UnsupportedPlacement: the mesh has several axes.
    """
    site = "cp_inductor.loss_weight"
    check_mesh(replicas, site=site)
    given = batch if isinstance(batch, Mapping) else {}
    labels = given.get("shift_labels", given.get("labels"))
    is_there = isinstance(labels, Tensor) and labels.ndim > 1
    first = 0 if "shift_labels" in given else 1
    own = int((labels[:, first:] != IGNORED_LABEL).sum()) if is_there else 0
    # Those that have none say so before they raise: the others would wait.
    said = torch.tensor([own, not own, not is_there], dtype=torch.float64)
    sums = said.to(replicas.device_type)
    dist.all_reduce(sums, group=replicas.get_group())
    total, without, unnamed = sums.tolist()
    if unnamed:
        names = ", ".join(map(str, given)) or type(batch).__name__
        got = f"none on {unnamed:.0f} of {replicas.size()} replicas; here {names}"
        raise _refusal("labels or shift_labels of shape (B, S)", got, "name them so", site)
    if without:
        got = f"none on {without:.0f} of {replicas.size()}"
        remedy = "leave out batches of which nothing is to be learnt"
        raise _refusal("a labelled token on every replica", got, remedy, site)
    return replicas.size() * own / float(total)


def _refusal(expected: str, got: str, remedy: str, site: str = SITE) -> InvalidArgument:
    return InvalidArgument(site=site, expected=expected, got=got, remedy=remedy)
