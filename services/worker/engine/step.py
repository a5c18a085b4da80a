"""Engine: state, model and cache. The loop is `step`: settle → compose → run → draw → commit.

With `overlap`, step N + 1 is composed and launched before N is committed: while the device
computes, it never waits for the host. What N drew, N + 1 reads on the device. All that is done to
blocks is issued on one stream: those that N's commit frees may be given away at once, though N + 1
may still write to them, as what a new owner stores there comes behind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from traceback import clear_frames

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.worker.config import EngineConfig
from services.worker.engine.assembly import assemble
from services.worker.engine.graphs.decode_graphs import DecodeGraphs
from services.worker.engine.graphs.sizes import graphs_wanted
from services.worker.engine.inputs import StepInputs
from services.worker.engine.phase_clock import Phase, PhaseClock, TimedAttention
from services.worker.engine.ranks import ALONE, Ranks, RanksApart, rank_device
from services.worker.engine.sampling.drawn import Drawn
from services.worker.engine.sampling.scored import Scored
from services.worker.engine.spare_cores import SpareCores, spare_cores_for
from services.worker.kernels.cpu.cached import how_built
from services.worker.kernels.interface import AttentionStep
from services.worker.machine import threads_of
from services.worker.model.compiled import is_wanted, require_compiler
from services.worker.model.paged import PagedModel, PagedStep, load_model
from services.worker.requests.batch import DecodeRows, PrefillChunk, StepBatch, StepResult
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


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way, whose tokens the device knows; and what its prompts were scored, if any
    ask."""

    batch: StepBatch
    drawn: Drawn
    scored: Scored | None = None


class Engine:
    """One model replica. One thread's at a time: plans and prompts go in between two steps. A step
    may be in flight then: all of this is right with it, and it counts as work."""

    def __init__(self, model: PagedModel, config: EngineConfig, ranks: Ranks = ALONE):
        parts = assemble(model, config, ranks)
        self.model = model
        self.ranks = ranks
        self.kv_bytes_per_token = parts.kv_bytes_per_token * ranks.size
        self.state = WorkerState(parts.limits)
        self.phases = PhaseClock()
        self.rest_block_bytes = parts.swapper.block_bytes * ranks.size
        self._kernels = parts.kernels
        self._swapper = ranks.moving(parts.swapper)
        self._step: AttentionStep = PagedStep(parts.cache, parts.kernels)
        self._inputs = StepInputs(model.device)
        on_cuda = model.device.type == "cuda"
        if not on_cuda:  # there it is launched, and not computed, by the time it returns
            self._step = TimedAttention(self._step, self.phases)
        self._overlap = config.overlap == "on" or (config.overlap == "auto" and on_cuda)
        self._launched: Launched | None = None
        self._clock = parts.clock
        self._graphs: DecodeGraphs | None = None
        if parts.graphs:
            self._graphs = DecodeGraphs.record(parts.graphs, self.run)
        self._sampler = parts.sampler
        self._cores: SpareCores | None = None  # where a step's threads go by what is free

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        lap: Callable[[str], None] = lambda _: None,
        ranks: Ranks = ALONE,
    ) -> "Engine":
        """Of one process, or this rank's part. Raises ValueError, one sentence, when the model
        can't be loaded or doesn't fit. `lap` is told what has just been done."""
        assert config.tensor_parallel == ranks.size, "several are loaded by parallel.loading"
        device = rank_device(config, ranks.rank)
        require_compiler(config.compile, device)
        graphs_wanted(config, device)  # or says so before weights are read

        def settle(module: PreTrainedModel) -> None:
            parameters = module.num_parameters()
            sharing = config.local_workers * ranks.size
            threads = config.torch_threads or threads_of(parameters, device, sharing)
            if threads:
                torch.set_num_threads(threads)

        fuse = config.fused_forward == "auto"
        model = load_model(config.model, device, config.dtype, fuse, settle, ranks.part)
        lap("model")
        if is_wanted(config.compile, device):
            model.compile_forward()
            lap("compiling")
        engine = cls(model, config, ranks)
        if not config.torch_threads and device.type == "cpu":
            sharing = config.local_workers * ranks.size
            engine._cores = spare_cores_for(model.module.num_parameters(), sharing)
        lap(f"kernels {how_built()}".rstrip())
        return engine

    def enter_thread(self) -> None:
        """Called first by the thread that is to step: PyTorch keeps these by thread."""
        torch.set_num_threads(torch.get_num_threads())
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)

    def add(self, prompt: Prompt, now: float) -> str | None:
        """Take a prompt; returns why it can never run here, if so."""
        size = self.model.vocab_size
        known = min(prompt.token_ids) >= 0 and max(prompt.token_ids) < size
        if field := prompt.sampling.beyond(size) if known else "token_ids":
            self.state.refuse(prompt.request_id)
            return f"{field} must lie in [0, {size})"
        return self.state.receive(prompt, now)

    def reset(self) -> None:
        """Forget all requests, and what is on its way for them; a step in flight is nobody's."""
        self._launched = None
        self.state.reset()
        self._swapper.reset()
        self._sampler.clear()

    def step(self) -> StepResult | None:
        """One iteration: its result; None when nothing can run.

        With `overlap`, another has been launched behind it, which the next call commits: whatever
        comes before that call counts in the step that it launches in turn.

        Raises StepFailed when the computation breaks; the next step is then another. Raises
        RanksApart when there is no next one.
        """
        self.phases.begin()
        self._launched = self._launched or self._launch()
        if self._launched is None:
            return None
        ahead = self._launch_behind(self._launched) if self._overlap else None
        landing, self._launched = self._launched, None
        result = self._land(landing)
        if ahead:
            self.state.advance(ahead.batch)
            self._launched = ahead
        self.phases.end()
        return result

    def _launch(self) -> Launched | None:
        """The next step, with nothing in flight."""
        batch = self._compose()
        while batch is None and self._swapper.busy:
            self.phases.enter(Phase.SWAP)
            self._swapper.wait()
            batch = self._compose()
        if batch is None:
            return None
        try:
            return self._start(batch)
        except RanksApart:
            raise
        except Exception as error:
            raise self._failed(batch, error) from error

    def _launch_behind(self, launched: Launched) -> Launched | None:
        """The step behind it, where that depends on nothing that the host does not know yet. One
        that breaks is tried again with nothing in flight."""
        if not self.state.in_flight:
            self.state.advance(launched.batch)
        batch = self._compose()
        if batch is None:
            return None
        try:
            return self._start(batch)
        except Exception as error:
            clear_frames(error.__traceback__)
            self.state.withdraw()
            return None

    def _compose(self) -> StepBatch | None:
        """The next batch. What it needs moved is issued before whatever is computed from here."""
        self.phases.enter(Phase.COMPOSE)
        self.state.arrived(self._swapper.settle())
        self.state.swapped(self._swapper.take_timings())
        batch = self.state.compose()
        if moves := self.state.take_moves():
            self.state.lost(self._swapper.start(moves))
        return batch

    def _start(self, batch: StepBatch) -> Launched:
        if self._cores is not None:
            self._cores.take()
        watch = self._clock.begin(batch)
        self.phases.enter(Phase.MODEL)
        logits = self.run(batch)
        self.phases.enter(Phase.SAMPLING)
        scored = None
        if chunks := batch.scored:
            draws = len(batch.sampling)
            scored, logits = Scored.of(chunks, logits[draws:]), logits[:draws]
        drawn = self._draw(batch, logits)
        self._clock.end(watch)
        return Launched(batch, drawn, scored)

    def _land(self, landing: Launched) -> StepResult:
        """Wait for it, and commit it. Times are the device's: a step begins behind the one before,
        and neither waits for the host nor for what is launched behind it."""
        self.phases.enter(Phase.MODEL)
        try:
            tokens, logprobs = landing.drawn.take()
            scores = landing.scored.take() if landing.scored else ()
        except Exception as error:
            raise self._failed(landing.batch, error) from error
        self.phases.enter(Phase.COMMIT)
        return self.state.commit(landing.batch, tokens, self._clock.take(), logprobs, scores)

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
        """Logits [sampling rows, then scoring ones, vocabulary] of the batch, its KV stored; until
        the next run."""
        in_flight = self._launched.drawn.tokens if self._launched else None
        with self.ranks.together(batch):
            with torch.inference_mode():
                inputs = self._inputs.prepare(batch, in_flight)
            if self._graphs is not None and self._graphs.takes(batch):
                return self._graphs.run(batch, inputs)
            with torch.inference_mode():
                self._kernels.prepare(batch, inputs.slots)
            return self.model.forward(inputs.tokens, inputs.positions, self._step, inputs.rows)

    def _draw(self, batch: StepBatch, logits: Tensor) -> Drawn:
        return self._sampler.draw(batch.sampling, logits)
