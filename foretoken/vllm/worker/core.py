"""VllmCore: vLLM's EngineCore in this process, for one thread. What is used of its internals."""

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request, RequestStatus

from foretoken.vllm.worker.config import VllmWorkerConfig, engine_arguments
from foretoken.vllm.worker.grammars import MaskBackend, constrain
from foretoken.vllm.worker.hosted_request import Generated
from foretoken.vllm.worker.sampling import sampling_arguments
from foretoken.vllm.worker.scheduler import StepObserver
from services.core import FinishReason
from services.costs import StepTiming
from services.worker.engine.sampling.grammars import Grammars
from services.worker.requests.types.batch import TokenLogprobs
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.scores import Opening, PromptLogprobs

HERE = __package__
OWN = {
    "scheduler_cls": f"{HERE}.scheduler.WorkerScheduler",
    "worker_extension_cls": f"{HERE}.runner_extension.RunnerExtension",
}
REASONS = {
    "STOP": FinishReason.STOP,
    "REPETITION": FinishReason.STOP,
    "LENGTH": FinishReason.LENGTH,
}


def vllm_config(config: VllmWorkerConfig) -> Any:
    """vLLM's configuration for these settings. Raises ValueError, with a sentence, if vLLM refuses
    them."""
    arguments = engine_arguments(config)
    if clash := OWN.keys() & arguments.keys():
        raise ValueError(f"worker.vllm_args: {min(clash)} is foretoken's own; leave it out")
    try:
        args = EngineArgs(**arguments, **OWN)
        if config.kv_tokens:
            args.max_model_len = min(args.create_model_config().max_model_len, config.kv_tokens)
        made = args.create_engine_config()
    except (TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise ValueError(f"vLLM refuses these settings: {' '.join(reason)[:600]}") from error
    if config.kv_tokens:
        blocks = config.kv_tokens // made.cache_config.block_size
        made.cache_config.num_gpu_blocks_override = blocks + 1  # vLLM keeps one block empty
    return made


class VllmPool:
    """vLLM's blocks. vLLM does not count those of its free blocks that still hold a prefix: all of
    them are blank here."""

    cached_blocks = 0

    def __init__(self, core: EngineCore, observer: StepObserver):
        view = observer.requests.view
        self.block_tokens = view.block_tokens
        self.blocks = view.kv_tokens // view.block_tokens
        self._core = core
        self._requests = observer.requests

    @property
    def usage(self) -> float:
        return self._requests.usage

    @property
    def free_blocks(self) -> int:
        free, _ = self._requests.memory(())
        return free

    @property
    def blank_blocks(self) -> int:
        return self.free_blocks

    @property
    def shared_blocks(self) -> int:
        _, shared = self._requests.memory(self._requests.progress())
        return shared

    @property
    def cached(self) -> "VllmPool":
        return self

    def pop_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: vLLM hashes prefixes in another way than foretoken's scheduler."""
        return (), ()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def unpublish_all(self) -> None:
        """Empties the prefix cache."""
        self._core.reset_prefix_cache()


class VllmCore:
    """Begins, steps and ends requests in vLLM. `on_lost` is called if a process of the replica
    ends."""

    def __init__(self, config: VllmWorkerConfig, on_lost: Callable[[], None]):
        made = vllm_config(config)
        executor = Executor.get_class(made)
        self._core = EngineCore(made, executor, log_stats=False, executor_fail_callback=on_lost)
        scheduler: Any = self._core.scheduler
        self._scheduler = scheduler
        self._observer: StepObserver = scheduler.observer
        self._requests = self._observer.requests
        self.pool = VllmPool(self._core, self._observer)
        self._core.collective_rpc("foretoken_end_with", args=(os.getpid(),))
        self._by_position = made.use_v2_model_runner
        if not self._by_position:
            self._core.collective_rpc("foretoken_seed_draws")
        self.config = made
        self.vocab_size: int = made.model_config.get_vocab_size()
        self.eos_ids = _eos_ids(made.model_config)
        self.grammars = Grammars(config.model, self.vocab_size, self.eos_ids)
        self.grammars.load()
        manager: Any = self._core.structured_output_manager
        manager.backend = MaskBackend(self.grammars.words)

    def limits(self, report_every_steps: int) -> Limits:
        view = self._requests.view
        return Limits(
            kv_blocks=self.pool.blocks,
            block_tokens=view.block_tokens,
            max_running=view.max_running,
            max_batch_tokens=view.max_batch_tokens,
            max_context_tokens=view.max_context_tokens,
            report_every_steps=report_every_steps,
            eos_ids=self.eos_ids,
            prefix_sharing=bool(self.config.cache_config.enable_prefix_caching),
            grammars=True,
        )

    # Requests

    def start(self, name: str, prompt: Prompt) -> Request:
        """Adds a request, which waits until it is admitted. One with output begins as if it had
        been preempted after it."""
        sampling = SamplingParams(**sampling_arguments(prompt, self.eos_ids, self._by_position))
        sampling._all_stop_token_ids.update(self.eos_ids)  # not drawn before min_tokens
        if not prompt.sampling.grammar:
            sampling._bad_words_token_ids = [list(bad) for bad in prompt.sampling.bad_tokens]
        prompt_ids = list(prompt.token_ids[: prompt.prompt_tokens])
        output_ids = list(prompt.token_ids[prompt.prompt_tokens :])
        asked = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt_ids,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=prompt.cache_salt or None,
            data_parallel_rank=None,
        )
        request, _ = self._core.preprocess_add_request(asked)
        if prompt.sampling.grammar:
            request.structured_output_request = constrain(
                self.grammars, prompt.sampling, output_ids
            )
        if output_ids:
            request.append_output_token_ids(output_ids)
            request.status = RequestStatus.PREEMPTED
            request.prefill_stats = None  # of a prompt that is computed once
            if not self._by_position:
                arguments = (name, prompt_ids, output_ids, sampling)
                self._core.collective_rpc("foretoken_resume", args=arguments)
        self._core.add_request(request)
        return request

    def admit(self, name: str) -> None:
        self._requests.admit([name])

    def pause(self, names: Collection[str]) -> None:
        self._requests.pause(names, time.monotonic())

    def abort(self, names: Collection[str]) -> None:
        if names:
            self._core.abort_requests(list(names))
            self._requests.pop_ended()

    def set_victims(self, names: Sequence[str]) -> None:
        self._requests.set_victims(names)

    def pop_preempted(self) -> list[str]:
        """The requests that vLLM has preempted since the last call."""
        return [each.request_id for each in self._requests.pop_preempted()]

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to compute, or one is in flight."""
        return self._requests.runs or self._requests.admits or bool(self._core.batch_queue)

    def step(self) -> list[Generated] | None:
        """Computes a step, or launches one; returns what has been generated. None if nothing was
        computed."""
        outputs, executed = self._core.step_fn()
        self._core.post_step(model_executed=executed)
        if self._requests.has_ended:
            self._requests.pop_ended()
        made = outputs[0].outputs if outputs and 0 in outputs else []
        if not (made or executed or self._core.batch_queue):
            return None
        return [_generated(output) for output in made]

    def forget_ended(self) -> None:
        """Lets the model runner forget requests that have ended, if nothing else is to compute."""
        if self._scheduler.has_finished_requests():
            self._core.step_fn()

    def pop_timings(self) -> list[StepTiming]:
        return self._observer.pop_timings()

    def shutdown(self) -> None:
        self._core.shutdown()


def _generated(output: EngineCoreOutput) -> Generated:
    finish = output.finish_reason
    cached = output.prefill_stats.num_cached_tokens if output.prefill_stats else 0
    return Generated(
        output.request_id,
        output.new_token_ids,
        None if finish is None else REASONS.get(finish.name, FinishReason.ERROR),
        _logprobs(output),
        Opening(cached, _prompt_logprobs(output)),
    )


def _logprobs(output: EngineCoreOutput) -> list[TokenLogprobs] | None:
    """vLLM's rows have the drawn token, then as many alternatives as any request asks for."""
    given = output.new_logprobs
    if given is None:
        return None
    rows = zip(given.logprob_token_ids.tolist(), given.logprobs.tolist(), strict=True)
    return [TokenLogprobs(logs[0], tuple(ids[1:]), tuple(logs[1:])) for ids, logs in rows]


def _prompt_logprobs(output: EngineCoreOutput) -> PromptLogprobs | None:
    given = output.new_prompt_logprobs_tensors
    if given is None:
        return None
    ids = given.logprob_token_ids.cpu().numpy().astype(np.int64)
    logs = given.logprobs.cpu().numpy().astype(np.float32)
    return PromptLogprobs(ids[:, 0], logs[:, 0], ids[:, 1:], logs[:, 1:])


def _eos_ids(model_config: Any) -> frozenset[int]:
    """As those of foretoken's engine: of the generation config, else of the model's config."""
    ids = model_config.try_get_generation_config().get("eos_token_id")
    ids = getattr(model_config.hf_text_config, "eos_token_id", None) if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
