"""How running requests form steps: the interface of continuous and static batching.

`StaticBatching` (static_batching.py) applies while a static batch exists, and also runs requests
outside of it. Otherwise `ContinuousBatching` applies. `StaticBatching.current` is the one in use.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice

from services.core import FinishReason
from services.worker.requests.types.batch import NewToken, PrefillChunk
from services.worker.requests.types.sequence import Sequence

Draw = tuple[int, Sequence, int]  # a draw of a step: its row, the sequence, the token


class Batching(ABC):
    """Decides which running requests are in a step, and what happens at their ends.

    The defaults are those of requests that join and leave at every step.
    """

    # Whether the end of a budget is known before its last token. Only then can a step be composed
    # while another one is in flight.
    ends_known_ahead = True

    @abstractmethod
    def select(self, running: Iterable[Sequence], slots: int) -> list[Sequence]:
        """Requests that may be in the next step, at most `slots`, in order of admission."""

    @property
    def is_steady(self) -> bool:
        """Whether steps can repeat until a request ends or uses up its budget."""
        return True

    def begin_step(self) -> None:  # noqa: B027 - nothing to do by default
        """Called before each composition."""

    def pad_chunks(self, room: int) -> list[PrefillChunk]:
        """Padding for the rest of a step."""
        return []

    def force_progress(self) -> bool:
        """Called when nothing can run; returns whether something may run now."""
        return False

    def free_memory(self) -> bool:
        """Called when memory runs out: frees work that is not delivered; False without any."""
        return False

    def accept_draws(self, draws: Iterable[Draw]) -> Iterator[Draw]:
        """The valid draws of a step."""
        return iter(draws)

    def record_repeats(self, rows: Iterable[Sequence], steps: int) -> None:  # noqa: B027 - as above
        """These rows drew a token in each of these steps, which ended none."""

    def release_tokens(
        self, chunks: Iterable[PrefillChunk], tokens: list[NewToken]
    ) -> list[NewToken]:
        """The tokens of a step that are sent now; `chunks` were computed in it."""
        return tokens

    def end(self, sequence: Sequence, reason: FinishReason) -> bool:
        """A request has ended; returns whether it continues in its batch, with its end unsent."""
        return False

    def on_budget_changed(self, sequence: Sequence) -> bool:
        """A budget was used up or changed; returns whether that is reported later."""
        return False


class ContinuousBatching(Batching):
    """Requests join and leave at every step. O(running) per step."""

    def select(self, running: Iterable[Sequence], slots: int) -> list[Sequence]:
        # `within_budget` and `waits`, without a call for each request of each composition.
        return [
            s
            for s in islice(running, slots)
            if s.max_length > len(s.tokens) < s.limit_length
            and not s.upload_serial
            and (s.sampling_row < 0 or not s.waits)
        ]
