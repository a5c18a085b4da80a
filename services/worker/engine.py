"""Engine: state, model and cache. The loop is `step`: settle → compose → run → draw → commit."""

from time import perf_counter

import torch
from torch import Tensor

from services.core import HeldRequest, Plan, Report
from services.worker.assembly import assemble
from services.worker.batch import StepBatch, StepResult, TokenLogprobs
from services.worker.engine_config import EngineConfig
from services.worker.inputs import StepInputs
from services.worker.model import PagedModel, PagedStep, load_model
from services.worker.prompt import Prompt
from services.worker.sampling import Draw, is_plain, sample
from services.worker.sequence import Sequence
from services.worker.state import WorkerState

TINY_PARAMETERS = 20_000_000


class StepFailed(Exception):
    """A step broke; `sequences` were in it and are gone. `__cause__` says why."""

    def __init__(self, sequences: list[Sequence]):
        super().__init__(f"a step of {len(sequences)} sequences failed")
        self.sequences = sequences


class Engine:
    """One model replica. Not thread-safe: plans and prompts go in between two steps."""

    def __init__(self, model: PagedModel, config: EngineConfig):
        parts = assemble(model, config)
        self.model = model
        self.kv_bytes_per_token = parts.kv_bytes_per_token
        self.state = WorkerState(parts.limits)
        self._kernels = parts.kernels
        self._swapper = parts.swapper
        self._step = PagedStep(parts.cache, parts.kernels)
        self._inputs = StepInputs(model.device)

    @classmethod
    def load(cls, config: EngineConfig) -> "Engine":
        """Raises ValueError, one sentence, when the model can't be loaded or doesn't fit."""
        model = load_model(config.model, _device(config.device), config.dtype)
        threads = config.torch_threads or _threads(model)
        if threads:
            torch.set_num_threads(threads)
        return cls(model, config)

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

        Raises StepFailed, its sequences ended as ERROR, when the computation breaks.
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
        except Exception as error:
            raise StepFailed(self.state.fail(batch)) from error
        return self.state.commit(batch, tokens, perf_counter() - start, logprobs)

    def _compose(self) -> StepBatch | None:
        """The next batch. What it needs moved is issued before whatever is computed from here."""
        self.state.arrived(self._swapper.settle())
        self.state.swapped(self._swapper.take_timings())
        batch = self.state.compose()
        if moves := self.state.take_moves():
            self.state.lost(self._swapper.start(moves))
        return batch

    def run(self, batch: StepBatch) -> Tensor:
        """Logits [sampling rows, vocabulary] of the batch, its KV stored."""
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


def _threads(model: PagedModel) -> int:
    """One where handing work to another thread costs more than doing it; 0: as PyTorch does."""
    tiny = model.module.num_parameters() < TINY_PARAMETERS
    return 1 if tiny and model.device.type == "cpu" else 0


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no CUDA GPU here")
    return torch.device(name)
