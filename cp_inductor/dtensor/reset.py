"""Drop what the library keeps between calls."""

from __future__ import annotations

import sys
from typing import Any

from cp_inductor.batches.plans import forget_plans
from cp_inductor.batches.prepare import forget as forget_known
from cp_inductor.sequence.eager import forget_judgements
from cp_inductor.trust.agreement import forget_agreements
from cp_inductor.trust.failures import forget_peers
from cp_inductor.trust.unreduced import forget_watches

# Whose caches say what the code in memory is, whatever has become of its files.
KEPT = frozenset({"cp_inductor.source"})


def reset() -> None:
    """Drop all that the library keeps between calls: plans, what ranks agreed on, and stores.

    What was said once, such as a warning, may be said again. Compiled functions stay valid, and so
    do models. Call it on all ranks at the same point of the program, outside of attentions: the
    next attention is compared anew on all of them. After `destroy_process_group` it drops the last
    references of this library to stores of the group. What `torch.compile` keeps, such as the
    guards of compiled functions, is dropped by `torch._dynamo.reset()`.
    """
    forget_agreements()
    forget_peers()
    forget_judgements()
    forget_plans()
    forget_known()
    forget_watches()
    for name, module in list(sys.modules.items()):
        if _is_ours(name):
            for value in list(vars(module).values()):
                _clear(value)
                if isinstance(value, type) and _is_ours(value.__module__):
                    for method in vars(value).values():
                        _clear(getattr(method, "__func__", method))


def _clear(value: Any) -> None:
    """Clear the cache of a function of ours."""
    clear = getattr(value, "cache_clear", None)
    if callable(clear) and _is_ours(getattr(value, "__module__", "")):
        clear()


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "cp_inductor" and module not in KEPT
