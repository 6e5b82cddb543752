"""Let accelerate know this library as soon as a program names it, without a call of `register`.

    import cp_inductor
    ParallelismConfig(cp_size=2, cp_backend="cp_inductor")      =>  register(), and then as named

accelerate (1.15) raises for a backend that it does not know, and only then is anything replaced.
"""

from __future__ import annotations

from typing import Any

from cp_inductor.integrations.methods import NAME, Method, replace_method


def register_when_named() -> None:
    """Register if a `ParallelismConfig` names this library; called behind accelerate's import."""
    from accelerate.parallelism_config import ParallelismConfig

    replace_method(ParallelismConfig, "__post_init__", _post_init)


def _post_init(original: Method, self: Any) -> None:
    handler = self.cp_handler
    try:
        original(self)
    except (ValueError, KeyError):
        if self.cp_backend != NAME:
            raise
        from cp_inductor.integrations.accelerate import register

        type(self).__post_init__ = original
        register()
        self.cp_handler = handler
        self.__post_init__()
