"""Packed batches: fill them up to a few lengths, and hand documents from replica to replica.

    input_ids     (1, 301)    =>  (1, 320)   19 x pad_token_id
    labels        (1, 301)    =>  (1, 320)   19 x -100
    position_ids  (1, 301)    =>  (1, 320)   19 x 0: each token is a document of its own
    cu_seqlens 0 3 3 7, T = 9   =>  0 0 0 2 2 2 2 3 3

Few lengths compile few graphs. Padding changes no loss and no gradient: no other token attends to
it, and it has no label. If the plan is made for each batch, attention computes next to nothing for
it: one pair per token.

    replica 0   32k 32k                      a document of 32k, and 32 of 1k
    replica 1   1k 1k 1k ... (64 of them)    likewise

Tokens move before a batch is sharded: kilobytes, where attention would move its tensors. Which
document goes where, every replica derives alike from the lengths that they tell each other. Every
replica says in the same message what its batch cannot do, so that all refuse together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from cp_inductor.dtensor.limits import check_mesh
from cp_inductor.errors import InvalidArgument
from cp_inductor.plan.checks import MAX_LENGTH, check_count

IGNORED_LABEL = -100
# Capacities between two powers of two. The longest padding is 1 / (PARTS + 1) of a batch.
PARTS = 4
LEAST = 64
# Usual names of inputs that are padded with one number, or with new ones, or tell documents apart.
_FIXED = {"labels": IGNORED_LABEL, "position_ids": 0, "attention_mask": 0}
_NUMBERED = ("seq_idx", "document_ids")
_TELL_APART = ("position_ids", *_NUMBERED, "attention_mask")
# The length of a document whose attention takes as long as all else for its tokens, if nobody says
# it: twelve times a hidden size of 4,096.
EVEN_LENGTH = 49_152
# How many times the tokens of the longest batch a replica may get.
SLACK = 1.2
BALANCED = "cp_inductor.balanced"


def capacity_of(length: int) -> int:
    """Return the length that a batch of `length` tokens is filled up to, at least `length`.

    Powers of two, at least 64, and three lengths between each two of them.
    """
    if length <= LEAST:
        return LEAST
    power: int = 1 << ((length - 1).bit_length() - 1)
    step = power // PARTS
    return -(-length // step) * step


def pad_packed(
    batch: Mapping[str, Any],
    length: int | None = None,
    *,
    pad_token_id: int = 0,
    values: Mapping[str, int | float] | None = None,
) -> dict[str, Any]:
    """Fill a packed batch up at its end.

    Args:
        batch: the inputs of the model by name, before they are sharded. Tensors (B, S) are filled
            up, S as in `input_ids`; everything else is left as it is. Labels are filled with -100,
            positions with 0, which begins a document for each token, `attention_mask` with 0,
            document numbers with new numbers.
        length: to fill up to, in tokens. None chooses the next length of `capacity_of`: lengths
            from 256 to 131,072 then compile 37 graphs.
        pad_token_id: for `input_ids`.
        values: for tensors of other names.

    Returns:
        The batch, filled up; tensors that need no filling are the same.

    Raises:
        InvalidArgument: it is longer than `length`; it holds a (B, S) tensor of an unknown name;
            it holds boundaries of sequences, which would have to count the padding; or nothing in
            it tells documents apart, so that tokens would attend to the padding.
    """
    fixed = {**_FIXED, "input_ids": pad_token_id, **(values or {})}
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if tokens is batch or not isinstance(tokens, Tensor) or tokens.ndim != 2:
        got = (
            f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        )
        raise _no_padding("input_ids of shape (B, S)", got, "give a dict, {'input_ids': ids, ...}")
    shape = tokens.shape
    missing = (capacity_of(shape[1]) if length is None else length) - shape[1]
    if missing < 0:
        got = f"{shape[1]} tokens"
        raise _no_padding(f"at most length={length} tokens", got, "give a greater length, or None")
    bounds = [name for name in batch if name.startswith(("cu_seq", "max_length"))]
    if bounds:
        remedy = "give position_ids, which begin at 0 in each document, and leave these out"
        raise _no_padding("documents by numbers or positions", ", ".join(bounds), remedy)
    if not any(isinstance(batch.get(name), Tensor) for name in (*_TELL_APART, *(values or {}))):
        remedy = "give position_ids; of one document per entry, torch.arange(S)"
        raise _no_padding(f"one of {', '.join(_TELL_APART)}", ", ".join(batch), remedy)
    filled = dict(batch)
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor) or tensor.shape != shape or not missing:
            continue
        if name in fixed:
            end = tensor.new_full((shape[0], missing), fixed[name])
        elif name in _NUMBERED:
            numbers = torch.arange(1, missing + 1, dtype=tensor.dtype, device=tensor.device)
            end = tensor.amax(1, keepdim=True) + numbers
        else:
            remedy = f"say what fills it up: values={{{name!r}: ...}}"
            raise _no_padding("tensors that are known by name", name, remedy)
        filled[name] = torch.cat([tensor, end], 1)
    return filled


def document_numbers(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return the number of each token's document, (T,) int64, the same on all ranks.

    Args:
        cu_seqlens: (N + 1,), where each document begins, and where the last ends; the same on all
            ranks, or a DTensor.
        length: T, tokens of the whole sequence. Those behind the last document are one more.
    """
    whole = cu_seqlens.full_tensor() if isinstance(cu_seqlens, DTensor) else cu_seqlens
    positions = torch.arange(length, device=whole.device, dtype=whole.dtype)
    return torch.searchsorted(whole[1:].contiguous(), positions, right=True)


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
    check_mesh(replicas, site=BALANCED)
    check_count("even_length", even_length, 1, MAX_LENGTH, site=BALANCED)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens, 1, MAX_LENGTH, site=BALANCED)
    ranks = replicas.mesh.flatten().tolist()
    group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    source = iter(batches)
    while True:
        said: _Said | tuple[str, ...] | None
        batch, fields, said, failed = None, dict[str, Tensor](), None, None
        try:
            batch = next(source, None)
            if batch is not None:
                said, fields = _documents_of(batch)
        except InvalidArgument as error:
            said = error.expected, error.got, error.remedy
        except Exception as error:  # of the loader; the others would wait
            said, failed = ("a batch", type(error).__name__, "see the error on that replica"), error
        all_said: list[Any] = [None] * len(ranks)
        dist.all_gather_object(all_said, said, group=group)
        if failed is not None:
            raise failed
        _check(all_said)
        if batch is None:
            return
        lengths, labelled, _ = zip(*all_said, strict=True)
        goes = assign(lengths, labelled, even_length, max_tokens)
        moved = {} if goes is None else _hand_over(fields, lengths, goes, group)
        yield pad_packed({**batch, **moved})


def _hand_over(
    fields: Mapping[str, Tensor],
    lengths: Sequence[Sequence[int]],
    goes: Sequence[Sequence[int]],
    group: dist.ProcessGroup,
) -> dict[str, Tensor]:
    """Return (1, T, ...), the documents that this replica gets of each field (B S, ...)."""
    rank = dist.get_rank(group)
    pairs = [list(zip(*row, strict=True)) for row in zip(lengths, goes, strict=True)]
    own = [[length for length, to in row if to == rank] for row in pairs]
    # Tokens, by the replica that they come from, or go to.
    arriving = list(map(sum, own))
    leaving = [sum(n for n, to in pairs[rank] if to == goal) for goal in range(len(goes))]
    # By where they go, else in their order.
    order = sorted(range(len(pairs[rank])), key=goes[rank].__getitem__)
    moved = {}
    for name, tensor in fields.items():
        if name in _NUMBERED:
            documents = torch.tensor([length for row in own for length in row])
            whole = torch.arange(len(documents)).repeat_interleave(documents)
        else:
            parts = tensor.cpu().split(list(lengths[rank]))
            sent = torch.cat([parts[index] for index in order])
            whole = sent.new_empty(sum(arriving), *sent.shape[1:])
            dist.all_to_all_single(whole, sent, arriving, leaving, group=group)
        moved[name] = whole.to(tensor)[None]
    return moved


class _Said(NamedTuple):
    """What a replica tells the others of its batch, or why it cannot, or None behind the last."""

    lengths: tuple[int, ...]  # of its documents, one behind the other, in tokens
    labelled: tuple[bool, ...]  # whether each has a token to learn from; true without labels
    kinds: tuple[tuple[str, str], ...]  # names and dtypes of what moves


def _check(all_said: Sequence[Any]) -> None:
    """Refuse, on all replicas, what one of them cannot do."""
    for rank, said in enumerate(all_said):
        if said is not None and not isinstance(said, _Said):
            expected, got, remedy = said
            raise _refusal(expected, f"{got} on replica {rank}", remedy)
    ended = [rank for rank, said in enumerate(all_said) if said is None]
    if ended and len(ended) < len(all_said):
        remedy = "give all replicas as many batches (drop_last=True of DistributedSampler)"
        raise _refusal("a batch of every replica", f"none of replicas {ended}", remedy)
    kinds = {said.kinds for said in all_said if said is not None}
    if len(kinds) > 1:
        got = " and ".join(str(dict(fields)) for fields in sorted(kinds))
        raise _refusal("the same inputs, of the same dtypes, on all replicas", got, "give them all")


def assign(
    lengths: Sequence[Sequence[int]],
    labelled: Sequence[Sequence[bool]],
    even_length: int,
    max_tokens: int | None,
) -> list[list[int]] | None:
    """Return the replica that each document goes to; None if all are best left where they are.

    The dearest document goes first, to the replica that has least to do and has room for it. Each
    replica gets one of those that have a token to learn from. See `_Said` and `balanced`.
    """
    world = range(len(lengths))
    most = max_tokens or int(SLACK * max(map(sum, lengths)))
    work = [[length * (1 + length / even_length) for length in row] for row in lengths]
    documents = [(-n, rank, index) for rank in world for index, n in enumerate(lengths[rank])]
    goes = [[0] * len(row) for row in lengths]
    load, tokens, learns = [0.0 for _ in world], [0 for _ in world], set[int]()
    for _, rank, index in sorted(documents):
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
    for name, step in {"position_ids": 1, **dict.fromkeys(_NUMBERED, 0)}.items():
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
    ends = {"labels": ("first", begins), "shift_labels": ("last", begins.roll(-1))}
    for name, (end, place) in ends.items():
        if name in flat and bool((flat[name].cpu()[place] != IGNORED_LABEL).any()):
            raise _refusal(
                f"{IGNORED_LABEL} as the {end} of the {name} of each document",
                "a label that is predicted from another document",
                "set it; transformers' DataCollatorWithFlattening does",
            )
    starts = begins.nonzero().flatten()
    lengths = starts.diff(append=torch.tensor([len(begins)])).tolist()
    labels = flat.get("shift_labels", flat.get("labels"))
    learnt = torch.ones(len(begins)) if labels is None else labels.cpu() != IGNORED_LABEL
    labelled = tuple(bool(document.any()) for document in learnt.split(lengths))
    kinds = tuple((name, str(tensor.dtype)) for name, tensor in flat.items())
    return _Said(tuple(lengths), labelled, kinds), flat


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
    named = batch if isinstance(batch, Mapping) else {}
    labels = named.get("shift_labels", named.get("labels"))
    is_there = isinstance(labels, Tensor) and labels.ndim > 1
    first = 0 if "shift_labels" in named else 1
    own = int((labels[:, first:] != IGNORED_LABEL).sum()) if is_there else 0
    # Those that have none say so before they raise: the others would wait.
    sums = torch.tensor([own, not own, not is_there]).double().to(replicas.device_type)
    dist.all_reduce(sums, group=replicas.get_group())
    total, without, unnamed = sums.tolist()
    if unnamed:
        names = ", ".join(map(str, named)) or type(batch).__name__
        got = f"none on {unnamed:.0f} of {replicas.size()} replicas; here {names}"
        raise _refusal("labels or shift_labels of shape (B, S)", got, "name them so", site)
    if without:
        got = f"none on {without:.0f} of {replicas.size()}"
        remedy = "leave out batches of which nothing is to be learnt"
        raise _refusal("a labelled token on every replica", got, remedy, site)
    return replicas.size() * own / float(total)


def _refusal(expected: str, got: str, remedy: str, site: str = BALANCED) -> InvalidArgument:
    return InvalidArgument(site=site, expected=expected, got=got, remedy=remedy)


_no_padding = partial(_refusal, site="pad_packed")
