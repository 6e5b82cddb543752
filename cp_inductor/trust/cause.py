"""Why ranks give up: what differs between them and who has which value, or who does not come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cp_inductor.trust.record import Entry, Record, is_refusal, name_ranks

# An error names no more fields than this: one mistake shows in several.
MOST_NAMED = 4

REMEDY = (
    "run one program on all ranks that share a sequence: the same model, batches, input shapes,"
    " options, flags and versions, train() or eval() on all of them, the same weights frozen; shard"
    " a sequence as torch.chunk does; if its length does not divide by the ranks, name it in"
    " options['seq_len'], by a buffer of context_parallel, or by the shape of the DTensor"
)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why ranks give up, as the first of them has seen it.

    Attributes:
        rank: the global rank of that first one.
        site, expected, got, remedy: of its error.
        seen_by: positions of ranks that wait, and will raise as soon as they see this.
        is_shared: all ranks raise this as it is; otherwise the others quote it.
    """

    rank: int
    site: str
    expected: str
    got: str
    remedy: str
    seen_by: Sequence[int] = ()
    is_shared: bool = False


def cause_of_difference(
    name: str, number: int, records: Mapping[int, Record], rank: int, ranks: Sequence[int]
) -> Cause:
    """Return the cause that an event differs.

    Args:
        name: of the trail.
        number: of the event.
        records: of the ranks that are in the same epoch, this one included, by position.
        rank: this process's position.
        ranks: the global ranks of the group, by position.
    """
    here = dict(sorted(records.items()))
    entries = {ranks[at]: record.trails[name].entry_at(number) for at, record in here.items()}
    known = {of: entry for of, entry in entries.items() if entry is not None}
    own = known.get(ranks[rank], Entry(f"event {number}", {}))
    refusing = [of for of, entry in known.items() if is_refusal(entry)][:1]
    to_run = f"{name_ranks(ranks)} to run the same"
    if refusing:
        who = name_ranks(refusing)
        got = f"{who}, which refuses to: {known[refusing[0]].site}"
        return Cause(ranks[rank], own.site, to_run, got, f"see the error on {who}", is_shared=True)
    got = _differing(known) or f"{name} that differ from number {number} on"
    waiting = [at for at, record in here.items() if record.is_waiting]
    return Cause(ranks[rank], own.site, to_run, got, own.remedy or REMEDY, waiting, is_shared=True)


def cause_of_absence(
    missing: Sequence[int], became: str, site: str, rank: int, ranks: Sequence[int], limit_s: float
) -> Cause:
    """Return the cause that some ranks do not come.

    Args:
        missing: their positions.
        became: what has become of them, in parentheses, as far as that is known.
        site: where this rank waits.
        rank: this process's position.
        ranks: the global ranks of the group, by position.
        limit_s: for how long a rank waits.
    """
    who = name_ranks([ranks[at] for at in missing])
    return Cause(
        ranks[rank],
        site,
        f"{name_ranks(ranks)} to arrive within {limit_s:g} s",
        f"nothing from {who}{became}",
        f"see the log of {who}: an error may have been raised there, another model or batch run, an"
        " attention run that was agreed on before, or check_agreement=False set; if compiling takes"
        " longer, raise the timeout of init_process_group",
    )


def _differing(entries: Mapping[int, Entry]) -> str:
    """Name what differs, each value with the ranks that have it."""
    names = list(dict.fromkeys(name for entry in entries.values() for name in entry.fields))
    differing = []
    for name in names:
        ranks_of: dict[str, list[int]] = {}
        for rank, entry in entries.items():
            if name in entry.fields:
                ranks_of.setdefault(entry.fields[name], []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {name_ranks(r)}" for value, r in ranks_of.items())
            differing.append((name, f"{name}: {values}"))
    consequences = {name for entry in entries.values() for name in entry.consequences}
    causes = [text for name, text in differing if name not in consequences]
    return "; ".join((causes or [text for _, text in differing])[:MOST_NAMED])
