"""Drives a scheduler of vLLM with its requests, its KV manager and its outputs, but without a
model, and prints as JSON what came back.

    python vllm_scheduler.py MODEL SCHEDULER COUNT

SCHEDULER: of `--scheduler-cls`, or `own`. COUNT requests are served four times: synchronously and
asynchronously (each step is scheduled before the output of the one before it is there), without and
with a KV connector that, like one that offloads, gives back 40 steps later what a preempted request
had computed.

A token is a function of all tokens before it, so that every answer is known in advance. Each
seventh request is cancelled at some step. Memory is short, so that requests are preempted.
"""

import json
import sys
import time
from collections import deque
from itertools import count as counter
from itertools import product
from random import Random

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, SupportsHMA
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, BLOCKS, END = 16, 20, 0
MAX_TOKENS, MEAN_TOKENS = 150, 40
LOAD_STEPS = 40  # until nothing else runs, as memory is for about three requests
IN_FLIGHT = 40
STEP_S = 0.001  # in which a round of foretoken's scheduler can run


def next_token(tokens: list[int]) -> int:
    draw = hash(tuple(tokens)) % 1_000_003  # equal in every process: hashes of integers are
    return END if draw % MEAN_TOKENS == 0 else 1 + draw % 1_000


def answer(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        tokens.append(next_token(tokens))
        if tokens[-1] == END:
            break
    return tokens[len(prompt) :]


class Offload(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a connector that keeps all KV of live requests, and loads it between
    steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._computed: dict[str, int] = {}
        self.loading: list[str] = []  # since they were last taken

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        kept = min(self._computed.get(request.request_id, 0), request.num_tokens - 1)
        more = kept // BLOCK * BLOCK - num_computed_tokens
        return (more, True) if more > 0 else (0, False)

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens > 0:
            self.loading.append(request.request_id)

    def build_connector_meta(self, scheduler_output):
        for name, computed, tokens in scheduled(scheduler_output):
            self._computed[name] = max(self._computed.get(name, 0), computed + tokens)
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


def scheduled(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    """The requests of a step, with their computed tokens and those to compute."""
    cached = output.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(name, computed[name], n) for name, n in output.num_scheduled_tokens.items()]


class Runner:
    """Knows the tokens of a request as vLLM's model runner does: from its first message, from what
    it draws, and, where it was not in the step before, from the message."""

    def __init__(self):
        self._tokens: dict[str, list[int]] = {}

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for name in output.finished_req_ids:
            self._tokens.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        for name in cached.resumed_req_ids:
            self._tokens[name] = list(cached.all_token_ids[name])
        drawn = []
        for name, computed, tokens in scheduled(output):
            known = self._tokens[name]
            assert computed + tokens <= len(known), f"{name}: computes a token that is not known"
            drawn.append([next_token(known)] if computed + tokens == len(known) else [])
            known += drawn[-1]
        names = list(output.num_scheduled_tokens)
        index = {name: number for number, name in enumerate(names)}
        return ModelRunnerOutput(names, index, drawn)


def configured(model: str, scheduler: str, ahead: bool, loads: bool) -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="Offload", kv_role="kv_both", kv_connector_module_path="__main__"
    )
    config = EngineArgs(
        model=model,
        dtype="float32",
        max_num_seqs=32,
        max_model_len=512,
        max_num_batched_tokens=128,
        scheduler_cls=None if scheduler == "own" else scheduler,
        kv_transfer_config=transfer if loads else None,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = ahead
    config.cache_config.num_gpu_blocks = BLOCKS
    return config


def made_request(name: str, draw: Random) -> Request:
    prompt = [draw.randrange(1, 1_000) for _ in range(draw.randrange(5, 90))]
    parameters = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop_token_ids=[END])
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, prompt, parameters, None, block_hasher=hasher)


class Drive:
    """What the engine core does with a scheduler: requests in, steps, outputs back. `depth`: steps
    that are scheduled before the output of the first is there."""

    def __init__(self, scheduler, requests: list[Request], cancels: dict[str, int], depth: int):
        self._scheduler = scheduler
        self._depth = depth
        self._runner = Runner()
        self._coming = deque(requests)
        self._cancels = cancels  # the step before which a request is cancelled
        self._open: set[str] = set()
        self._loading: deque[tuple[int, str]] = deque()
        self._flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.answers: dict[str, list[int]] = {r.request_id: [] for r in requests}
        self.cancelled: set[str] = set()
        self.loaded = 0

    def run(self) -> None:
        for step in counter():
            self._submit(step)
            if self._scheduler.has_requests():
                self._step(step)
                if len(self._flight) < self._depth:
                    continue
            elif not self._flight:
                return
            self._deliver(*self._flight.popleft())

    def _submit(self, step: int) -> None:
        while len(self._open) < IN_FLIGHT and self._coming:
            request = self._coming.popleft()
            self._scheduler.add_request(request)
            self._open.add(request.request_id)
        for name in [n for n in self._open if self._cancels.get(n, step) < step]:
            self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self._open.discard(name)
            self.cancelled.add(name)

    def _step(self, step: int) -> None:
        output = self._scheduler.schedule()
        result = self._runner.run(output)
        if connector := self._scheduler.connector:
            self._loading += ((step + LOAD_STEPS, name) for name in connector.loading)
            connector.loading.clear()
        if done := {self._loading.popleft()[1] for due, _ in list(self._loading) if due <= step}:
            result.kv_connector_output = KVConnectorOutput(finished_recving=done)
            self.loaded += len(done)
        self._flight.append((output, result))
        time.sleep(STEP_S)

    def _deliver(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for each in self._scheduler.update_from_output(output, result).values():
            for part in each.outputs:
                self.answers[part.request_id] += part.new_token_ids
                if part.finish_reason is not None:
                    self._open.discard(part.request_id)


def serve(model: str, scheduler_name: str, count: int, ahead: bool, loads: bool) -> dict:
    config = configured(model, scheduler_name, ahead, loads)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    scheduler = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=True,
    )
    draw = Random(7)
    requests = [made_request(f"r{number}", draw) for number in range(count)]
    prompts = {request.request_id: list(request.prompt_token_ids) for request in requests}
    cancels = {name: draw.randrange(400) for name in list(prompts)[::7]}
    drive = Drive(scheduler, requests, cancels, 2 if ahead else 1)
    drive.run()
    right = {name: answer(prompt) for name, prompt in prompts.items()}
    for name in drive.cancelled:
        right[name] = right[name][: len(drive.answers[name])]
    result = {
        "ahead": ahead,
        "loads": loads,
        "answered": len(requests) - len(drive.cancelled),
        "cancelled": len(drive.cancelled),
        "wrong": [name for name in right if drive.answers[name] != right[name]],
        "preemptions": sum(request.num_preemptions for request in requests),
        "loaded": drive.loaded,
        "kv_in_use": scheduler.kv_cache_manager.usage,
        "left": len(scheduler.requests),
    }
    scheduler.shutdown()
    return result


def main(model: str, scheduler: str, count: str) -> None:
    init_none_hash(sha256)
    for ahead, loads in product((False, True), repeat=2):
        print(json.dumps(serve(model, scheduler, int(count), ahead, loads)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
