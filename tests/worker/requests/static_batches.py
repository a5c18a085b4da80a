"""Static batches for transcripts."""

from services.core import Grant, StaticBatch
from tests.worker.requests.worker_transcript import Transcript


def together(t: Transcript, number: int = 1, **limits: int) -> None:
    grants = [Grant(*item) for item in limits.items()]
    t.plan(admit=grants, batches=[StaticBatch(number, tuple(limits))])


def wasted(t: Transcript) -> tuple[int, int, int]:
    """Padding, omitted padding, invalid tokens."""
    counters = t.state.counters
    return counters.padding_tokens, counters.padding_left_out_tokens, counters.invalid_tokens
