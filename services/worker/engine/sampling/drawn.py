"""Drawn: what a step drew, on the device at once and on the host when it is asked for."""

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def of(self, raw: Tensor, tokens: Tensor) -> list[Tensor]:
        """Of raw logprobs [rows that ask, vocabulary]: of the token drawn, of the likeliest, and
        which these are. As many for every row: ties are then the same in any company."""
        chosen = raw.gather(-1, self.where.of(tokens)[:, None])[:, 0]
        width = min(MAX_LOGPROBS, raw.shape[-1]) if any(self.tops) else 0
        best = raw.topk(width)
        return [chosen, best.values, best.indices]


class Drawn:
    """`tokens` [rows], int64, is on the device: the next step can read it there.

    The way to the host begins here. A copy that is asked for later would wait for whatever was
    launched in between, the next step first.
    """

    def __init__(self, tokens: Tensor, asked: Asked | None = None, raw: Tensor | None = None):
        self.tokens = tokens
        self._asked = asked
        made = [tokens]
        if asked is not None and raw is not None:
            made += asked.of(raw, tokens)
        self._copies = [
            x.to("cpu", non_blocking=True) for x in made
        ]  # from CUDA, into pinned memory
        self._there: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]  # no types
            self._there.record(torch.cuda.current_stream(tokens.device))

    def take(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """A token a row, and logprobs of the rows that ask. Waits for the device: the only place
        of a step that does."""
        if self._there is not None:
            self._there.synchronize()
        tokens, *told = (x.tolist() for x in self._copies)
        if self._asked is None or not told:
            return tokens, {}
        rows = zip(self._asked.rows, self._asked.tops, *told, strict=True)
        return tokens, {
            row: TokenLogprobs(chosen, tuple(ids[:top]), tuple(best[:top]))
            for row, top, chosen, best, ids in rows
        }
