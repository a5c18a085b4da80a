"""Prompts that wait for their admissions, and admissions that wait for their prompts; cancels that
belong to earlier placements.

A prompt arrives from a gateway and its admission from the scheduler, on different streams, in any
order. Both waits are bounded in number and time.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from services.worker.requests.types.prompt import Prompt

HELD_MAX = 8_192  # prompts, and admissions: twice the scheduler's queue
HELD_S = 60.0  # the other half normally arrives within milliseconds
PROMPT_WAIT_S = 1.0  # a drain waits this long for the prompt of an admitted request


@dataclass
class PendingRequests:
    """Holds the part of a request that arrives first, and returns it when the other one arrives."""

    held_max: int = HELD_MAX
    held_s: float = HELD_S
    prompts: dict[str, tuple[Prompt, float]] = field(default_factory=dict)
    admissions: dict[str, tuple[int, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.prompts or self.admissions)

    def add_prompt(self, prompt: Prompt, now: float) -> int | None:
        """The limit of the prompt's admission if that has arrived; else holds the prompt."""
        admission = self.admissions.pop(prompt.request_id, None)
        if admission:
            return admission[0]
        self.prompts[prompt.request_id] = (prompt, now)
        return None

    def admit(self, request_id: str, limit_tokens: int, now: float) -> Prompt | None:
        """The admitted prompt if it has arrived; else holds the admission."""
        held = self.prompts.pop(request_id, None)
        if held:
            return held[0]
        self.admissions[request_id] = (limit_tokens, now)
        return None

    def extend(self, request_id: str, limit_tokens: int) -> None:
        if request_id in self.admissions:
            _, since = self.admissions[request_id]
            self.admissions[request_id] = (limit_tokens, since)

    def awaits_prompt(self, now: float) -> bool:
        """Whether a drain waits for the prompt of an admission."""
        return any(now - since <= PROMPT_WAIT_S for _, since in self.admissions.values())

    def of_other_origins(self, here: Iterable[Prompt], origins: Container[str]) -> list[str]:
        """The requests, of these and of the held ones, that came on other streams."""
        held = (prompt for prompt, _ in self.prompts.values())
        return [each.request_id for each in (*here, *held) if each.origin not in origins]

    def pop_prompts(self) -> list[Prompt]:
        """Removes and returns the held prompts; drops admissions without a prompt."""
        prompts = [prompt for prompt, _ in self.prompts.values()]
        self.prompts.clear()
        self.admissions.clear()
        return prompts

    def forget(self, request_id: str) -> None:
        self.prompts.pop(request_id, None)
        self.admissions.pop(request_id, None)

    def expire(self, now: float) -> list[str]:
        """Drops what has waited too long or exceeds the limit; returns the dropped admissions."""
        while self._over(self.prompts, now):
            del self.prompts[next(iter(self.prompts))]
        lost = []
        while self._over(self.admissions, now):
            lost.append(next(iter(self.admissions)))
            del self.admissions[lost[-1]]
        return lost

    def _over(self, held: Mapping[str, tuple[object, float]], now: float) -> bool:
        if not held:
            return False
        _, since = next(iter(held.values()))
        return len(held) > self.held_max or now - since > self.held_s

    def check_integrity(self, here: Container[str]) -> None:
        """No request is held twice. Raises AssertionError."""
        assert not set(self.prompts) & set(self.admissions)
        assert not [request_id for request_id in self.prompts if request_id in here]


class ExpectedCancels:
    """Requests with a cancel on its way that belongs to an earlier placement: they were moved away
    and back before it arrived."""

    def __init__(self) -> None:
        self._request_ids: set[str] = set()

    def expect(self, request_id: str) -> None:
        """Ignores the next cancel of this request."""
        if len(self._request_ids) < HELD_MAX:
            self._request_ids.add(request_id)

    def pop(self, request_id: str) -> bool:
        """Whether a cancel belongs to an earlier placement; true once per expected cancel."""
        if request_id not in self._request_ids:
            return False
        self._request_ids.remove(request_id)
        return True

    def discard(self, request_id: str) -> None:
        """Expects no cancel of a request that has ended."""
        self._request_ids.discard(request_id)

    def clear(self) -> None:
        """Expects no cancels, because their scheduler is gone."""
        self._request_ids.clear()
