"""Where the library reads a tensor on the host, which makes the host wait for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch

READS = ("tolist", "item", "numpy", "cpu", "to")
READS += ("__bool__", "__int__", "__float__", "__index__")


@contextmanager
def host_reads() -> Iterator[set[str]]:
    """Within this context, note ``module.function`` of the library's code that reads a tensor."""
    found: set[str] = set()
    with ExitStack() as patches:
        for name in READS:
            patches.enter_context(mock.patch.object(torch.Tensor, name, _noting(name, found)))
        yield found


def _noting(name: str, found: set[str]) -> Any:
    read = getattr(torch.Tensor, name)

    @wraps(read)
    def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        module = frame.f_globals.get("__name__", "")
        is_cast = name == "to" and not any(isinstance(arg, (str, torch.device)) for arg in args)
        if module.startswith(("cp_inductor", "passes")) and not is_cast:
            found.add(f"{module}.{frame.f_code.co_name}")
        return read(tensor, *args, **kwargs)

    return note
