"""Measures steps and swaps at start, for the estimator's first cost model of this worker."""

from math import inf
from time import perf_counter

from services.core import Grant, Pause, Plan, Residency
from services.costs import StepTiming, SwapTiming
from services.worker.engine.interface import WorkerEngine
from services.worker.requests.types.prompt import Prompt, SamplingParams

# (sequences, prompt tokens each): prefills of several lengths and decodes over several contexts,
# the most informative first, because the time may run out.
SHAPES = ((1, 16), (4, 16), (16, 16), (1, 256), (64, 16), (8, 128), (1, 1024), (32, 128), (16, 512))
DECODES = 4
SWAPS = (64, 512)  # tokens: a small one to initialise, a large one for the rate
ROUND_TRIPS = 2  # of each
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)


def profile(engine: WorkerEngine, limit_s: float) -> list[StepTiming]:
    """Times steps of every shape that fits, for `limit_s` seconds plus one step. Leaves the engine
    empty.

    The first shape runs once before, unmeasured and outside the limit, for lazy initialisation and
    kernel compilation.
    """
    shapes = [shape for shape in SHAPES if _fits(engine, *shape)]
    timings: list[StepTiming] = []
    with engine.state.without_drafts():
        for shape in shapes[:1]:
            _time_steps(engine, *shape, until_s=inf)
        until_s = perf_counter() + limit_s
        for shape in shapes:
            timings += _time_steps(engine, *shape, until_s)
    return timings


def profile_swaps(engine: WorkerEngine, limit_s: float) -> list[SwapTiming]:
    """Times round trips of requests to host memory, starting none after `limit_s` seconds. Leaves
    the engine empty."""
    timings: list[SwapTiming] = []
    until_s = perf_counter() + limit_s
    for tokens in SWAPS:
        blocks = engine.state.pool.blocks_for(tokens)
        fits = _fits(engine, 1, tokens) and blocks <= engine.state.limits.host_blocks
        if fits and perf_counter() < until_s:
            timings += _time_swaps(engine, tokens)
    return timings


def _time_swaps(engine: WorkerEngine, tokens: int) -> tuple[SwapTiming, ...]:
    """Computes one prompt once and swaps it out and in ROUND_TRIPS times."""
    name = "profile"
    output = _output_tokens(engine, 1, tokens)
    engine.add(Prompt(name, (0,) * tokens, tokens, output, SAMPLING), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant(name, 1),)), 0.0)
    while engine.step():
        pass
    for turn in range(ROUND_TRIPS):
        engine.state.apply_plan(Plan(2 * turn + 2, pause=(Pause(name, Residency.OFFLOAD),)), 0.0)
        engine.step()
        engine.state.pool.unpublish_all()  # otherwise the upload would find its prefix
        engine.state.apply_plan(Plan(2 * turn + 3, prefetch=(name,)), 0.0)
        engine.step()
    report = engine.state.report()
    engine.reset()
    return report.swaps if report else ()


def _fits(engine: WorkerEngine, seqs: int, tokens: int) -> bool:
    limits = engine.state.limits
    length = tokens + _output_tokens(engine, seqs, tokens)
    blocks = seqs * engine.state.pool.blocks_for(length)
    return (
        blocks <= limits.kv_blocks and length <= limits.reach_tokens and seqs <= limits.max_running
    )


def _output_tokens(engine: WorkerEngine, seqs: int, tokens: int) -> int:
    """Output tokens with which the first request still decodes when the last one is prefilled."""
    return DECODES + 2 * -(-seqs * tokens // engine.state.limits.max_batch_tokens)


def _time_steps(engine: WorkerEngine, seqs: int, tokens: int, until_s: float) -> list[StepTiming]:
    """Runs steps of equal requests until they end or the time is over; returns their timings."""
    names = [f"profile-{i}" for i in range(seqs)]
    output = _output_tokens(engine, seqs, tokens)
    for request_id in names:
        ids = (0,) * tokens
        prompt = Prompt(request_id, ids, tokens, output, SAMPLING, cache_salt=request_id)
        engine.add(prompt, 0.0)
    engine.state.apply_plan(Plan(1, admit=tuple(Grant(name, output) for name in names)), 0.0)
    timings = []
    while perf_counter() < until_s and (result := engine.step()):
        timings += result.timings
    engine.reset()
    return timings
