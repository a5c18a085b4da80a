"""Live choices, by the ids that scheduler and workers know them by, and how each gets its next."""

from collections.abc import Callable, Iterator

from gateway.peers import messages
from gateway.sessions.call import Live
from gateway.sessions.placement import Placement
from protos.generated import scheduler_pb2
from services.core import FinishReason

ToScheduler = Callable[[scheduler_pb2.SubmitMessage], object]


class Roster:
    """Every live choice is here once: submitted under an id, or waiting to be.

    Each submission has an id of its own, so that what still comes for an earlier one changes
    nothing; a choice that is only told of again keeps its id.
    """

    def __init__(self, to_scheduler: ToScheduler):
        self._to_scheduler = to_scheduler
        self._submitted: dict[str, Live] = {}
        self._waiting: dict[int, Live] = {}

    def __len__(self) -> int:
        return len(self._submitted) + len(self._waiting)

    def __iter__(self) -> Iterator[Live]:
        """A copy's, so that choices may come and go meanwhile."""
        return iter([*self._submitted.values(), *self._waiting.values()])

    def get(self, wire_id: str) -> Live | None:
        return self._submitted.get(wire_id)

    def submitted(self) -> list[Live]:
        return list(self._submitted.values())

    def waiting(self) -> list[Live]:
        return list(self._waiting.values())

    def at(self, address: str) -> list[Live]:
        """Those placed on the worker there."""
        return [live for live in self._submitted.values() if live.place.address == address]

    def addresses(self) -> set[str]:
        """Of workers that hold a choice."""
        return {live.place.address for live in self._submitted.values()}

    def count_running(self) -> int:
        return sum(live.place.running for live in self._submitted.values())

    def add(self, live: Live) -> None:
        """It waits for its first submission."""
        self._waiting[id(live)] = live

    def submit(self, live: Live, now_s: float) -> None:
        """Send it to the scheduler under a new id, with the tokens it has."""
        self._waiting.pop(id(live), None)
        again, delivered = live.place.attempts, len(live.session.output)
        wire_id = f"{live.call.request_id}-{live.session.index}" + f"~{again}" * (again > 0)
        live.place = Placement(wire_id, again + 1, delivered)
        self._submitted[wire_id] = live
        self._tell(live, delivered, now_s)

    def announce(self, live: Live, now_s: float) -> None:
        """Tell a scheduler that may not know it of a choice that goes on where it is."""
        place, delivered = live.place, len(live.session.output)
        place.announced = True
        self._tell(live, delivered, now_s, place.worker_id)

    def _tell(self, live: Live, delivered: int, now_s: float, worker_id: str = "") -> None:
        self._to_scheduler(
            messages.new_request(
                live.place.wire_id,
                live.generation,
                delivered,
                now_s,
                worker_id,
                live.prefix_hashes,
            )
        )

    def withdraw(self, live: Live) -> None:
        """Forget its present submission; it waits for the next."""
        self._submitted.pop(live.place.wire_id, None)
        live.place = Placement("", live.place.attempts, live.place.had_tokens)
        self._waiting[id(live)] = live

    def cancel(self, live: Live, reason: FinishReason) -> None:
        """Tell the scheduler, if it was told of it, that it is over or not to go on."""
        if live.place.wire_id:
            output_tokens = len(live.session.output)
            self._to_scheduler(messages.cancel(live.place.wire_id, reason, output_tokens))

    def disown(self, wire_id: str) -> None:
        """Tell the scheduler that one it goes on with is nobody's."""
        self._to_scheduler(messages.cancel(wire_id, FinishReason.CANCELLED, 0))

    def drop(self, live: Live) -> None:
        """It is over."""
        self._waiting.pop(id(live), None)
        self._submitted.pop(live.place.wire_id, None)
