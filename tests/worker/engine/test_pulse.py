"""How long the engine's thread has been silent."""

from collections.abc import Callable

from services.worker.engine.pulse import Pulse


def test_silence_counts_from_a_question_to_its_answer() -> None:
    sent: list[Callable[[], None]] = []
    pulse = Pulse(sent.append)
    assert pulse.silent_s(10.0) == 0.0  # asks
    assert [pulse.silent_s(at) for at in (11.0, 15.5)] == [1.0, 5.5]
    assert len(sent) == 1  # a hanging thread is asked once
    sent[0]()
    assert pulse.silent_s(16.0) == 0.0  # asks again
    sent[1]()
    assert pulse.silent_s(100.0) == 0.0  # an idle thread has not been silent
    assert pulse.silent_s(101.0) == 1.0
