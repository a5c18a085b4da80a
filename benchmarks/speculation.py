"""What drafts by prompt lookup gain on answers that copy, and cost on answers that do not.

    python -m benchmarks.speculation [--json FILE] [--quick] [--models demo,padded]
        [--dtypes fp32,bf16] [--streams 1,8,32] [--tokens 0,4,8] [--rounds N]

The bare engine, with each number of `speculative_tokens` in alternating order. `copy`: chats that
ask again for a count that was given before, greedy. `random`: prompts of random tokens at
temperature 5, with answers that match nothing. Streams are refilled once. Tokens per second of the
clock and of CPU time, which other work on the machine changes less, medians; `accepted` is the
share of the drafted tokens. `different` are answers that differ from those without drafts, of all:
in bfloat16 the rounding of products depends on a step's rows, with and without drafts.
"""

import time
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from benchmarks.engine.cases import DTYPES
from benchmarks.engine.shapes import each_model, engine_options
from benchmarks.harness.report import Measurements, alternating, show, write
from gateway.requests.text import Text
from services.core import Grant, Plan
from services.worker.compiled_code import set_numba_cache_folder
from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import Prompt, SamplingParams

TEMPERATURES = {"copy": 0.0, "random": 5.0}
COUNTED = 90  # numbers of a count
OUTPUT_TOKENS = 128
Answers = dict[str, list[int]]


class Served(NamedTuple):
    """The answers to some prompts, and what they took."""

    answers: Answers
    elapsed_s: float
    cpu_s: float
    drafted: int
    accepted: int


def main() -> None:
    set_numba_cache_folder()
    options = _options()
    measured = Measurements()
    for model, folder, dtype in each_model(options):
        _measure(options, model, folder, dtype, measured)
    rows = [
        (*key, measured.figure(*key, "tok_s"), measured.figure(*key, "tok_cpu_s"),
         f"{measured.figure(*key, 'accepted').median:.0%}",
         f"{sum(measured.values[*key, 'different']):.0f}")
        for key in dict.fromkeys(key[:-1] for key in measured.values)
    ]  # fmt: skip
    head = (
        "model",
        "dtype",
        "answers",
        "streams",
        "tokens",
        "tok/s",
        "tok/CPU s",
        "accepted",
        "different",
    )
    show("Drafts by prompt lookup", head, rows, width=140)
    write(options.json, measured.medians() | {"repeats": measured.repeats()})


def _options() -> Namespace:
    options = engine_options(__doc__, "demo", "1,8,32")
    options.add_argument("--tokens", default="0,4,8")
    return options.parse_args()


def _measure(
    options: Namespace, model: str, folder: str, dtype: str, measured: Measurements
) -> None:
    counts, text = options.tokens.split(","), Text(folder)
    streams = [1] if options.quick else [int(number) for number in options.streams.split(",")]
    engines = {
        count: Engine.load(
            EngineConfig(
                model=folder, dtype=DTYPES[dtype], kv_tokens=16_384,
                speculative_tokens=int(count),
            )
        )
        for count in counts
    }  # fmt: skip
    for kind, temperature in TEMPERATURES.items():
        for at_once in streams:
            # The first round warms up.
            for number, order in alternating(counts, 1 + (1 if options.quick else options.rounds)):
                prompts = _prompts(kind, text, 2 * at_once, number)
                answers: dict[str, Answers] = {}
                for count in order:
                    served = _serve(engines[count], prompts, temperature, at_once)
                    answers[count] = served.answers
                    if number:
                        _add(measured, (model, dtype, kind, str(at_once), count), served)
                for count in order:
                    same = (
                        answers[count][name] == answers[counts[0]][name] for name in answers[count]
                    )
                    key = model, dtype, kind, str(at_once), count, "different"
                    measured.add(key, len(prompts) - sum(same))


def _add(measured: Measurements, key: tuple[str, ...], served: Served) -> None:
    tokens = sum(map(len, served.answers.values()))
    measured.add((*key, "tok_s"), tokens / served.elapsed_s)
    measured.add((*key, "tok_cpu_s"), tokens / served.cpu_s)
    measured.add((*key, "accepted"), served.accepted / max(1, served.drafted))


def _prompts(kind: str, text: Text, count: int, seed: int) -> list[tuple[int, ...]]:
    random = Random(seed)
    if kind == "random":
        vocabulary = range(300, text.vocabulary_tokens)
        return [tuple(random.choices(vocabulary, k=128)) for _ in range(count)]
    prompts = []
    for _ in range(count):
        first = random.randint(1, 150)
        counted = " ".join(map(str, range(first, first + COUNTED + 1)))
        ask = {"role": "user", "content": f"Count from {first} to {first + COUNTED}."}
        turns = [ask, {"role": "assistant", "content": counted}, ask]
        prompts.append(tuple(text.encode_chat(turns)))
    return prompts


def _serve(
    engine: Engine, prompts: Sequence[tuple[int, ...]], temperature: float, at_once: int
) -> Served:
    """Answers all prompts, this many at once."""
    engine.reset()
    waiting, running, plans = deque(enumerate(prompts)), 0, 0
    counters, answers = engine.state.counters, defaultdict[str, list[int]](list)
    drafted, accepted = counters.draft_tokens, counters.accepted_tokens
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while waiting or running:
        admit = []
        for _ in range(min(len(waiting), at_once - running)):
            number, prompt = waiting.popleft()
            name = f"r{number}"
            sampling = SamplingParams(temperature=temperature, seed=number, ignore_eos=True)
            engine.add(Prompt(name, prompt, len(prompt), OUTPUT_TOKENS, sampling), 0.0)
            admit.append(Grant(name, OUTPUT_TOKENS))
        if admit:
            running, plans = running + len(admit), plans + 1
            engine.state.apply_plan(Plan(plans, admit=tuple(admit)), 0.0)
        result = engine.step()
        for token in result.tokens if result else ():
            answers[token.request_id].append(token.token_id)
            running -= token.finish is not None
    return Served(
        dict(answers),
        time.perf_counter() - began_s,
        time.process_time() - began_cpu_s,
        counters.draft_tokens - drafted,
        counters.accepted_tokens - accepted,
    )


if __name__ == "__main__":
    main()
