"""Judge a record: find which tracks are the sequence, and what each op does along them.

Assumes: ranks hold contiguous shards, or the layout is given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from cp_inductor.errors import SequenceMixed, SequenceWarning
from cp_inductor.sequence.follow_ops import Dims, OpEffect, Value
from cp_inductor.sequence.record import Record
from cp_inductor.sequence.tracks import (
    COMPUTED,
    FREE,
    GIVEN,
    Born,
    Dim,
    Kind,
    Track,
    United,
    expand,
)

aten = torch.ops.aten

REMEDY = (
    "compute it before the sequence is sharded, or pass DTensors; if each rank should compute"
    " it within its own shard, set cp_inductor.config.check_sequence = False"
)
REMEDY_POSITIONS = (
    "pass the positions as an input that is sharded like the tokens, or count them from rank"
    " * length; cp_inductor.config.check_sequence = False turns this check off"
)


def warn(text: str) -> None:
    """Warn of something that cannot be decided."""
    warnings.warn(text, SequenceWarning, stacklevel=2)


_STACKS = frozenset({aten.stack.default, aten.cat.default})


@dataclass(frozen=True, slots=True)
class _Label:
    """A part of the sequence that a value is made of.

    Attributes:
        step: where it was made.
        picked: the track and number of the token that was picked; None if all tokens were reduced.

    Counts of tokens (those of an expert, say) may decide where tokens go, and back again. Whether
    that mixes tokens cannot be seen.
    """

    step: OpEffect
    picked: tuple[Track, int] | None = None


class Judge:
    """Reads a record: which tracks are the sequence, and what each op does along them."""

    def __init__(self, record: Record, rank: int, layout: str) -> None:
        self.record = record
        self.rank = rank
        self.layout = layout
        sequences = [dim for step in record.steps for dim in step.sequences] or record.sequences
        self.sequences = {part.track.outermost() for dim in sequences for part in expand(dim)[:1]}
        # What the program says is a sequence, and no attention need reach: labels.
        self.stated = {
            part.track.outermost() for dim in record.sequences for part in expand(dim)[:1]
        }
        self.labels: dict[Value, frozenset[_Label]] = {}
        self.warned = set[str]()
        given = [dim for value in record.given for dim in value.dims if dim]
        given = [dim for dim in given if dim[0].born is GIVEN]
        self.attended = self._reach(sequences)
        self.given = self._reach(given)
        # What is no piece of a shard: all that is attended, or that was given.
        self.shards = {span for dim in (*sequences, *given) for span in self._spans(dim)}

    def _spans(self, dim: Dim) -> Iterator[tuple[Track, int, int]]:
        """Yield from where to where a dim reaches along each track of the sequence."""
        for part in expand(dim):
            root, shift = part.track.find()
            if root in self.sequences:
                yield root, shift, shift + part.size

    def _reach(self, dims: Iterable[Dim]) -> dict[Track, tuple[int, int]]:
        """Return the range of positions that dims cover on each track of the sequence."""
        ranges: dict[Track, tuple[int, int]] = {}
        for dim in dims:
            for root, start, end in self._spans(dim):
                low, high = ranges.get(root, (start, end))
                ranges[root] = (min(low, start), max(high, end))
        return ranges

    def judge(self) -> None:
        """Go through all ops in order."""
        self._check_given()
        deciding = self._steps_that_only_decide()
        for step in self.record.steps:
            try:
                if not step.is_allowed:
                    self._check_attention(step)
                    self._check_mixing(step)
                    self._check_positions(step)
                    self._check_windows(step)
                    self._warn_of_unknown(step)
                self._spread_labels(step)
            except SequenceMixed as error:
                if step not in deciding:
                    raise
                self._warn_of(
                    step,
                    f"got {error.got}: no token depends on it, but the program decides"
                    f" something by this rank's shard alone; {REMEDY}",
                )
        # What is refused for it needs no warning.
        self._warn_of_writes()
        self._warn_of_returned()

    def _steps_that_only_decide(self) -> set[OpEffect]:
        """Return the steps that count or compare, and whose results nothing else uses."""
        used = {value for value, _ in self.record.returned}
        deciding = set()
        for step in reversed(self.record.steps):
            if step.is_counting and not used.intersection(step.outputs):
                deciding.add(step)
            else:
                used.update(step.inputs)
        return deciding

    def _is_sequence(self, dim: Dim) -> bool:
        return any(part.track.outermost() in self.sequences for part in expand(dim))

    def _is_stated(self, dim: Dim) -> bool:
        return any(part.track.outermost() in self.stated for part in expand(dim))

    def _check_attention(self, step: OpEffect) -> None:
        for dim, (_, beside) in zip(step.keys, step.heads, strict=True):
            # A key may be a parameter, or what is computed of one; but not beside the tokens.
            is_beside = any(part.born in (GIVEN, COMPUTED) for part in expand(beside))
            if is_beside and any(part.born.is_constant for part in expand(dim)[:1]):
                born = expand(dim)[0].born
                raise SequenceMixed(
                    site=step.site,
                    expected="query, key and value of shape (batch, heads, tokens, features)",
                    got=f"a dim 2 that comes from {born.kind.value}, not from the tokens",
                    remedy="call transpose(1, 2) after the split into heads",
                )
        if any(self._is_sequence(query) for query, _ in step.heads):
            raise SequenceMixed(
                site=step.site,
                expected="query, key and value of shape (batch, heads, tokens, features)",
                got="a dim 1 that holds tokens",
                remedy="call transpose(1, 2) after the split into heads",
            )
        for dim in step.sequences:
            if self._is_of_copies(dim):
                self._refuse(step, "copies of all tokens, one behind the other")
            for part in expand(dim)[:1]:
                root, shift = part.track.find()
                low, high = self.given.get(root, (shift, shift + part.size))
                if shift < low or shift + part.size > high:
                    raise SequenceMixed(
                        site=step.site,
                        expected=f"the {high - low} tokens that this rank was given",
                        got=f"{part.size} tokens: every rank would add some to its shard",
                        remedy=REMEDY,
                    )

    def _is_of_copies(self, dim: Dim) -> bool:
        """Whether the tokens stand in a dim several times, each time all of them."""
        parts = expand(dim)
        return bool(parts) and parts[0].born is FREE and any(p.born is not FREE for p in parts)

    def _check_given(self) -> None:
        """Refuse inputs that are combined with other tokens than those they came with."""
        for value in self.record.given:
            for part in (part for dim in value.dims for part in expand(dim)):
                root, shift = part.track.find()
                low, high = self.attended.get(root, (shift, shift + part.size))
                is_inside = low <= shift and shift + part.size <= high
                # One that is longer is a table; what is cut from it, `_check_windows` judges.
                if part.born is GIVEN and not is_inside and part.size <= high - low:
                    step = next(step for step in self.record.steps if value in step.inputs)
                    self._refuse(
                        step, "an input whose tokens are shifted against those of the attention"
                    )

    def _check_mixing(self, step: OpEffect) -> None:
        for dim in step.mixed:
            if self._is_sequence(dim) or self._is_stated(dim):
                self._refuse(step, f"{step.op}, which mixes along the sequence")
        for outcome, dim in step.united:
            is_sequence = self._is_sequence(dim) or self._is_stated(dim)
            if outcome is United.SHIFTED and is_sequence:
                self._refuse(step, f"{step.op}, which combines tokens with shifted ones")
        for dim in step.reduced:
            if self._is_sequence(dim) and self._has_sequence(step.outputs):
                self._refuse(step, f"{step.op}, which reduces over the sequence for every token")

    def _has_sequence(self, values: Iterable[Value]) -> bool:
        return any(self._is_sequence(dim) for value in values for dim in value.dims)

    def _check_positions(self, step: OpEffect) -> None:
        for dims in step.aligned:
            parts = [part for dim in dims for part in expand(dim)]
            parts = [part for part in parts if part.track.outermost() in self.sequences]
            if all(part.born.is_constant for part in parts):
                continue
            for part in parts:
                if part.born.is_constant and not self._may_begin(part.born, part.size):
                    raise SequenceMixed(
                        site=step.site,
                        expected="positions that begin at this rank's first token",
                        got=f"{part.born.kind.value}, starting at number {part.born.start}",
                        remedy=REMEDY_POSITIONS,
                    )

    def _may_begin(self, born: Born, size: int) -> bool:
        """Whether numbers can be the positions of this rank's tokens."""
        if born.start is None:
            return True
        if self.layout != "contiguous":
            return False
        return born.is_explicit if self.rank == 0 else born.start >= self.rank * size

    def _check_windows(self, step: OpEffect) -> None:
        for dim, start, is_explicit in step.windows:
            for part in expand(dim)[:1]:
                root, shift = part.track.find()
                low, high = self.attended.get(root, (shift, shift + part.size))
                is_inside = low <= shift and shift + part.size <= high
                born = Born(Kind.GIVEN, start, is_explicit)
                if part.born is GIVEN and not is_inside and not self._may_begin(born, high - low):
                    raise SequenceMixed(
                        site=step.site,
                        expected=f"an input with this rank's {high - low} tokens",
                        got=f"one of {part.size} tokens, sliced from number {start}",
                        remedy=REMEDY_POSITIONS,
                    )

    def _warn_of_writes(self) -> None:
        """Warn of what is written to a piece of a shard, or of what is longer, as a cache is."""
        for step in self.record.steps:
            for dims, whole in () if step.is_allowed else step.written:
                got = self._piece_written(step, dims, whole)
                if got is not None:
                    self._warn_of(
                        step, f"{step.op} writes to {got} of each rank's own shard; {REMEDY}"
                    )

    def _piece_written(self, step: OpEffect, dims: Dims, whole: Dims) -> str | None:
        """Say to which positions was written that are not this rank's; None if they are."""
        longer = {root: (low, high) for dim in whole for root, low, high in self._spans(dim)}
        for root, low, high in (span for dim in dims for span in self._spans(dim)):
            start, end = longer.get(root, (low, high))
            is_own = self.layout == "contiguous" and low - start == self.rank * (high - low)
            if (start, end) == (low, high) or is_own:
                continue
            if not self._is_piece_by_piece(step, dims, (root, start, end)):
                return f"positions {low - start} to {high - start} of {end - start}"
        return None

    def _is_piece_by_piece(self, step: OpEffect, dims: Dims, whole: tuple[Track, int, int]) -> bool:
        """Whether a piece of a shard is made of the tokens that stand there."""
        spans = {span for dim in dims for span in self._spans(dim)}
        others = [value for value in step.inputs if value not in step.outputs]
        return whole in self.shards and any(
            spans & set(self._spans(dim)) for value in others for dim in value.dims
        )

    def _warn_of_unknown(self, step: OpEffect) -> None:
        lost = [dim for outcome, dim in step.united if outcome is United.APART]
        if step.is_unknown:
            lost += [dim for value in (*step.inputs, *step.outputs) for dim in value.dims]
        if any(map(self._is_sequence, lost)):
            self._warn_of(
                step,
                f"cannot tell whether {step.op} mixes tokens; it sees only this rank's shard;"
                f" {REMEDY}",
            )

    def _warn_of(self, step: OpEffect, text: str) -> None:
        if step.site not in self.warned:
            self.warned.add(step.site)
            warn(f"{step.site}: {text}")

    def _spread_labels(self, step: OpEffect) -> None:
        labels = frozenset().union(
            *(self.labels.get(value, frozenset()) for value in (*step.inputs, *step.outputs))
        )
        if self._puts_together(step):
            labels = frozenset()
        if labels and not step.is_allowed:
            self._check_labels(step, labels)
            if self._has_sequence(step.outputs):
                # It was said.
                labels = frozenset()
        if any(map(self._is_sequence, step.reduced)):
            labels |= {_Label(step)}
        for number, value in enumerate(step.outputs):
            picked = {
                _Label(step, part.track.find())
                for of, dim, _ in step.picked
                for part in expand(dim)[:1]
                if of == number and part.track.outermost() in self.sequences
            }
            changed: Value | None = value
            while changed is not None:
                self.labels[changed] = self.labels.get(changed, frozenset()) | labels | picked
                changed = changed.base if value in step.inputs else None

    def _puts_together(self, step: OpEffect) -> bool:
        """Whether an op joins tokens that were taken apart, in their order."""
        if step.op not in _STACKS or not self._has_sequence(step.outputs):
            return False
        labels = [self.labels.get(value, frozenset()) for value in step.inputs]
        if any(len(own) != 1 for own in labels):
            return False
        picked = [label.picked for own in labels for label in own]
        first = picked[0]
        return first is not None and picked == [
            (first[0], first[1] + index) for index in range(len(picked))
        ]

    def _check_labels(self, step: OpEffect, labels: frozenset[_Label]) -> None:
        reduced = [label for label in labels if label.picked is None]
        computed = [label for label in reduced if not label.step.is_counting]
        picked = {label.picked: label for label in labels if label.picked is not None}
        if self._has_sequence((*step.inputs, *step.outputs)):
            for label in (*computed, *picked.values()):
                self._refuse(
                    label.step,
                    f"{label.step.op}, whose result meets the tokens again in {step.site}",
                )
            self._warn_of(
                reduced[0].step,
                f"cannot tell whether the count that {reduced[0].step.op} makes over this"
                f" rank's shard mixes tokens in {step.site}; {REMEDY}",
            )
        if computed and (step.is_learned or step.keys):
            self._refuse(
                computed[0].step,
                f"{computed[0].step.op}, whose result is not a loss: {step.op} in {step.site}"
                " uses it",
            )
        if len(picked) > 1 and step.op not in _STACKS:
            (_, label), *_ = picked.items()
            self._refuse(label.step, f"single tokens, which are combined in {step.site}")

    def _warn_of_returned(self) -> None:
        for value, ndim in self.record.returned:
            for label in self.labels.get(value, ()):
                if label.picked is not None or ndim > 1:
                    kind = "one token" if label.picked is not None else "a sum or mean of tokens"
                    warn(
                        f"{label.step.site}: the model returns a result of {kind}"
                        f" ({label.step.op}), which every rank computes from its own shard;"
                        f" {REMEDY}"
                    )
                    return
            if self._warn_of_pieces(value):
                return

    def _warn_of_pieces(self, value: Value) -> bool:
        """Warn of a value that runs along other tokens than those of a shard."""
        for dim in value.dims:
            got = next(
                (
                    f"tokens {start - low} to {end - low} of {high - low}"
                    for root, start, end in self._spans(dim)
                    for low, high in [self.attended.get(root, (start, end))]
                    if (root, start, end) not in self.shards
                ),
                None,
            )
            if self._is_of_copies(dim) and self._is_sequence(dim):
                got = "all tokens several times, one behind the other"
            if got is not None:
                steps = [step for step in self.record.steps if value in step.outputs]
                site, op = (steps[-1].site, steps[-1].op) if steps else ("an input", "nothing")
                warn(f"{site}: the model returns {got} ({op}) of each rank's own shard; {REMEDY}")
                return True
        return False

    def _refuse(self, step: OpEffect, got: str) -> None:
        raise SequenceMixed(
            site=step.site,
            expected="only attention to mix tokens of plain shards",
            got=got,
            remedy=REMEDY,
        )
