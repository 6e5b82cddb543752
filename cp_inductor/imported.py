"""Call a function behind the first import of a module, whoever imports it.

    when_imported({"torch.distributed.tensor"}, register)

Importing these modules takes longer than importing torch, and not every program needs them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(names: set[str], then: Callable[[], None]) -> None:
    """Call `then` behind the import of each module, and now if one has been imported.

    Args:
        names: of the modules.
        then: must allow for being called again.
    """
    missing = names - sys.modules.keys()
    if missing:
        sys.meta_path.insert(0, _Finder(missing, then))
    if missing != names:
        then()


class _Finder(MetaPathFinder):
    """Leaves finding modules to the others, and adds a call to what they find."""

    def __init__(self, waiting: set[str], then: Callable[[], None]) -> None:
        self.waiting, self.then = waiting, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that is waited for as the other finders do."""
        if name not in self.waiting:
            return None
        self.waiting.discard(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self.then)
        return spec


class _Calling(Loader):
    """Loads a module as another loader does, and then calls a function."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self.loader, self.then = loader, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and call."""
        self.loader.exec_module(module)
        self.then()
