"""Engine: state, model and cache. The loop is `step`: settle → compose → run → draw → commit."""

from time import perf_counter
from traceback import clear_frames

import numpy as np
import torch
from torch import Tensor

from services.core import HeldRequest, Plan, Report
from services.worker.config import EngineConfig
from services.worker.engine.assembly import assemble
from services.worker.engine.inputs import StepInputs
from services.worker.engine.ranks import ALONE, Ranks, RanksApart, rank_device
from services.worker.engine.sampling import Draw, is_plain, sample
from services.worker.machine import threads_of
from services.worker.model.paged import PagedModel, PagedStep, load_model
from services.worker.requests.batch import (
    DecodeRows,
    PrefillChunk,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from services.worker.requests.prompt import Prompt
from services.worker.requests.sequence import Sequence
from services.worker.requests.state import WorkerState

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_PROBE = Prompt("\0probe", (0, 0), 2, 1)  # no request is called like this


class StepFailed(Exception):
    """A step broke, and nothing of it counts; `__cause__` says why.

    `sequences` ended by it: one that was in it alone, or none, as those in it are tried in parts
    from now on, or one of them was evicted.
    """

    def __init__(self, what: str, sequences: list[Sequence]):
        super().__init__(what)
        self.sequences = sequences


class Engine:
    """One model replica. Not thread-safe: plans and prompts go in between two steps."""

    def __init__(self, model: PagedModel, config: EngineConfig, ranks: Ranks = ALONE):
        parts = assemble(model, config, ranks)
        self.model = model
        self.ranks = ranks
        self.kv_bytes_per_token = parts.kv_bytes_per_token * ranks.size
        self.state = WorkerState(parts.limits)
        self._kernels = parts.kernels
        self._swapper = ranks.moving(parts.swapper)
        self._step = PagedStep(parts.cache, parts.kernels)
        self._inputs = StepInputs(model.device)

    @classmethod
    def load(cls, config: EngineConfig, ranks: Ranks = ALONE) -> "Engine":
        """Of one process, or this rank's part. Raises ValueError, one sentence, when the model
        can't be loaded or doesn't fit."""
        assert config.tensor_parallel == ranks.size, "several are loaded by parallel.loading"
        device = rank_device(config, ranks.rank)
        fuse = config.fused_forward == "auto"
        model = load_model(config.model, device, config.dtype, fuse, ranks.part)
        parameters = model.module.num_parameters()
        sharing = config.local_workers * ranks.size
        threads = config.torch_threads or threads_of(parameters, device, sharing)
        if threads:
            torch.set_num_threads(threads)
        return cls(model, config, ranks)

    def add(self, prompt: Prompt, now: float) -> str | None:
        """Take a prompt; returns why it can never run here, if so."""
        if max(prompt.token_ids) >= self.model.vocab_size or min(prompt.token_ids) < 0:
            self.state.refuse(prompt.request_id)
            return f"token_ids must lie in [0, {self.model.vocab_size})"
        return self.state.receive(prompt, now)

    def apply(self, plan: Plan, now: float) -> None:
        self.state.apply(plan, now)

    def reset(self) -> None:
        """Forget all requests, and what is on its way for them."""
        self.state.reset()
        self._swapper.reset()

    def attach(self) -> tuple[HeldRequest, ...]:
        """A scheduler comes; returns who is here, to be adopted."""
        return self.state.attach()

    def report(self) -> Report | None:
        return self.state.report()

    def step(self) -> StepResult | None:
        """One iteration; None when nothing can run.

        Raises StepFailed when the computation breaks; the next step is then another. Raises
        RanksApart when there is no next one.
        """
        batch = self._compose()
        while batch is None and self._swapper.busy:
            self._swapper.wait()
            batch = self._compose()
        if batch is None:
            return None
        start = perf_counter()
        try:
            tokens, logprobs = self._draw(batch, self.run(batch))
        except RanksApart:
            raise
        except Exception as error:
            raise self._failed(batch, error) from error
        return self.state.commit(batch, tokens, perf_counter() - start, logprobs)

    def _compose(self) -> StepBatch | None:
        """The next batch. What it needs moved is issued before whatever is computed from here."""
        self.state.arrived(self._swapper.settle())
        self.state.swapped(self._swapper.take_timings())
        batch = self.state.compose()
        if moves := self.state.take_moves():
            self.state.lost(self._swapper.start(moves))
        return batch

    def _failed(self, batch: StepBatch, error: Exception) -> StepFailed:
        rows = len(batch.sequences)
        clear_frames(error.__traceback__)  # what it computed so far takes memory
        if isinstance(error, OUT_OF_MEMORY) and self.state.out_of_memory(batch):
            return StepFailed(f"a step of {rows} rows found no memory; one gave way", [])
        return StepFailed(f"a step of {rows} rows failed", self.state.fail(batch))

    def works(self) -> bool:
        """Whether anything can be computed: a token of nobody's prefilled, and one decoded. When
        a request fails alone, this tells it from a device that is broken."""
        pool, probe = self.state.pool, Sequence.start(_PROBE, 0)
        try:
            if not pool.grow(probe.request_id, len(probe.tokens)):
                return False
            table = pool.table(probe.request_id)
            none = DecodeRows([], [], pool.block_tokens)
            self.run(StepBatch(none, [PrefillChunk(probe, 0, 1, np.array(table, np.int64))]))
            probe.computed = 1
            rows = DecodeRows([probe], [table], pool.block_tokens)
            self.run(StepBatch(rows, [])).argmax(-1).tolist()  # waits for the device
        except Exception:
            return False
        finally:
            pool.release(probe.request_id)
        return True

    def run(self, batch: StepBatch) -> Tensor:
        """Logits [sampling rows, vocabulary] of the batch, its KV stored."""
        with self.ranks.together(batch):
            inputs = self._inputs.prepare(batch)
            with torch.inference_mode():
                self._kernels.prepare(batch, inputs.slots)
            return self.model.forward(inputs.tokens, inputs.positions, self._step, inputs.rows)

    @torch.inference_mode()
    def _draw(self, batch: StepBatch, logits: Tensor) -> tuple[list[int], dict[int, TokenLogprobs]]:
        sequences = batch.sampling
        if all(is_plain(sequence.prompt.sampling) for sequence in sequences):
            return logits.argmax(-1).tolist(), {}
        return sample(logits, [_draw_of(s) for s in sequences], self.model.eos_ids)


def _draw_of(sequence: Sequence) -> Draw:
    return Draw(sequence.prompt.sampling, sequence.tokens, sequence.prompt_tokens)
