"""vLLM's requests, as plans see and change them: the only module that touches the internals of
vLLM's scheduler.

A request that does not run keeps no KV, because vLLM frees the blocks of what it preempts; its
prefix cache may still find them.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from math import lcm
from typing import Any, Protocol

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request

from foretoken.vllm.kv_capacity import whole_units
from foretoken.vllm.planned_queue import PlannedQueue
from services.core import RequestProgress, WorkerView

QUEUES = ("waiting", "skipped_waiting")  # of requests without KV; vLLM 0.30 has the second one
LOADING = "kv_holding_waiting"  # since vLLM 0.31: waiting requests with KV that a connector loads


class VllmInternals(Protocol):
    """What is used of vLLM's scheduler beyond its interface. `running` is in order of admission;
    vLLM preempts its last request when memory runs out."""

    vllm_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    block_size: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    max_model_len: int
    running: list[Request]
    requests: dict[str, Request]
    finished_req_ids: set[str]
    policy: SchedulingPolicy
    requires_kv_delivery: bool
    pause_state: PauseState
    prev_step_scheduled_req_ids: set[str]

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = ...
    ) -> None: ...

    def _request_blocks_can_be_freed(self, request: Request) -> bool: ...


class EngineRequests:
    """One for each scheduler of vLLM, and for one thread at a time. `planned` are the live requests
    that plans are about; vLLM admits others in order of arrival."""

    def __init__(self, scheduler: VllmInternals):
        self._scheduler = scheduler
        self.view = describe_engine(scheduler)
        self.planned: dict[str, Request] = {}
        self._ended = set[str]()  # planned requests that have ended since the last `pop_ended`
        self._queues = [self._replace_queue(name) for name in QUEUES if name in scheduler.__dict__]
        scheduler.policy = SchedulingPolicy.FCFS  # it then preempts the last of `running`

    def _replace_queue(self, name: str) -> PlannedQueue[Request]:
        queue = PlannedQueue[Request](self._is_planned)
        setattr(self._scheduler, name, queue)
        return queue

    def _is_planned(self, request: Request) -> bool:
        return self.planned.get(request.request_id) is request

    # What there is

    def __contains__(self, request_id: str) -> bool:
        """Whether vLLM has a request of this id."""
        return request_id in self._scheduler.requests

    @property
    def runs(self) -> bool:
        """Whether any request runs, or will without a plan because a connector loads its KV."""
        return bool(self._scheduler.running or self._loading)

    @property
    def _loading(self) -> Collection[Request]:
        queue: Collection[Request] = getattr(self._scheduler, LOADING, ())
        return queue

    @property
    def admits(self) -> bool:
        """Whether vLLM sees any waiting request."""
        return any(self._queues)

    @property
    def has_preempted(self) -> bool:
        """Whether `pop_preempted` returns any."""
        return any(queue.preempted for queue in self._queues)

    @property
    def has_ended(self) -> bool:
        """Whether requests have ended since the last `pop_ended`."""
        return bool(self._ended or not self.planned.keys().isdisjoint(self._fresh))

    @property
    def _fresh(self) -> set[str]:
        """The requests that have ended since vLLM composed the last step."""
        return self._scheduler.finished_req_ids

    def progress(self) -> list[RequestProgress]:
        """That of the requests that run or load their KV. O(running)."""
        planned, block_tokens = self.planned, self.view.block_tokens
        holders = chain(self._scheduler.running, self._loading)
        return [
            RequestProgress(
                name, r.num_output_tokens, held := r.num_computed_tokens, -(-held // block_tokens)
            )
            for name, r in ((each.request_id, each) for each in holders)
            if name in planned and planned[name] is r
        ]

    def memory(self, progress: Sequence[RequestProgress]) -> tuple[int, int]:
        """The free blocks, and the holders of blocks beyond the first; `progress` is that of all
        running requests."""
        blocks = self.view.kv_tokens // self.view.block_tokens
        used = round(self.usage * blocks)
        return blocks - used, max(0, sum(each.blocks for each in progress) - used)

    @property
    def usage(self) -> float:
        """The share of the blocks that is in use."""
        usage: float = self._scheduler.kv_cache_manager.usage
        return usage

    def pop_ended(self) -> list[Request]:
        """Planned requests that have ended since the last call, which are planned no more. A KV
        connector may still have their blocks. O(ended)."""
        names = sorted(self._ended | (self._fresh & self.planned.keys()))
        self._ended.clear()
        # A live request may have the id of one that has ended.
        ended = [request for name in names if (request := self.planned[name]).is_finished()]
        for request in ended:
            del self.planned[request.request_id]
        return ended

    def pop_preempted(self) -> list[RequestProgress]:
        """Planned requests that vLLM has preempted since the last call because memory ran out."""
        names = [name for queue in self._queues for name in queue.pop_preempted()]
        return [without_kv(self.planned[name]) for name in names if name in self.planned]

    # What changes

    def plan_for(self, request: Request) -> None:
        """From now on plans are about this request. Before vLLM queues it."""
        self.planned[request.request_id] = request

    def note_ended(self, names: set[str]) -> None:
        """vLLM has composed a step and told its model runner that these have ended."""
        self._ended |= names & self.planned.keys()

    def leave(self, request_id: str) -> None:
        """Plans are no longer about this request, which waits: vLLM admits it."""
        self.planned.pop(request_id, None)
        self._ended.discard(request_id)
        self.admit([request_id])

    def admit(self, names: Sequence[str]) -> None:
        for queue in self._queues:
            queue.admit(names)

    def pause(self, names: Collection[str], now: float) -> list[RequestProgress]:
        """Preempts those that run, and hides those that vLLM has not admitted yet. Returns the
        preempted ones. Not while vLLM is paused: it would not resume them."""
        if not names or self._scheduler.pause_state is not PauseState.UNPAUSED:
            return []
        for queue in self._queues:
            queue.hold(names)
        paused, scheduler = set(names), self._scheduler
        stopping = [
            request
            for request in scheduler.running
            if request.request_id in paused and scheduler._request_blocks_can_be_freed(request)
        ]
        stopped = {request.request_id for request in stopping}
        scheduler.running = [r for r in scheduler.running if r.request_id not in stopped]
        drops = scheduler.requires_kv_delivery
        for request in stopping:
            scheduler._preempt_request(request, now, drop_stale_output=drops)
        # One that resumes in the next step is sent to the model runner with all of its tokens.
        scheduler.prev_step_scheduled_req_ids.difference_update(stopped)
        for queue in self._queues:
            queue.forget_preempted(stopped)
        return [without_kv(request) for request in stopping]

    def set_victims(self, names: Sequence[str]) -> None:
        """Sorts the running requests so that vLLM, if memory runs out, preempts those that are
        still in prefill, then these in their order, then the others. No effect without names."""
        if names:
            # Prefills come last, because decodes take the tokens of a step first.
            order = {name: number for number, name in enumerate(names)}
            self._scheduler.running.sort(
                key=lambda r: (r.is_prefill_chunk, -order.get(r.request_id, len(order)))
            )

    def give_up(self) -> None:
        """From now on plans are about no request."""
        self.planned.clear()
        self._ended.clear()
        for queue in self._queues:
            queue.admit([request.request_id for request in queue])


def without_kv(request: Request) -> RequestProgress:
    return RequestProgress(request.request_id, request.num_output_tokens, 0, 0)


def describe_engine(scheduler: VllmInternals) -> WorkerView:
    """vLLM's engine as a worker. A block belongs to one group of layers; models with several
    groups, such as those with sliding windows, need blocks in each."""
    config, cache = scheduler.vllm_config, scheduler.kv_cache_config
    sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
    ranks = scheduler.block_size // lcm(*sizes)  # that divide the tokens of a context
    # vLLM keeps one block empty.
    blocks = whole_units(cache.num_blocks - 1, scheduler.block_size, [n * ranks for n in sizes])
    return WorkerView(
        "vllm",
        "",
        config.model_config.served_model_name or config.model_config.model,
        blocks * scheduler.block_size,
        scheduler.block_size,
        # vLLM 0.32 has slots for requests that it does not run.
        getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs),
        scheduler.max_model_len,
        max_batch_tokens=scheduler.max_num_scheduled_tokens,
    )
