"""The drawn tokens of a step: on the device at once, on the host on request."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.worker.kv.device_streams import Lane, Streams
from services.worker.requests.types.batch import TokenLogprobs
from services.worker.requests.types.prompt import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a batch; `index` is None for all rows."""

    index: Tensor | None

    def select(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Rows that request logprobs, and the number of alternatives each."""

    rows: list[int]
    tops: list[int]
    where: Rows

    def gather(self, logits: Tensor, tokens: Tensor) -> list[Tensor]:
        """Raw logprobs from the batch's logits, as `gather_logprobs`."""
        chosen = self.where.select(tokens)[:, None]
        return gather_logprobs(self.where.select(logits), chosen, any(self.tops))


def gather_logprobs(logits: Tensor, tokens: Tensor, alternatives: bool) -> list[Tensor]:
    """Raw logprobs of `tokens` [rows, 1]; ids and logprobs of the most likely tokens [rows, k].

    k is the same for every row, so that ties do not depend on other rows; 0 without
    `alternatives`.
    """
    raw = logits.float().log_softmax(-1)
    best = raw.topk(min(MAX_LOGPROBS, raw.shape[-1]) if alternatives else 0)
    return [raw.gather(-1, tokens)[:, 0], best.indices, best.values]


class DrawnTokens:
    """`tokens` [rows], int64, is on the device, where the next step can read it.

    The copy to the host begins at creation. A later copy would wait for everything that was
    launched in between, such as the next step.
    """

    def __init__(
        self,
        tokens: Tensor,
        streams: Streams,
        logprob_rows: LogprobRows | None = None,
        logprobs: Sequence[Tensor] = (),
    ):
        """`logprobs` are the requested logprobs of these tokens, if any."""
        self.tokens = tokens
        self._logprob_rows = logprob_rows
        # PyTorch copies from CUDA into pinned memory.
        self._copies = [x.to("cpu", non_blocking=True) for x in (tokens, *logprobs)]
        self._copied = streams.record(Lane.COMPUTE)

    def to_host(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """One token per row, and logprobs of the rows that requested them. Waits for the device;
        nothing else in a step does."""
        self._copied.synchronize()
        tokens, *logprobs = (x.tolist() for x in self._copies)
        if self._logprob_rows is None:
            return tokens, {}
        rows = zip(self._logprob_rows.rows, self._logprob_rows.tops, *logprobs, strict=True)
        return tokens, {
            row: TokenLogprobs(chosen, tuple(ids[:top]), tuple(best[:top]))
            for row, top, chosen, ids, best in rows
        }
