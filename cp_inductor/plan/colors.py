"""Colors of ranks, as hex, which people of any color vision tell apart."""

from __future__ import annotations

# Okabe and Ito, https://jfly.uni-koeln.de/color/, without black.
_FEW = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#f0e442")
# Viridis at eleven places, https://bids.github.io/colormap/.
_SCALE = (
    "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725".split()  # noqa: SIM905
)
_GOLDEN = 0.381966


def colors_of(world_size: int) -> list[str]:
    """Return a color for each rank; with many ranks, neighbours are far apart in lightness."""
    if world_size <= len(_FEW):
        return [*_FEW[:world_size]]
    return [_between(rank * _GOLDEN % 1) for rank in range(world_size)]


def _between(place: float) -> str:
    at, share = divmod(place * (len(_SCALE) - 1), 1)
    ends = [bytes.fromhex(_SCALE[int(at) + step]) for step in (0, 1)]
    return "#" + bytes(round(a + share * (b - a)) for a, b in zip(*ends, strict=True)).hex()
