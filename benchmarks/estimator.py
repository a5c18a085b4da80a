"""The estimator on the real engine: predicted and measured durations of slices of mixed batches.

`python -m benchmarks.estimator` profiles the demo model's engine as a worker does at start, then
serves slices of batches with random size, prompts and slice length; some requests stay for the next
slice, with their KV. Each slice is predicted by the current cost model before its steps are
learned. The result is the median relative error after the first 200 slices. Nearest neighbours
(Magnus) predict the same batches, for several rules of which batches they learn from. It needs a
quiet machine: other processes' share of the cores is not predicted.
"""

import argparse
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from services.core import Grant, Plan
from services.costs import BatchTiming, CostModel, StepTiming
from services.estimator.batches import BatchLearning
from services.estimator.state import EstimatorState
from services.policies.estimate import ESTIMATES
from services.worker.compiled_code import set_numba_cache_folder
from services.worker.config import EngineConfig
from services.worker.engine.profile import profile
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import Prompt, SamplingParams

WORKER = "w0"
SLICES = (16, 32, 64, 128)
MOST_SEQS, MOST_PROMPT = 48, 512
STAY = 0.3  # of a batch's requests stay for the next slice
LEARNT = 200  # slices before those that count
REFRESH_S = 2.0  # interval of the neighbours' refresh; a slice takes a tenth of a second
RULES = {  # the error from which a batch is learned
    "linear": BatchLearning(REFRESH_S),
    "knn": BatchLearning(REFRESH_S),
    "knn, off by 0.02 s": BatchLearning(REFRESH_S, off_s=0.02),
    "knn, of every batch": BatchLearning(REFRESH_S, off_s=0.0, off_share=0.0),
}
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Slice:
    """A batch before its slice: new prompts, contexts of staying requests, tokens to make."""

    prompts: tuple[int, ...]
    stayed: tuple[int, ...]
    steps: int

    @property
    def seqs(self) -> int:
        return len(self.prompts) + len(self.stayed)

    @property
    def length(self) -> float:
        """The mean: this engine packs requests without padding."""
        return (sum(self.prompts) + sum(self.stayed)) / self.seqs

    def predicted_s(self, cost: CostModel, estimate: str) -> float:
        """As if all were new, minus the prefill of those with KV."""
        columns = (np.array([float(v)]) for v in (self.seqs, self.length, self.steps))
        there_s = (cost.prefill_token_s + cost.context_token_s) * sum(self.stayed)
        return float(ESTIMATES[estimate](cost, *columns)[0]) - there_s

    def timing(self, cost: CostModel, measured_s: float) -> BatchTiming:
        """As if all had been new, for the neighbours."""
        there_s = (cost.prefill_token_s + cost.context_token_s) * sum(self.stayed)
        return BatchTiming(self.seqs, round(self.length), self.steps, measured_s + there_s)


class Sliced:
    """The engine and its batch. Answers are long enough never to end by themselves."""

    def __init__(self, folder: str, seed: int):
        self.engine = Engine.load(
            EngineConfig(model=folder, kv_tokens=65_536, prefix_sharing=False)
        )
        self._rng = np.random.default_rng(seed)
        self._held: dict[str, tuple[int, int]] = {}  # prompt and output tokens
        self._number = 0
        self._plan = 0

    def draw(self) -> Slice:
        """Compose the next batch and hand it to the engine."""
        rng = self._rng
        staying = {n: had for n, had in self._held.items() if self._may_stay(*had)}
        leaving = tuple(n for n in self._held if n not in staying)
        fresh = int(rng.integers(1, MOST_SEQS - len(staying) + 1))
        prompts = np.exp(rng.uniform(np.log(4), np.log(MOST_PROMPT), fresh)).astype(int).tolist()
        steps = int(rng.choice(SLICES))
        grants = []
        for tokens in prompts:
            name = f"r{self._number}"
            self._number += 1
            ids = tuple(rng.integers(0, 250, tokens).tolist())
            self.engine.add(Prompt(name, ids, tokens, self._max_output(tokens), SAMPLING), 0.0)
            grants.append(Grant(name, steps))
        extend = tuple(Grant(n, made + steps) for n, (_, made) in staying.items())
        self._plan += 1
        plan = Plan(self._plan, admit=tuple(grants), extend=extend, cancel=leaving)
        self.engine.state.apply_plan(plan, 0.0)
        drawn = Slice(tuple(prompts), tuple(p + m for p, m in staying.values()), steps)
        self._held = {n: (p, m + steps) for n, (p, m) in staying.items()}
        self._held |= {g.request_id: (p, steps) for g, p in zip(grants, prompts, strict=True)}
        return drawn

    def serve(self) -> list[StepTiming]:
        timings = []
        while result := self.engine.step():
            timings += result.timings
        self.engine.state.report()
        return timings

    def _may_stay(self, prompt: int, made: int) -> bool:
        return self._rng.random() < STAY and made + max(SLICES) < self._max_output(prompt)

    def _max_output(self, prompt: int) -> int:
        return self.engine.state.limits.reach_tokens - prompt


def run(folder: str, slices: int, seed: int) -> None:
    sliced = Sliced(folder, seed)
    began = perf_counter()
    steps = profile(sliced.engine, 1.0)
    print(f"profiled {len(steps)} steps in {perf_counter() - began:.2f} s")
    states = {name: EstimatorState(learning=rule) for name, rule in RULES.items()}
    for state in states.values():
        state.observe(WORKER, steps)
    misses: dict[str, list[float]] = {name: [] for name in RULES}
    measured: list[float] = []
    gc.freeze()
    for _ in range(slices):
        drawn = sliced.draw()
        predicted = {
            name: drawn.predicted_s(_model(s), name.split(",")[0]) for name, s in states.items()
        }
        timings = sliced.serve()
        measured.append(sum(t.elapsed_s for t in timings))
        for name, state in states.items():
            misses[name].append(abs(predicted[name] - measured[-1]) / measured[-1])
            batch = drawn.timing(_model(state), measured[-1])
            for at in range(0, len(timings), 16):  # as often as a worker reports
                state.observe(WORKER, timings[at : at + 16])
            state.observe(WORKER, [], batches=[batch], now=perf_counter())
    _print(misses, measured, states)


def _model(state: EstimatorState) -> CostModel:
    model = state.model(WORKER)
    if model is None:
        raise RuntimeError("the profile determines no cost model")
    return model


def _print(
    misses: dict[str, list[float]], measured: Sequence[float], states: dict[str, EstimatorState]
) -> None:
    after = slice(min(LEARNT, 2 * len(measured) // 3), None)
    low, middle, high = np.quantile(measured, (0.05, 0.5, 0.95))
    print(f"{len(measured)} slices of {low:.3f}–{high:.3f} s, median {middle:.3f}")
    print(f"relative errors of those after the first {after.start}:")
    print(f"{'estimate':<20}{'median':>8}{'p90':>8}{'first 20':>10}{'batches':>9}")
    for name, miss in misses.items():
        median, p90 = np.quantile(miss[after], (0.5, 0.9))
        kept = len(_model(states[name]).neighbours)
        print(f"{name:<20}{median:>8.1%}{p90:>8.1%}{np.median(miss[:20]):>10.1%}{kept:>9}")
    model = _model(states["linear"])
    print(f"a step, out of sample: median {model.error_p50:.1%}, p90 {model.error_p90:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--slices", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    set_numba_cache_folder()
    run(args.model, args.slices, args.seed)
