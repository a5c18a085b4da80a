"""Methods that vLLM adds to the processes of its replica (`worker_extension_cls`).

Most are for vLLM's model runner V1, which CPUs have; V2 does the same by itself. V1 draws by a
generator per request, which no other process can continue, and which it cannot rewind on a CPU
after a part of a prompt. Here each draw has a generator of its own, seeded by the request's seed
and the number of its output tokens.
"""

import ctypes
import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from foretoken.vllm.worker.sampling import SEED, draw_seed
from foretoken.vllm.worker.token_masks import mend_token_masks

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class SeededDraws(nn.Module):
    """Draws tokens as `draws` does, V1's sampler of top-k and top-p, with these generators."""

    def __init__(self, draws: nn.Module, runner: Any):
        super().__init__()
        self._draws = draws
        self._runner = runner
        self._generators: list[torch.Generator] = []  # by row

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Any:
        """`generators` by row are vLLM's, which has none for requests of the worker."""
        names = self._runner.input_batch.req_ids[: len(logits)]
        requests = self._runner.requests
        own = {
            row: self._generator(row).manual_seed(draw_seed(seed, len(request.output_token_ids)))
            for row, request in enumerate(map(requests.__getitem__, names))
            if (seed := (request.sampling_params.extra_args or {}).get(SEED)) is not None
        }
        return self._draws(logits, generators | own, k, p)

    def _generator(self, row: int) -> torch.Generator:
        while row >= len(self._generators):
            self._generators.append(torch.Generator(device=self._runner.device))
        return self._generators[row]


class RunnerExtension:
    """Called in each process of the replica."""

    model_runner: Any

    def foretoken_end_with(self, worker_pid: int) -> None:
        """Ends this process as soon as the worker's does; vLLM takes up to a minute to notice it,
        and the supervisor waits until all of the worker's output is closed. No effect in the
        worker's own process, and on systems other than Linux."""
        libc = ctypes.CDLL(None)
        if os.getpid() != worker_pid and hasattr(libc, "prctl"):
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def foretoken_seed_draws(self) -> None:
        """Replaces the draws of V1, and mends its masks. Once, before any request."""
        mend_token_masks()
        sampler = self.model_runner.sampler
        sampler.topk_topp_sampler = SeededDraws(sampler.topk_topp_sampler, self.model_runner)

    def foretoken_resume(
        self, name: str, prompt_ids: Sequence[int], output_ids: Sequence[int], sampling: Any
    ) -> None:
        """Adds a request that another engine has begun, as if it had been preempted here."""
        runner = self.model_runner
        runner.requests[name] = state = CachedRequestState(
            req_id=name,
            prompt_token_ids=list(prompt_ids),
            mm_features=[],
            sampling_params=sampling,
            generator=None,
            block_ids=(),
            num_computed_tokens=0,
            output_token_ids=list(output_ids),
        )
        if runner.uses_mrope:
            runner._init_mrope_positions(state)
