"""The pace of messages to clients: the configured rate, and less while messages take long."""

import pytest

from gateway.sessions.event_pace import EventPace


def test_calls_share_the_configured_rate():
    pace = EventPace(max_messages_per_s=10_000, max_pause_s=0.1)
    assert [pace.interval_s(live) for live in (0, 1, 256)] == pytest.approx([0, 0.0001, 0.0256])
    assert pace.interval_s(5_000) == 0.1


def test_messages_that_take_long_are_sent_less_often():
    """256 events of 100 µs take 25.6 ms: 40 % of 64 ms."""
    pace = EventPace(max_messages_per_s=10_000, max_pause_s=0.1)
    pace.on_tokens(256, 256, 0.0256)
    assert pace.interval_s(256) == pytest.approx(0.064)
    pace.on_tokens(256, 0, 5.0)  # nothing was written: it says nothing about messages
    assert pace.interval_s(256) == pytest.approx(0.064)
    pace.on_tokens(256, 128, 0.00512)  # 20 µs each, half of them written: halfway to 60 µs
    assert pace.interval_s(256) == pytest.approx(0.0384)
    pace.on_tokens(1_000, 1_000, 0.01)  # 10 µs: the configured rate is the limit again
    assert pace.interval_s(256) == pytest.approx(0.0256)
