"""Accuracy of the estimator on the real engine: predicted and measured durations of slices.

    python -m benchmarks.estimator [--model FOLDER] [--slices N] [--seed N] [--json FILE] [--quick]

The benchmark profiles the demo model's engine as a worker does at start. Then it serves slices of
batches with random size, prompts and slice length; some requests stay for the next slice, with
their KV. The current cost model predicts each slice before it learns from the slice's steps. The
result is the median relative error after the first 200 slices. Nearest neighbours (Magnus) predict
the same batches, for several rules of which batches they learn from. Run it on an idle machine: the
estimator does not predict the cores that other processes use.
"""

import gc
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from benchmarks.harness.report import parser, show, write
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
MAX_SEQS, MAX_PROMPT_TOKENS = 48, 512
STAY_SHARE = 0.3  # of a batch's requests stay for the next slice
WARM_UP = 200  # slices that do not count
REFRESH_S = 2.0  # interval of the neighbours' refresh; a slice takes a tenth of a second
RULES = {  # minimum error of a batch to be learned from
    "linear": BatchLearning(REFRESH_S),
    "knn": BatchLearning(REFRESH_S),
    "knn, off by 0.02 s": BatchLearning(REFRESH_S, off_s=0.02),
    "knn, of every batch": BatchLearning(REFRESH_S, off_s=0.0, off_share=0.0),
}
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Slice:
    """A batch before its slice: lengths of new prompts, contexts of requests that stayed, and
    tokens to generate per request."""

    prompts: tuple[int, ...]
    stayed: tuple[int, ...]
    steps: int

    @property
    def seqs(self) -> int:
        return len(self.prompts) + len(self.stayed)

    @property
    def length(self) -> float:
        """Mean context; the engine packs requests without padding."""
        return (sum(self.prompts) + sum(self.stayed)) / self.seqs

    def predicted_s(self, cost: CostModel, estimate: str) -> float:
        """Predicted duration of a batch of new requests, minus the prefill that stayed requests
        skip."""
        columns = (np.array([float(v)]) for v in (self.seqs, self.length, self.steps))
        return float(ESTIMATES[estimate](cost, *columns)[0]) - self._skipped_prefill_s(cost)

    def timing(self, cost: CostModel, measured_s: float) -> BatchTiming:
        """Duration as if all requests were new, for the neighbours."""
        elapsed_s = measured_s + self._skipped_prefill_s(cost)
        return BatchTiming(self.seqs, round(self.length), self.steps, elapsed_s)

    def _skipped_prefill_s(self, cost: CostModel) -> float:
        return (cost.prefill_token_s + cost.context_token_s) * sum(self.stayed)


class SlicedEngine:
    """An engine and its batch. Answers are long enough never to end during a slice."""

    def __init__(self, folder: str, seed: int):
        self.engine = Engine.load(
            EngineConfig(model=folder, kv_tokens=65_536, prefix_sharing=False)
        )
        self._rng = np.random.default_rng(seed)
        self._held: dict[str, tuple[int, int]] = {}  # prompt and output tokens
        self._number = 0
        self._plan = 0

    def draw(self) -> Slice:
        """Composes the next batch and submits it to the engine."""
        rng = self._rng
        staying = {n: sizes for n, sizes in self._held.items() if self._stays(*sizes)}
        leaving = tuple(n for n in self._held if n not in staying)
        count = int(rng.integers(1, MAX_SEQS - len(staying) + 1))
        log_tokens = rng.uniform(np.log(4), np.log(MAX_PROMPT_TOKENS), count)
        prompts = np.exp(log_tokens).astype(int).tolist()
        steps = int(rng.choice(SLICES))
        grants = []
        for tokens in prompts:
            name = f"r{self._number}"
            self._number += 1
            ids = tuple(rng.integers(0, 250, tokens).tolist())
            self.engine.add(Prompt(name, ids, tokens, self._max_output(tokens), SAMPLING), 0.0)
            grants.append(Grant(name, steps))
        extend = tuple(Grant(n, output + steps) for n, (_, output) in staying.items())
        self._plan += 1
        plan = Plan(self._plan, admit=tuple(grants), extend=extend, cancel=leaving)
        self.engine.state.apply_plan(plan, 0.0)
        drawn = Slice(tuple(prompts), tuple(map(sum, staying.values())), steps)
        self._held = {n: (p, output + steps) for n, (p, output) in staying.items()}
        self._held |= {g.request_id: (p, steps) for g, p in zip(grants, prompts, strict=True)}
        return drawn

    def serve(self) -> list[StepTiming]:
        timings = []
        while result := self.engine.step():
            timings += result.timings
        self.engine.state.report()
        return timings

    def _stays(self, prompt: int, output: int) -> bool:
        has_room = output + max(SLICES) < self._max_output(prompt)
        return self._rng.random() < STAY_SHARE and has_room

    def _max_output(self, prompt: int) -> int:
        return self.engine.state.limits.reach_tokens - prompt


def run(options: Namespace) -> None:
    engine = SlicedEngine(options.model, options.seed)
    began_s = perf_counter()
    steps = profile(engine.engine, 1.0)
    print(f"profiled {len(steps)} steps in {perf_counter() - began_s:.2f} s")
    states = {name: EstimatorState(learning=rule) for name, rule in RULES.items()}
    for state in states.values():
        state.observe(WORKER, steps)
    errors: dict[str, list[float]] = {name: [] for name in RULES}
    measured: list[float] = []
    gc.freeze()
    for _ in range(options.slices or (30 if options.quick else 300)):
        drawn = engine.draw()
        predicted = {
            name: drawn.predicted_s(_model(s), name.split(",")[0]) for name, s in states.items()
        }
        timings = engine.serve()
        measured.append(sum(t.elapsed_s for t in timings))
        for name, state in states.items():
            errors[name].append(abs(predicted[name] - measured[-1]) / measured[-1])
            batch = drawn.timing(_model(state), measured[-1])
            for start in range(0, len(timings), 16):  # as often as a worker reports
                state.observe(WORKER, timings[start : start + 16])
            state.observe(WORKER, [], batches=[batch], now=perf_counter())
    _show(errors, measured, states)
    write(options.json, {"slices_s": measured, "relative_errors": errors})


def _model(state: EstimatorState) -> CostModel:
    model = state.model(WORKER)
    if model is None:
        raise RuntimeError("the profile determines no cost model")
    return model


def _show(
    errors: dict[str, list[float]], measured: Sequence[float], states: dict[str, EstimatorState]
) -> None:
    counted = slice(min(WARM_UP, 2 * len(measured) // 3), None)
    low, middle, high = np.quantile(measured, (0.05, 0.5, 0.95))
    print(f"{len(measured)} slices of {low:.3f}–{high:.3f} s, median {middle:.3f}")
    rows = []
    for name, by_slice in errors.items():
        shares = (*np.quantile(by_slice[counted], (0.5, 0.9)), np.median(by_slice[:20]))
        batches = len(_model(states[name]).neighbours)
        rows.append((name, *(f"{share:.1%}" for share in shares), batches))
    show(
        f"relative errors after the first {counted.start} slices",
        ("estimate", "median", "p90", "median of the first 20", "batches"),
        rows,
    )
    model = _model(states["linear"])
    print(f"a step, out of sample: median {model.error_p50:.1%}, p90 {model.error_p90:.1%}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="models/demo", help="folder; models/demo by default")
    options.add_argument("--slices", type=int, default=0, help="300 by default, 30 with --quick")
    options.add_argument("--seed", type=int, default=0, help="of the batches")
    set_numba_cache_folder()
    run(options.parse_args())


if __name__ == "__main__":
    main()
