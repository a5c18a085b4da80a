"""Drawn: a step's tokens, on the device at once and on the host when they are asked for."""

from collections.abc import Mapping

from torch import Tensor

from services.worker.kv.device_streams import Lane, Streams
from services.worker.requests.batch import TokenLogprobs


class Drawn:
    """`tokens` [sampling rows], int64, on the device: the next step reads them there.

    Their way to the host begins here. A copy that is asked for later would wait for whatever was
    launched in between, the next step first.
    """

    def __init__(self, tokens: Tensor, logprobs: Mapping[int, TokenLogprobs], streams: Streams):
        self.tokens = tokens
        self._logprobs = logprobs
        self._there = tokens.to("cpu", non_blocking=True)  # from CUDA, into pinned memory
        self._arrived = streams.record(Lane.COMPUTE)

    def take(self) -> tuple[list[int], Mapping[int, TokenLogprobs]]:
        """The tokens, and logprobs by row of those who ask. The only wait for the device."""
        self._arrived.synchronize()
        tokens: list[int] = self._there.tolist()
        return tokens, self._logprobs
