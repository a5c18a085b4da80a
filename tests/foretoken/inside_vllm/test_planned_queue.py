"""vLLM sees of its waiting queue what plans admit, and counts all that wait."""

from dataclasses import dataclass

import pytest

from foretoken.vllm.planned_queue import PlannedQueue


@dataclass(frozen=True)
class Waiting:
    request_id: str


A, B, C, OTHER = map(Waiting, ("a", "b", "c", "other"))


def queue_of(*requests: Waiting) -> PlannedQueue[Waiting]:
    """Plans are about all but OTHER."""
    queue = PlannedQueue[Waiting](lambda request: request is not OTHER)
    for request in requests:
        queue.add_request(request)
    return queue


def popped(queue: PlannedQueue[Waiting]) -> list[str]:
    names = []
    while queue:
        assert queue.peek_request() in queue
        names.append(queue.pop_request().request_id)
    return names


def test_only_admitted_requests_are_seen_in_the_order_of_the_plan() -> None:
    queue = queue_of(A, B, C)
    assert not queue and len(queue) == 3
    queue.admit(["c", "unknown", "a"])
    assert popped(queue) == ["c", "a"]
    assert list(queue) == [B]


def test_requests_without_a_plan_are_admitted_at_once_and_again_after_a_preemption() -> None:
    queue = queue_of(A, OTHER)
    assert popped(queue) == ["other"]
    queue.prepend_request(OTHER)
    assert popped(queue) == ["other"]
    assert not queue.preempted


def test_a_request_that_vllm_preempts_waits_for_a_plan() -> None:
    queue = queue_of(A)
    queue.admit(["a"])
    queue.prepend_request(queue.pop_request())
    assert not queue and queue.preempted
    assert queue.pop_preempted() == ["a"]
    assert not queue.preempted


def test_preemptions_of_a_plan_are_no_news_but_those_of_vllm_remain() -> None:
    queue = queue_of()
    queue.prepend_request(A)
    queue.prepend_request(B)
    queue.forget_preempted({"b"})
    assert queue.pop_preempted() == ["a"]


def test_skipped_requests_stay_admitted_in_their_order() -> None:
    """vLLM pops what is not ready, and prepends it after the step, the last one first."""
    queue = queue_of(A, B, C)
    queue.admit(["a", "b", "c"])
    skipped = [queue.pop_request(), queue.pop_request()][::-1]
    queue.prepend_requests(skipped)
    assert popped(queue) == ["a", "b", "c"]


def test_removed_and_held_requests_are_not_seen() -> None:
    queue = queue_of(A, B, C)
    queue.admit(["a", "b", "c"])
    queue.remove_requests([A, OTHER])
    queue.hold(["b"])
    assert popped(queue) == ["c"]
    assert list(queue) == [B]
    queue.admit(["b"])
    assert popped(queue) == ["b"]


def test_nothing_is_popped_that_is_not_admitted() -> None:
    queue = queue_of(A)
    with pytest.raises(IndexError, match="no waiting request is admitted"):
        queue.pop_request()
    with pytest.raises(IndexError, match="no waiting request is admitted"):
        queue.peek_request()
