"""Call a function behind the first import of a module, whoever imports it.

    when_imported({"torch.distributed.tensor"}, register)

Importing these modules takes longer than importing torch, and not every program needs them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(names: set[str], then: Callable[[], object]) -> None:
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

    def __init__(self, waiting: set[str], then: Callable[[], object]) -> None:
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
            loader: Any = spec.loader
            loader.exec_module = partial(_run, loader.exec_module, self.then)
        return spec


def _run(run: Callable[[ModuleType], None], then: Callable[[], object], module: ModuleType) -> None:
    run(module)
    then()
