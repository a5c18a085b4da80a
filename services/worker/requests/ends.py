"""RequestEnds: removes requests from a worker, at once or when their static batch is over."""

from collections.abc import Iterable

from services.core import FinishReason
from services.worker.requests.kv_manager import KVManager
from services.worker.requests.pending import ExpectedCancels
from services.worker.requests.reporting import Reporter
from services.worker.requests.static_batching import Batch, StaticBatching
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.sequence import Sequence


class RequestEnds:
    """Removes requests from the KV, their static batch and the next report."""

    def __init__(self, kv: KVManager, static: StaticBatching, reporter: Reporter):
        self._kv = kv
        self._static = static
        self._reporter = reporter
        self.expected_cancels = ExpectedCancels()
        self._late: list[
            NewToken
        ] = []  # last tokens, still to send, of static batches that are over

    def forget(self, request_id: str) -> None:
        """Frees everything of a request, and reports nothing about it."""
        self._static.remove_from_batch(request_id)
        self._kv.forget(request_id)
        self._reporter.forget(request_id)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Frees everything of a request, and reports its end."""
        self.forget(sequence.request_id)
        self.expected_cancels.discard(sequence.request_id)
        self._reporter.record_completion(sequence.request_id, sequence.output_tokens, reason)

    def settle_batches(self) -> None:
        """Begins and ends static batches."""
        self.end_batches(self._static.settle())

    def end_batches(self, batches: Iterable[Batch]) -> None:
        """Sends the ends of members; reports members that used up their budgets."""
        for batch in batches:
            for request_id, sequence in batch.members.items():
                if last := batch.last.get(request_id):
                    self.end_late(sequence, last)
                else:
                    self._reporter.include(sequence)

    def end_late(self, sequence: Sequence, last: NewToken) -> None:
        """Ends a member that drew its last token in an earlier step."""
        assert sequence.ended, "the member has not ended"
        sequence.unsent -= 1
        self._late.append(last)
        self.finish(sequence, sequence.ended)

    def pop_late(self) -> list[NewToken]:
        """Last tokens of the requests of static batches that ended between two steps."""
        late, self._late = self._late, []
        return late
