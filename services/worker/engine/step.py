"""Engine: state, model and cache. A `step` settles transfers, composes, runs, draws and commits.

With `overlap`, step N + 1 is composed and launched before N is committed, so that the device does
not wait for the host. N + 1 reads the tokens of N on the device. All operations on blocks are
issued on one stream. Blocks that the commit of N frees can therefore be reused at once: N + 1 may
still write to them, but the writes of a new owner come later on the stream.
"""

from collections.abc import Callable, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from traceback import clear_frames

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.worker.config import EngineConfig
from services.worker.engine.adapter_store import AdapterStore
from services.worker.engine.assembly import assemble
from services.worker.engine.graphs.decode_graphs import DecodeGraphs
from services.worker.engine.graphs.sizes import graphs_wanted
from services.worker.engine.inputs import AdapterInputs, StepInputs
from services.worker.engine.interface import StepFailed
from services.worker.engine.phase_clock import EnginePhase, PhaseClock
from services.worker.engine.ranks import SINGLE_RANK, Ranks, RanksApart, rank_device
from services.worker.engine.sampling.drawn import DrawnTokens
from services.worker.engine.sampling.scored import PromptScores
from services.worker.engine.spare_cores import SpareCores, spare_cores_for
from services.worker.engine.timed_attention import TimedAttention
from services.worker.kernels.cpu.kernel_cache import kernel_source
from services.worker.kernels.interface import AttentionStep
from services.worker.machine import torch_threads
from services.worker.model.compiled import compiles
from services.worker.model.paged import PagedModel, load_model
from services.worker.model.paged_attention import PagedStep
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch, StepResult
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
_PROBE = Prompt("\0probe", (0, 0), 2, 1)  # not a possible request id


@dataclass(frozen=True, slots=True)
class Launched:
    """A launched step: its tokens on the device, the scores of its prompts if requested, and the
    requests that a grammar ends, with a sentence for each."""

    batch: StepBatch
    drawn: DrawnTokens
    scored: PromptScores | None = None
    failed: Seq[tuple[Sequence, str]] = ()


class Engine:
    """One model replica, used by one thread at a time. Plans and prompts are applied between two
    calls of `step`, also while a step is in flight."""

    def __init__(self, model: PagedModel, config: EngineConfig, ranks: Ranks = SINGLE_RANK):
        parts = assemble(model, config, ranks)
        self.model = model
        self.ranks = ranks
        self.kv_bytes_per_token = parts.kv_bytes_per_token * ranks.size
        self.state = WorkerState(parts.limits)
        self.phases = PhaseClock()
        self.host_block_bytes = parts.host_block_bytes * ranks.size
        self._kernels = parts.kernels
        self.swapper = parts.swapper
        self._step: AttentionStep = PagedStep(parts.cache, parts.kernels)
        self._inputs = StepInputs(model.device)
        self.adapters = AdapterStore(model.adapters, self.state, ranks)
        self._adapter_inputs = AdapterInputs(model.adapters, model.device)
        on_cuda = model.device.type == "cuda"
        if not on_cuda:  # a call on a GPU returns when its work is launched, not computed
            self._step = TimedAttention(self._step, self.phases)
        self._overlap = overlaps(config, on_cuda)
        self._launched: Launched | None = None
        self._clock = parts.clock
        self._graphs: DecodeGraphs | None = None
        if parts.graphs:
            self._graphs = DecodeGraphs.record(parts.graphs, self.run)
        self._sampler = parts.sampler
        self._grammars = parts.grammars
        self._grammar_masks = parts.grammar_masks
        self._cores: SpareCores | None = None  # set if the number of threads follows the free cores

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        lap: Callable[[str], None] = lambda _: None,
        ranks: Ranks = SINGLE_RANK,
    ) -> "Engine":
        """The engine of one process, or of this rank's part. Raises ValueError with a sentence if
        the model cannot be loaded or does not fit. `lap` receives the name of each finished
        phase."""
        assert config.tensor_parallel == ranks.size, (
            "parallel.loading loads an engine of several ranks"
        )
        device = rank_device(config, ranks.rank)
        # These raise ValueError before weights are read.
        compiled = compiles(config.compile, device) and not _quantizes(config)
        graphs_wanted(config, device)
        overlaps(config, device.type == "cuda")

        def set_threads(module: PreTrainedModel) -> None:
            parameters = module.num_parameters()
            sharing = config.local_workers * ranks.size
            threads = config.torch_threads or torch_threads(parameters, device, sharing)
            if threads:
                torch.set_num_threads(threads)

        fuse = config.fused_forward == "auto"
        model = load_model(config.model, device, config.dtype, fuse, set_threads, ranks.sharder)
        if most := config.most_adapters:
            slots = config.most_adapters_on_device
            model.hold_adapters(most, slots, config.max_lora_rank, ranks.sharder)
            for name, path in config.lora_modules.items():
                model.adapters.load(model.adapters.read(name, path))
        lap("model")
        if _quantizes(config):
            model.quantize_weights()
            lap("quantizing")
        elif compiled:
            model.compile_forward()
            lap("compiling")
        else:
            model.pack_weights()
        engine = cls(model, config, ranks)
        if not config.torch_threads and device.type == "cpu":
            sharing = config.local_workers * ranks.size
            engine._cores = spare_cores_for(model.parameters, sharing)
        if not ranks.rank:
            engine._grammars.load()
        lap(f"kernels {kernel_source()}".rstrip())
        return engine

    @property
    def placement(self) -> str:
        return self.model.placement

    def check(self) -> None:
        """Raises RanksApart once a rank is gone."""
        self.ranks.check()

    def close(self) -> None:
        """Ends the other ranks."""
        self.ranks.close()

    def enter_thread(self) -> None:
        """Applies PyTorch's settings, which are per thread, to the thread that calls `step`."""
        torch.set_num_threads(torch.get_num_threads())
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)

    def prepare(self, prompt: Prompt, on_ready: Callable[[], None]) -> bool:
        """Begins what `add` needs: the compilation of a grammar. Returns whether there is nothing
        to wait for; else another thread calls `on_ready` afterwards."""
        return self._grammars.prepare(prompt.sampling.grammar, on_ready, self._awaited_grammars)

    def add(self, prompt: Prompt, now: float) -> str | None:
        """Adds a prompt. Returns why it can never run here, else None."""
        size = self.model.vocab_size
        if field := prompt.beyond(size):
            self.state.refuse(prompt.request_id)
            return f"{field} must lie in [0, {size})"
        if unloaded := self.adapters.refusal(prompt):
            self.state.refuse(prompt.request_id)
            return unloaded
        if fault := self._grammars.find_fault(prompt.sampling.grammar):
            self.state.refuse(prompt.request_id)
            return fault
        return self.state.receive(prompt, now)

    def _awaited_grammars(self) -> Set[str]:
        """Grammars of which a request here has no matcher yet. O(requests)."""
        here = self.state.sequences.values()
        prompts = [prompt for prompt, _ in self.state.pending.prompts.values()]
        prompts += [sequence.prompt for sequence in here if sequence.matcher is None]
        return {prompt.sampling.grammar for prompt in prompts}

    def reset(self) -> None:
        """Drops all requests and pending moves; the step in flight has no effect."""
        self._launched = None
        self.state.reset()
        self.ranks.send_reset()
        self.swapper.reset()
        self._sampler.clear()

    def step(self) -> StepResult | None:
        """Computes one step and returns its result; None if nothing can run.

        With `overlap`, the next step has been launched, and the next call commits it: commands
        before that call affect the step after it.

        Raises StepFailed if the computation fails; the next call computes a different step. Raises
        RanksApart if the replica is lost.
        """
        self.phases.begin()
        self._launched = self._launched or self._launch()
        if self._launched is None:
            return None
        ahead = self._launch_behind(self._launched) if self._overlap else None
        completed, self._launched = self._launched, None
        result = self._complete(completed)
        if ahead:
            self.state.steps.advance(ahead.batch)
            self._launched = ahead
        self.phases.end()
        return result

    def _launch(self) -> Launched | None:
        """Launches the next step with nothing in flight."""
        batch = self._compose()
        while batch is None and self.swapper.busy:
            self.phases.enter(EnginePhase.SWAP)
            self.swapper.wait()
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
        """Launches the step after `launched`, unless it depends on tokens that the host does not
        know yet. A failed launch is repeated when nothing is in flight."""
        if not self.state.steps.in_flight:
            self.state.steps.advance(launched.batch)
        batch = self._compose()
        if batch is None:
            return None
        try:
            return self._start(batch)
        except Exception as error:
            clear_frames(error.__traceback__)
            self.state.steps.withdraw()
            return None

    def _compose(self) -> StepBatch | None:
        """The next batch. Issues the copies of KV and adapters that must precede its
        computation."""
        self.phases.enter(EnginePhase.COMPOSE)
        if settled := self.swapper.settle():
            self.ranks.send_settled(settled)
            self.state.complete_uploads(settled)
        self.state.record_swaps(self.swapper.pop_timings())
        batch = self.state.steps.compose()
        self.adapters.place()
        if moves := self.state.pop_moves():
            self.ranks.send_moves(moves)
            self.state.drop_lost_kv(self.swapper.start(moves))
        return batch

    def _start(self, batch: StepBatch) -> Launched:
        if self._cores is not None:
            self._cores.set_threads()
        timer = self._clock.begin(batch)
        filling = self._grammar_masks.begin(batch)
        self.phases.enter(EnginePhase.MODEL)
        try:
            logits = self.run(batch)
        finally:
            if filling:
                filling.exception()  # waits: no thread uses a matcher between two steps
        self.phases.enter(EnginePhase.SAMPLING)
        filled = filling.result() if filling else None
        scored, (draws, ahead) = None, batch.draws
        if chunks := batch.scored:
            count = len(draws)
            scored, logits = PromptScores.from_logits(chunks, logits[count:]), logits[:count]
        drawn = self._sampler.draw(draws, logits, ahead, filled)
        self._clock.end(timer)
        return Launched(batch, drawn, scored, filled.failed if filled else ())

    def _complete(self, launched: Launched) -> StepResult:
        """Waits for a step and commits it. Its time is the device's, from the end of the step
        before, without waits for the host or later launches."""
        self.phases.enter(EnginePhase.MODEL)
        try:
            tokens, logprobs = launched.drawn.to_host()
            scores = launched.scored.to_host() if launched.scored else ()
        except Exception as error:
            raise self._failed(launched.batch, error) from error
        self.phases.enter(EnginePhase.COMMIT)
        failed = [each for each in launched.failed if self.state.fail(each[0])]
        result = self.state.steps.commit(
            launched.batch, tokens, self._clock.pop_completed(), logprobs, scores
        )
        return replace(result, failed=failed) if failed else result

    def _failed(self, batch: StepBatch, error: Exception) -> StepFailed:
        rows = len(batch.sequences)
        clear_frames(error.__traceback__)  # releases the memory of its tensors
        if isinstance(error, OUT_OF_MEMORY) and self.state.steps.out_of_memory(batch):
            return StepFailed(
                f"the device had no memory for a step of {rows} rows; one request was evicted", []
            )
        return StepFailed(f"a step of {rows} rows failed", self.state.steps.fail(batch))

    def can_compute(self) -> bool:
        """Whether the device can compute anything: prefills and decodes a probe token. This
        distinguishes a request that fails from a broken device."""
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
        """Runs the batch and stores its KV. Returns logits [rows that draw, then rows that score,
        vocabulary], valid until the next run."""
        in_flight = self._launched.drawn.tokens if self._launched else None
        with self.ranks.run_together(batch):
            with torch.inference_mode():
                inputs = self._inputs.prepare(batch, in_flight)
                adapters = self._adapter_inputs.prepare(batch)
            # The recorded steps have no adapters.
            if self._graphs is not None and adapters is None and self._graphs.accepts(batch):
                return self._graphs.run(batch, inputs)
            with torch.inference_mode():
                self._kernels.prepare(batch, inputs.slots)
            return self.model.forward(
                inputs.tokens, inputs.positions, self._step, inputs.rows, adapters
            )


def overlaps(config: EngineConfig, on_cuda: bool) -> bool:
    """Whether a step is launched before the one before it is committed. Raises ValueError if that
    is to be so with speculation: a draft follows tokens that the host must know."""
    if config.overlap == "on" and config.speculative_tokens:
        raise ValueError(
            f"overlap is on, but speculative_tokens {config.speculative_tokens} needs each step's "
            "tokens before the next one: set overlap to auto"
        )
    return config.overlap == "on" or (
        config.overlap == "auto" and on_cuda and not config.speculative_tokens
    )


def _quantizes(config: EngineConfig) -> bool:
    """Whether weights are quantized. Raises ValueError if they are also to be compiled."""
    if config.quantization == "none":
        return False
    if config.compile == "on":
        raise ValueError(
            f"compile is on, but quantization {config.quantization} is not compiled: set compile "
            "to auto"
        )
    return True
