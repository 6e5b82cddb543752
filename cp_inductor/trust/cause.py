"""Why ranks give up: what differs between them and who has which value, or who does not come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cp_inductor.trust.record import Entry, name_ranks

# An error names no more fields than this: one mistake shows in several.
MOST_NAMED = 4

REMEDY = (
    "run one program on all ranks that share a sequence: the same model, batches, input shapes,"
    " options, flags and versions, train() or eval() on all of them, the same weights frozen; shard"
    " a sequence as torch.chunk does; if its length does not divide by the ranks, name it in"
    " options['seq_len'], by a buffer of context_parallel, or by the shape of the DTensor"
)
WHY_ABSENT = (
    "an error may have been raised there, another model or batch run, an attention run that was"
    " agreed on before, or check_agreement=False set; if compiling takes longer, raise the timeout"
    " of init_process_group"
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


def name_difference(entries: Mapping[int, Entry]) -> tuple[str, str]:
    """Say what differs between events, by global rank, and what to do; "" for what is not known."""
    refusing = [rank for rank, entry in entries.items() if entry.is_refusal][:1]
    if refusing:
        who = name_ranks(refusing)
        return f"{who}, which refuses to: {entries[refusing[0]].site}", f"see the error on {who}"
    differing = {}
    for name in dict.fromkeys(name for entry in entries.values() for name in entry.fields):
        ranks_of: dict[str, list[int]] = {}
        for rank, entry in entries.items():
            if name in entry.fields:
                ranks_of.setdefault(entry.fields[name], []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on {name_ranks(r)}" for value, r in ranks_of.items())
            differing[name] = f"{name}: {values}"
    consequences = {name for entry in entries.values() for name in entry.consequences}
    causes = [text for name, text in differing.items() if name not in consequences]
    return "; ".join((causes or list(differing.values()))[:MOST_NAMED]), ""
