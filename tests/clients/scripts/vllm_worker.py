"""Drives a worker's engine with vLLM, without a scheduler and a gateway, and prints as JSON which
answers depend on what happens to requests.

    python vllm_worker.py MODEL COUNT [ARGUMENTS]

ARGUMENTS: of vLLM's engine, as JSON. COUNT requests are answered two at a time, and then IN_FLIGHT
at a time in the same memory, which is short for them: vLLM preempts some; plans pause others, and
resume them at once or later; others are cancelled and continue after the tokens that they have, as
after the loss of a worker.
"""

import json
import sys
import time
from collections import Counter
from random import Random

from transformers import AutoTokenizer

from foretoken.vllm.worker.config import VllmWorkerConfig
from foretoken.vllm.worker.engine import VllmEngine
from foretoken.vllm.worker.serving import load_engine
from models.tasks import examples
from services.core import Grant, Pause, Plan, Residency
from services.worker.requests.types.prompt import Prompt, SamplingParams

IN_FLIGHT, LONGEST = 40, 40
PAUSED, LOST = 0.2, 0.08  # shares of the steps before which a request is paused or lost
# 40 requests need about 3,000 tokens at once. Prompts are computed in parts of 64 tokens.
SIZES = {"kv_tokens": 1280, "block_tokens": 32, "max_running": 48, "max_batch_tokens": 64}


def sampling(number: int) -> tuple[int, SamplingParams]:
    """Longest output and parameters of request `number`; kinds follow one another."""
    greedy, seeded = {"temperature": 0.0}, {"temperature": 1.0, "seed": number}
    most, options = (
        (LONGEST, greedy),
        (LONGEST, {**greedy, "ignore_eos": True}),
        (LONGEST, {**seeded, "ignore_eos": True}),
        (LONGEST, {**seeded, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
        (10, {**greedy, "allowed_token_ids": tuple(range(10, 200))}),
        (LONGEST, {**seeded, "frequency_penalty": 0.5, "presence_penalty": 0.2, "min_tokens": 20}),
        (LONGEST, {**seeded, "repetition_penalty": 1.2, "ignore_eos": True}),
        (LONGEST, {**greedy, "logprobs": 2, "min_tokens": 12}),
        (LONGEST, {**greedy, "bad_tokens": ((5,), (6, 7)), "logit_bias": ((8, -50.0),)}),
        (LONGEST, {**seeded, "allowed_token_ids": tuple(range(10, 200))}),
    )[number % 10]
    return most, SamplingParams(**options)


class Client:
    """Sends requests to an engine, and makes the plans of a scheduler that admits all of them.
    `draw` disturbs them; None: nothing happens to them."""

    def __init__(self, engine: VllmEngine, in_flight: int, draw: Random | None):
        self._engine = engine
        self._in_flight = in_flight
        self._draw = draw
        self._prompts: dict[str, Prompt] = {}  # of requests that have not ended
        self._plans = 1
        self.answers: dict[str, list[int]] = {}
        self.happened: Counter[str] = Counter()

    def run(self, prompts: list[Prompt]) -> None:
        self._engine.state.attach()
        left = list(reversed(prompts))
        while left or self._prompts:
            while left and len(self._prompts) < self._in_flight:
                self._send(left.pop())
            self._plan()
            if result := self._engine.step():
                for token in result.tokens:
                    answer = self.answers[token.request_id]
                    assert token.offset == len(answer), f"{token.request_id}: a token is missing"
                    answer.append(token.token_id)
                    if token.finish:
                        del self._prompts[token.request_id]
        self._engine.state.check_integrity()

    def _send(self, prompt: Prompt) -> None:
        self._prompts[prompt.request_id] = prompt
        self.answers.setdefault(prompt.request_id, [])
        assert self._engine.add(prompt, time.monotonic()) is None

    def _plan(self) -> None:
        running, draw = list(self._engine.state.running), self._draw
        waiting = [name for name in self._prompts if name not in running]
        pause: list[str] = []
        if draw and running and draw.random() < PAUSED:
            pause = draw.sample(running, min(3, len(running)))
            waiting += pause[:1]  # resumes at once
        lost = draw.choice(running) if draw and running and draw.random() < LOST else None
        self._apply(waiting, pause, (lost,) if lost else ())
        if lost:
            prompt, answer = self._prompts[lost], self.answers[lost]
            known = [*prompt.token_ids[: prompt.prompt_tokens], *answer]
            self._send(
                Prompt(lost, known, prompt.prompt_tokens, prompt.max_tokens, prompt.sampling)
            )
        self.happened += Counter(paused=len(pause), lost=int(lost is not None))

    def _apply(self, admit: list[str], pause: list[str], cancel: tuple[str, ...]) -> None:
        self._plans += 1
        plan = Plan(
            self._plans,
            admit=tuple(Grant(name, self._prompts[name].max_tokens) for name in admit),
            pause=tuple(Pause(name, Residency.DROP) for name in pause),
            cancel=cancel,
        )
        self._engine.state.apply_plan(plan, time.monotonic())


def prompts_of(model: str, count: int) -> list[Prompt]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    users = list(dict.fromkeys(each.user for each in examples(9, 4 * count, held_out=True)))
    chats = [[{"role": "user", "content": user}] for user in users[:count]]
    texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return [
        Prompt(f"r{number}", ids, len(ids), *sampling(number))
        for number, ids in enumerate(map(tokenizer.encode, texts))
    ]


def main(model: str, count: str, arguments: str = "{}") -> None:
    prompts = prompts_of(model, int(count))
    vllm_args = {"enforce_eager": True, **json.loads(arguments)}
    config = VllmWorkerConfig(
        model=model, dtype="float32", **SIZES, vllm_args=vllm_args, scheduler_address="127.0.0.1:1"
    )
    engine = load_engine(config)
    calm, busy = Client(engine, 2, None), Client(engine, IN_FLIGHT, Random(7))
    for client in (calm, busy):
        client.run(prompts)
    different = [name for name in calm.answers if calm.answers[name] != busy.answers[name]]
    state = engine.state
    result = {
        "different": different,
        "answered": sum(map(bool, busy.answers.values())),
        "evicted": state.counters.evicted_dropped,
        "kv_in_use": state.pool.usage,
        **busy.happened,
    }
    print(json.dumps(result))
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
