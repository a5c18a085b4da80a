"""The predictor in virtual time: the served predictors' forecasts and learning, without a process.

The named predictor alone answers. Its latency is `Timing.forecast_s`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from services.core import Outcome, Request
from services.forecast import Forecast, certain
from services.policies.preset import require_known
from services.predictor.encoder.extract import word_features
from services.predictor.interface import Example, Options, Predictor, Prompt, Query
from services.predictor.predictors import PREDICTORS, build, build_reading
from simulator.engine.given import forecast_given
from simulator.engine.modelled import MAGNUS_RMSE_TOKENS, NoisyLengths
from simulator.workload.workload import Workload

# When the served predictor refits: services/predictor/config.py and learning/refitter.py.
FIRST_CHECK_S, REFIT_INTERVAL_S = 5.0, 180.0  # between two checks, before and after the first fit
REFIT_NEW_MIN, REFIT_NEW_SHARE = 50, 0.05  # new examples; the share is of the last fit's examples


class Forecaster(Protocol):
    """Answers forecasts and learns outcomes."""

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        """One forecast per request, as the predictor gives it."""
        ...

    def learn(self, outcome: Outcome, now: float) -> None:
        """Learns a finished request's length."""
        ...


class TrueLengths:
    """Forecasts the true lengths: the predictor `oracle`."""

    def __init__(self, answer_tokens: Callable[[str], int]):
        self._answer_tokens = answer_tokens

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return [certain(self._answer_tokens(r.request_id), "oracle") for r in requests]

    def learn(self, outcome: Outcome, now: float) -> None:
        """Does nothing."""


class LearnedLengths:
    """A served predictor that receives lengths alone."""

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return self._predictor.forecast([_query(request) for request in requests])

    def learn(self, outcome: Outcome, now: float) -> None:
        query = Query(outcome.model, outcome.application, outcome.prompt_tokens, outcome.max_tokens)
        self._predictor.learn([Example(query, outcome.output_tokens, outcome.reason)])


class LearnedWords:
    """The served predictor `words`: reads prompts, learns online, and is refitted when the served
    one would be. A fit takes no virtual time."""

    def __init__(self, prompts: Sequence[str], options: Options, seed: int):
        self._predictor = build_reading("words", options)
        self._prompts, self._seed = prompts, seed
        self._queries: dict[str, Query] = {}  # of live requests
        self._fitted_on = 0
        self._check_s = FIRST_CHECK_S  # the time of the next check

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        queries = [self._read(request) for request in requests]
        return self._predictor.forecast(queries)

    def learn(self, outcome: Outcome, now: float) -> None:
        if query := self._queries.pop(outcome.request_id, None):
            self._predictor.learn([Example(query, outcome.output_tokens, outcome.reason)])
        if now >= self._check_s:
            self._refit_if_due()
            self._check_s = now + (REFIT_INTERVAL_S if self._fitted_on else FIRST_CHECK_S)

    def _refit_if_due(self) -> None:
        if self._predictor.pending < max(REFIT_NEW_MIN, REFIT_NEW_SHARE * self._fitted_on):
            return
        if refit := self._predictor.refit(self._seed):
            self._predictor.adopt(refit.run())
            self._fitted_on = len(refit.examples)

    def _read(self, request: Request) -> Query:
        if known := self._queries.get(request.request_id):
            return known
        prompt = Prompt("", self._prompts[int(request.request_id)], request.prompt_tokens)
        query = replace(_query(request, prompt), features=word_features(prompt))
        self._queries[request.request_id] = query
        return query


def _query(request: Request, prompt: Prompt | None = None) -> Query:
    return Query(
        request.model, request.application, request.prompt_tokens, request.max_tokens, prompt=prompt
    )


def _learn_words(
    workload: Workload, answer_tokens: Callable[[str], int], seed: int
) -> LearnedWords:
    if not workload.prompts:
        raise ValueError(
            f"the predictor 'words' reads prompts, and {workload.name} has none: add a prompt "
            "column to the trace, or choose a predictor that needs none: history, max, oracle"
        )
    return LearnedWords(workload.prompts, Options(), seed)


FORECASTERS: dict[str, Callable[[Workload, Callable[[str], int], int], Forecaster]] = {
    "given": lambda workload, *_: forecast_given(workload),
    "history": lambda *_: LearnedLengths(build("history", Options())),
    "max": lambda *_: LearnedLengths(build("max", Options())),
    "oracle": lambda _workload, answer_tokens, _seed: TrueLengths(answer_tokens),
    "words": _learn_words,
    "magnus-rmse": lambda _workload, answer_tokens, seed: NoisyLengths(
        answer_tokens, MAGNUS_RMSE_TOKENS, seed
    ),
}


def build_forecaster(
    name: str, workload: Workload, answer_tokens: Callable[[str], int], seed: int
) -> Forecaster:
    """The predictor of this name. Raises ValueError for one that needs prompts which the workload
    lacks, or an encoder."""
    if name in PREDICTORS and name not in FORECASTERS:
        raise ValueError(
            f"the predictor {name!r} is not simulated yet: it needs a sentence encoder; choose "
            f"{', '.join(FORECASTERS)}"
        )
    require_known("predictor", name, FORECASTERS)
    return FORECASTERS[name](workload, answer_tokens, seed)
