"""foretoken's scheduler as subclasses of vLLM's, which keep all that a step of vLLM does: chunked
prefill, prefix caching, structured output, LoRA, speculative decoding, connectors.

Their names are for `vllm serve --scheduler-cls`. `Scheduler` becomes an `AsyncScheduler` where vLLM
schedules asynchronously, so that one name is right everywhere.
"""

import time
from typing import Any, ClassVar, Protocol

import vllm
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
from vllm.v1.request import Request

from foretoken.vllm.following import PlanFollower
from foretoken.vllm.settings import VllmConfig, load_settings

TESTED = ("0.30", "0.31", "0.32")
POLL_S = 2e-4


class Follower(Protocol):
    """Receives what happens in vLLM's scheduler."""

    def arrived(self, request: Request) -> None:
        """Before vLLM queues a request."""

    def follow(self) -> None:
        """Before a step is composed."""

    def scheduled(self, output: SchedulerOutput) -> None:
        """After a step was composed."""

    def stepped(self) -> None:
        """After a step."""

    def stop(self) -> None: ...


class Scheduler(VllmScheduler):
    """vLLM's scheduler, which follows foretoken's plans. `asynchronous` is the class that takes its
    place where vLLM schedules asynchronously."""

    asynchronous: ClassVar[type["Scheduler"]]

    def __new__(cls, *, vllm_config: Any, **_: Any) -> Any:
        is_async = vllm_config.scheduler_config.async_scheduling
        return object.__new__(cls.asynchronous if is_async else cls)

    def __init__(self, *args: Any, **kwargs: Any):
        settings = load_settings()
        require_tested(vllm.__version__, settings)
        if getattr(kwargs["vllm_config"].model_config, "is_diffusion", False):
            raise ValueError("foretoken.vllm serves no diffusion models: leave --scheduler-cls out")
        super().__init__(*args, **kwargs)
        wait_without_spinning()
        self._follower = self._make_follower(settings)

    def _make_follower(self, settings: VllmConfig) -> Follower:
        return PlanFollower(self, settings)

    def add_request(self, request: Request) -> None:
        self._follower.arrived(request)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self._follower.follow()
        output = super().schedule(*args, **kwargs)
        self._follower.scheduled(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        self._follower.stepped()
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def shutdown(self) -> None:
        self._follower.stop()
        super().shutdown()


class AsyncScheduler(Scheduler, VllmAsyncScheduler):
    """The same where vLLM schedules a step while the one before it runs."""


Scheduler.asynchronous = AsyncScheduler


def wait_without_spinning() -> None:
    """Makes this process look every POLL_S for what vLLM's worker processes answer.

    vLLM looks without a pause. Here that takes a core from the other processes, and the interpreter
    from the threads that decide and learn while a step computes. Its notifications of answers may
    be lost, so that they cannot replace the looks.
    """
    SpinCondition.wait = lambda *_, **__: time.sleep(POLL_S)


def require_tested(version: str, settings: VllmConfig) -> None:
    """Raises ValueError for an untested version of vLLM, unless the settings allow it."""
    tested = any(version.startswith(f"{each}.") for each in TESTED)
    if not tested and not settings.untested_vllm:
        raise ValueError(
            f"foretoken.vllm is tested with vLLM {', '.join(TESTED)}, and this is {version}: vLLM "
            "changes its scheduler between versions. Set FORETOKEN_VLLM_UNTESTED_VLLM=1 to try it"
        )
