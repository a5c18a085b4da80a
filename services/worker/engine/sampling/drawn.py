"""Drawn: what a step drew, on the device at once and on the host when it is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.worker.kv.device_streams import Lane, Streams
from services.worker.requests.batch import TokenLogprobs
from services.worker.requests.prompt import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a batch; `index` is None where it is all of them."""

    index: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks for logprobs: which rows, and how many of the likeliest each."""

    rows: list[int]
    tops: list[int]
    where: Rows

    def of(self, logits: Tensor, tokens: Tensor) -> list[Tensor]:
        """From the whole batch's logits, raw logprobs: of the token drawn, of the likeliest, and
        which these are. As many for every row: ties are then the same in any company."""
        raw = self.where.of(logits).float().log_softmax(-1)
        chosen = raw.gather(-1, self.where.of(tokens)[:, None])[:, 0]
        width = min(MAX_LOGPROBS, raw.shape[-1]) if any(self.tops) else 0
        best = raw.topk(width)
        return [chosen, best.values, best.indices]


class Drawn:
    """`tokens` [rows], int64, is on the device: the next step can read it there.

    The way to the host begins here. A copy that is asked for later would wait for whatever was
    launched in between, the next step first.
    """

    def __init__(
        self,
        tokens: Tensor,
        streams: Streams,
        asked: Asked | None = None,
        told: Sequence[Tensor] = (),
    ):
        """`told` is what was `asked` of these tokens, if anything was."""
        self.tokens = tokens
        self._asked = asked
        # From CUDA, into pinned memory.
        self._copies = [x.to("cpu", non_blocking=True) for x in (tokens, *told)]
        self._there = streams.record(Lane.COMPUTE)

    def take(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """A token a row, and logprobs of the rows that ask. Waits for the device: the only place
        of a step that does."""
        self._there.synchronize()
        tokens, *told = (x.tolist() for x in self._copies)
        if self._asked is None:
            return tokens, {}
        rows = zip(self._asked.rows, self._asked.tops, *told, strict=True)
        return tokens, {
            row: TokenLogprobs(chosen, tuple(ids[:top]), tuple(best[:top]))
            for row, top, chosen, best, ids in rows
        }
