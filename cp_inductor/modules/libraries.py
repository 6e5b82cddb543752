"""What libraries of models tell `parallelize` about their modules.

    for library in libraries(): library.find_local(module)     =>  how it computes on plain tensors

No module of this room knows a library by name. A file of `integrations/` describes one library,
without importing it, and `import cp_inductor` registers the description.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Local:
    """How a module computes on plain tensors, in a model that computes on DTensors.

    Attributes:
        mixin: what `read_locally` adds to the module: `OnWhole` computes on all tokens,
            `OnOwnTokens` and `OnShards` on a rank's own.
        inner: what it adds to modules inside it, by their class, if not `ReadsLocally`.
        functions: forms of functions that pass states, by the names under which the module calls
            them, beside what `recurrences` knows.
    """

    mixin: type[nn.Module]
    inner: Mapping[type, type[nn.Module]] = field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


class ModelLibrary:
    """A library of models. What a subclass does not say is false, or there is none of it."""

    def adapt(self, model: nn.Module) -> None:
        """Change a model that reads DTensors from now on, before it runs."""

    def find_local(self, module: nn.Module) -> Local | None:
        """Return how a module computes that treats every token alone, or mixes tokens itself."""
        return None

    def find_routers(self, model: nn.Module) -> Mapping[type, int]:
        """Return the classes of routers whose logits are recorded, and their place in the result.

        The hooks that record them are installed afterwards.
        """
        return {}

    def is_recording_logits(self) -> bool:
        """Whether logits of routers are recorded in the forward that runs now."""
        return False


_named: list[str] = []
_libraries: list[ModelLibrary] = []


def register_library(name: str) -> None:
    """Let `parallelize` ask a "module:class", which is imported when it is needed."""
    _named.append(name)


def libraries() -> list[ModelLibrary]:
    """Return the descriptions of all libraries."""
    while _named:
        module, _, name = _named.pop().partition(":")
        _libraries.append(getattr(import_module(module), name)())
    return _libraries
