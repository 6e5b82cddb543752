"""The loop over stages: what is fetched, computed and sent home, and what flies over what.

    fetch 0 . [start fetch i+1 . tiles i . wait home i-1 . start home i . wait fetch i+1] ...

Each fetch is in flight over the tiles of the stage before, each home over those of the stage after.
What a stage does, an executor says: `cp_inductor.run.view_executor` where the plan is known when a
graph is compiled, `cp_inductor.run.gather_executor` where the batch decides it.
"""

from __future__ import annotations

from typing import Any, Protocol


class StageWork(Protocol):
    """What an executor does of a stage. Exchanges that were started are values of its own."""

    @property
    def num_stages(self) -> int:
        """How many stages there are."""

    def start_fetch(self, stage: int) -> Any:
        """Start what a stage fetches, if it is a stage, and fetches anything on any rank."""

    def end_fetch(self, stage: int, fetching: Any) -> None:
        """Wait for it, and put it at hand."""

    def compute(self, stage: int) -> None:
        """Compute the tiles of a stage."""

    def start_home(self, stage: int) -> Any:
        """Start to send the results of a stage home, if any rank has some to send."""

    def end_home(self, homeward: Any) -> None:
        """Wait for results that came home."""


def run_stages(work: StageWork) -> None:
    """Run all stages of a rank."""
    homeward: Any = None
    work.end_fetch(0, work.start_fetch(0))
    for stage in range(work.num_stages):
        fetching = work.start_fetch(stage + 1)
        work.compute(stage)
        # What the stage before sent home was in flight over this stage's tiles.
        work.end_home(homeward)
        homeward = work.start_home(stage)
        work.end_fetch(stage + 1, fetching)
    work.end_home(homeward)
