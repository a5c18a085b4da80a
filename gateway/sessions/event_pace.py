"""EventPace: how often clients get messages, so that the event loop has time for all else. Pure."""

MOST_SHARE = 0.4  # of the time, for messages to clients
SMOOTHED_EVENTS = 256  # number of events over which their cost is averaged


class EventPace:
    """The interval between two messages of one call.

    All calls together stay within `max_messages_per_s`, and within MOST_SHARE of the time as
    measured: a gateway that gets less of a core than it needs combines more tokens in a message
    instead of falling behind.
    """

    def __init__(self, max_messages_per_s: float, max_pause_s: float):
        self._least_s, self._max_pause_s = 1 / max_messages_per_s, max_pause_s
        self._cost_s = 0.0  # of one event, measured

    def interval_s(self, live: int) -> float:
        """Seconds between two messages of each of `live` choices."""
        return min(self._max_pause_s, live * max(self._least_s, self._cost_s / MOST_SHARE))

    def on_tokens(self, choices: int, events: int, elapsed_s: float) -> None:
        """Tokens of so many choices, of which `events` were written, took this time, which includes
        time of other processes. The more were written, the more it says about events."""
        if events:
            weight = min(1.0, events / SMOOTHED_EVENTS)
            self._cost_s += weight * (elapsed_s / choices - self._cost_s)
