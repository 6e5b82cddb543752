"""The description of one attention over a sharded sequence: all about it but its tensors.

source    "world_size=4 query_length=4096 ..."     a recipe: the plan is known when compiling
          "per batch: stages=1 rule=..."           the batch decides: an op makes the plan
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cp_inductor.mask.rule import Rule
from cp_inductor.plan import Recipe

# Before the text of a plan that the batch decides.
PER_BATCH = "per batch: "

# The rank of an attention whose plan the batch decides: its graph is that of all ranks.
ANY_RANK = -1


@dataclass(frozen=True, slots=True)
class PerBatch:
    """A plan that each batch decides: `plan_batch` makes it, and graphs read its numbers."""

    rule: str  # text of it
    stages: int  # that fetch
    # What ranks share, as `cp_inductor.plan.batch_nodes.Nodes` writes it; "" for none.
    nodes: str = ""

    def format(self) -> str:
        """Return it as text that `parse` reads."""
        nodes = f" nodes={self.nodes}" if self.nodes else ""
        return f"{PER_BATCH}stages={self.stages}{nodes} rule={self.rule}"

    @staticmethod
    def parse(text: str) -> PerBatch:
        """Return what `format` wrote."""
        options, _, rule = text.removeprefix(f"{PER_BATCH}stages=").partition(" rule=")
        stages, _, nodes = options.partition(" nodes=")
        return PerBatch(rule, int(stages), nodes)


@dataclass(frozen=True, slots=True)
class Attention:
    """Everything about one sequence-sharded attention but its tensors."""

    source: Recipe | PerBatch  # where its plan is from: a resolved recipe, or each batch
    # Whose part of a recipe's plan: this process's position among the plan's ranks. `ANY_RANK` if
    # the batch decides.
    rank: int
    scale: float | None  # of the scores; None is 1 / sqrt(D)
    kernel: str  # a name in `cp_inductor.tiles.kernel_table.KERNELS`
    group_name: str  # c10d name of the process group behind the sequence axis
    dropout_p: float = 0.0  # probability with which a probability is dropped
    # The last table of the rule is a bias (B | 1, H | 1, S, T) with a gradient.
    has_bias: bool = False
    kernel_options: str = ""  # for the templates of tiles under a mask on CUDA; see `FlexCUDA`

    def __post_init__(self) -> None:
        if isinstance(self.source, Recipe):
            in_plan = 0 <= self.rank < self.source.world_size
            assert in_plan, "the plan is for another number of ranks"
        else:
            is_plain = not self.dropout_p and not self.has_bias
            assert self.rank == ANY_RANK and is_plain, "no batch decides a plan of such"

    @staticmethod
    def of(source: str, *rest: Any) -> Attention:
        """Return what the arguments of the op pair say, from its source on."""
        parse = PerBatch.parse if source.startswith(PER_BATCH) else Recipe.parse
        return Attention(parse(source), *rest)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op pair that say this."""
        rest = (self.scale, self.kernel, self.group_name, self.dropout_p, self.has_bias)
        options = (self.kernel_options,) if self.kernel_options else ()
        return self.source.format(), self.rank, *rest, *options

    @property
    def is_per_batch(self) -> bool:
        """Whether the batch decides the plan."""
        return isinstance(self.source, PerBatch)

    @property
    def nodes(self) -> str:
        """The nodes that plans of batches know; "" for none."""
        return self.source.nodes if isinstance(self.source, PerBatch) else ""

    @property
    def recipe(self) -> Recipe:
        """The recipe of a plan that is known when a graph is compiled."""
        assert isinstance(self.source, Recipe), "the batch decides this plan"
        return self.source

    @property
    def rule(self) -> Rule:
        """Which pairs exist."""
        return Rule.parse(self.source.rule)

    @property
    def num_extras(self) -> int:
        """How many tensors are read beside query, key and value.

        The tables of the rule; and behind them a seed of dropout, or sizes and numbers of a plan.
        """
        return len(self.rule.tables) + (self.dropout_p > 0) + 2 * self.is_per_batch
