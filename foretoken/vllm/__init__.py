"""foretoken's policies inside vLLM: `vllm serve MODEL --scheduler-cls foretoken.vllm.Scheduler`.

vLLM is imported with a scheduler, so that the other modules can be used without it.
"""

from typing import Any

__all__ = ["AsyncScheduler", "Scheduler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"foretoken.vllm has no {name}; it has {' and '.join(__all__)}")
    from foretoken.vllm import schedulers

    return getattr(schedulers, name)
