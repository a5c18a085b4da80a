"""What a call reserves of its key's limits once the scheduler bounds the lengths of its choices."""

import time

import pytest

from gateway.admission.key_limits import Grant, KeyLimiter
from gateway.types.client_request import ClientRequest
from gateway.types.generation import GenerationRequest, Sampling
from gateway.types.key_limits import KeyLimits
from protos.generated import scheduler_pb2 as sched
from services.core import Sla
from tests.gateway.sessions.test_sessions import HERE, SessionTranscript

PROMPT, MOST = (1, 2), 50
TOKENS, QUEUE = KeyLimits(tokens_per_minute=1_000), KeyLimits(queued_tokens=1_000)


def open_limited(
    transcript: SessionTranscript, limits: KeyLimits = TOKENS, choices: int = 1
) -> tuple[Grant, list[str]]:
    """A call with the limits, and the ids of its choices at the scheduler."""
    limiter = KeyLimiter({"ada": limits})
    sampling = Sampling(seed=1, max_tokens=MOST, n=choices)
    request = GenerationRequest(ClientRequest(None), PROMPT, sampling, Sla(), time.monotonic())
    needed = [request.tokens_needed(choice, MOST) for choice in range(choices)]
    grant = limiter.reserve("ada", needed, 0.0)
    assert grant is not None
    transcript.sessions.open([request], grant=grant)
    return grant, [each.request.request_id for each in transcript.to_scheduler]


def bound(transcript: SessionTranscript, name: str, tokens: int) -> None:
    transcript.send_event(name, length_bound=sched.LengthBound(output_tokens=tokens))


async def test_each_choice_reserves_its_bound_and_the_first_one_the_prompt() -> None:
    transcript = SessionTranscript()
    grant, names = open_limited(transcript, QUEUE, choices=2)
    assert grant.needed == [52, 50]
    bound(transcript, names[1], 10)
    assert grant.needed == [52, 10]
    bound(transcript, names[0], 20)
    bound(transcript, names[1], MOST + 9)  # as max_tokens
    assert grant.needed == grant.queued == [22, 50]


async def test_a_bound_below_the_delivered_tokens_reserves_these() -> None:
    transcript = SessionTranscript()
    grant, [name] = open_limited(transcript)
    transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    transcript.send_tokens(name, 0, [40] * 5)
    bound(transcript, name, 3)
    assert grant.needed == [7]


async def test_a_bound_does_not_answer_an_announcement() -> None:
    """Only a placement answers the announcement to a new scheduler, which is asked for a bound,
    too."""
    transcript = SessionTranscript()
    _, [name] = open_limited(transcript)
    transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    transcript.reopen_scheduler()
    assert transcript.to_scheduler[-1].request.length_quantile == 0.95
    bound(transcript, name, 10)
    transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    assert len(transcript.prompts) == 1  # the request stays


@pytest.mark.parametrize(
    ("limits", "asks"),
    [(TOKENS, True), (QUEUE, True), (KeyLimits(requests_per_minute=9), False)],
)
async def test_bounds_are_requested_where_a_limit_counts_tokens(
    limits: KeyLimits, asks: bool
) -> None:
    transcript = SessionTranscript()
    open_limited(transcript, limits)
    assert bool(transcript.to_scheduler[-1].request.length_quantile) is asks
