"""vLLM's waiting queue, of which vLLM sees only what the last plan admits."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """A request of vLLM."""

    @property
    def request_id(self) -> str: ...


Request = TypeVar("Request", bound=Named)


class PlannedQueue(Generic[Request]):
    """Has the interface of vLLM's `RequestQueue`. `bool`, `peek_request` and `pop_request` are
    about admitted requests, in the plan's order; `len` and iteration are about all that wait.

    Requests that no plan is about are admitted when they are added. vLLM skips an admitted request
    that is not ready by popping it and prepending it after the step, so that it stays admitted.
    """

    def __init__(self, is_planned: Callable[[Request], bool]):
        self._is_planned = is_planned
        self._waiting: dict[str, Request] = {}
        self._admitted: deque[str] = deque()
        self._preempted: list[str] = []

    def admit(self, names: Iterable[str]) -> None:
        """Shows these to vLLM, behind those that are admitted already. Others are ignored."""
        self._admitted.extend(filter(self._waiting.__contains__, names))

    def hold(self, names: Iterable[str]) -> None:
        """Hides these from vLLM again."""
        held = set(names)
        self._admitted = deque(name for name in self._admitted if name not in held)

    @property
    def preempted(self) -> bool:
        """Whether `pop_preempted` returns any."""
        return bool(self._preempted)

    def pop_preempted(self) -> list[str]:
        """The requests that vLLM has preempted since the last call."""
        names, self._preempted = self._preempted, []
        return names

    def forget_preempted(self, names: Iterable[str]) -> None:
        """These were preempted by a plan."""
        planned = set(names)
        self._preempted = [name for name in self._preempted if name not in planned]

    def add_request(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        if not self._is_planned(request):
            self._admitted.append(request.request_id)

    def prepend_request(self, request: Request) -> None:
        """vLLM calls this for a request that it preempts."""
        self._waiting[request.request_id] = request
        if self._is_planned(request):
            self._preempted.append(request.request_id)
        else:
            self._admitted.appendleft(request.request_id)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """vLLM calls this for requests that it skipped, the last one first."""
        for request in requests:
            self._waiting[request.request_id] = request
            self._admitted.appendleft(request.request_id)

    def peek_request(self) -> Request:
        if not self:
            raise IndexError("no waiting request is admitted")
        return self._waiting[self._admitted[0]]

    def pop_request(self) -> Request:
        if not self:
            raise IndexError("no waiting request is admitted")
        return self._waiting.pop(self._admitted.popleft())

    def remove_request(self, request: Request) -> None:
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Requests that are not here are ignored. Their place among the admitted ones is removed
        when it comes to the front."""
        for request in requests:
            self._waiting.pop(request.request_id, None)

    def __bool__(self) -> bool:
        while self._admitted and self._admitted[0] not in self._waiting:
            self._admitted.popleft()
        return bool(self._admitted)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._waiting.values()))
