"""Reads what the scheduler's core must know of a request of vLLM."""

import time
from collections.abc import Mapping

from vllm.logger import init_logger
from vllm.v1.request import Request as VllmRequest

from gateway.types.sla_classes import SlaError, parse_header, resolve
from services.core import Request, Sla, WorkerView

log = init_logger(f"vllm.{__name__}")

SLA_ARGUMENT = "x-foretoken-sla"  # in `vllm_xargs` of a request, as the header of the gateway


class RequestReader:
    """`by_priority`: vLLM was started with `--scheduling-policy priority`, so that requests have
    priorities."""

    def __init__(
        self, view: WorkerView, classes: Mapping[str, Sla], default_sla: str, by_priority: bool
    ):
        self._view = view
        self._classes = classes
        self._default_sla = default_sla
        self._by_priority = by_priority

    def read(self, request: VllmRequest, now: float) -> Request | None:
        """`now` is on the monotonic clock. None for a request that plans cannot be about."""
        if request.pooling_params is not None or request.resumable:
            return None
        longest = request.num_prompt_tokens + request.max_tokens
        if min(request.num_prompt_tokens, request.max_tokens) < 1:
            return None
        if longest > self._view.reach_tokens:
            return None
        waited_s = max(0.0, time.time() - request.arrival_time)
        return Request(
            request.request_id,
            self._view.model,
            request.num_prompt_tokens,
            request.max_tokens,
            now - waited_s,
            sla=self._sla(request),
            tenant=request.cache_salt or "",
            priority=request.priority if self._by_priority else 0,
            min_tokens=_least_tokens(request),
        )

    def _sla(self, request: VllmRequest) -> Sla:
        """vLLM cannot refuse a request any more: a wrong SLA is logged, and the default holds."""
        arguments = request.sampling_params.extra_args if request.sampling_params else None
        text = (arguments or {}).get(SLA_ARGUMENT, "")
        try:
            name, budgets = parse_header(str(text))
            return resolve(self._classes, self._default_sla, name, budgets)
        except SlaError as error:
            log.warning_once("%s: %s; the default is used", SLA_ARGUMENT, str(error))
            return self._classes[self._default_sla]


def _least_tokens(request: VllmRequest) -> int:
    """The fewest output tokens, with the end; 0 if it is not known."""
    sampling = request.sampling_params
    if sampling is None or request.use_structured_output or not sampling.min_tokens:
        return 0
    least: int = min(sampling.min_tokens + 1, request.max_tokens)
    return least
