"""The predictor in virtual time: the served predictors' forecasts and learning, without a process.

The named predictor alone answers. Its latency is `Timing.forecast_s`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from services.core import Outcome, Request
from services.forecast import Forecast, certain
from services.predictor.interface import Example, Options, Predictor, Prompt, Query
from simulator.workload.workload import Workload

REFIT_NEW_SHARE = 0.2  # of the examples of the last fit, before the next one, as served
REFIT_NEW_MIN = 64


class Forecaster(Protocol):
    """Answers forecasts and learns outcomes."""

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        """One forecast per request, as the predictor gives it."""
        ...

    def learn(self, outcome: Outcome) -> None:
        """Learns a finished request's length."""
        ...


class TrueLengths:
    """Forecasts the true lengths: the predictor `oracle`."""

    def __init__(self, answer_tokens: Callable[[str], int]):
        self._answer_tokens = answer_tokens

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return [certain(self._answer_tokens(r.request_id), "oracle") for r in requests]

    def learn(self, outcome: Outcome) -> None:
        """Does nothing."""


class LearnedLengths:
    """A served predictor that sees lengths alone."""

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return self._predictor.forecast([_query(request) for request in requests])

    def learn(self, outcome: Outcome) -> None:
        query = Query(outcome.model, outcome.application, outcome.prompt_tokens, outcome.max_tokens)
        self._predictor.learn([Example(query, outcome.output_tokens, outcome.reason)])


class LearnedWords:
    """The served predictor `words`: reads prompts, learns online, and is refitted when enough new
    outcomes are there. A fit takes no virtual time."""

    def __init__(self, prompts: Sequence[str], options: Options, seed: int):
        from services.predictor.encoder.extract import word_features
        from services.predictor.predictors import build_reading

        self._features = word_features
        self._predictor = build_reading("words", options)
        self._prompts, self._seed = prompts, seed
        self._queries: dict[str, Query] = {}  # of live requests
        self._fitted_on = 0

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        queries = [self._read(request) for request in requests]
        return self._predictor.forecast(queries)

    def learn(self, outcome: Outcome) -> None:
        if query := self._queries.pop(outcome.request_id, None):
            self._predictor.learn([Example(query, outcome.output_tokens, outcome.reason)])
        if self._predictor.pending >= max(REFIT_NEW_MIN, REFIT_NEW_SHARE * self._fitted_on):
            self._refit()

    def _refit(self) -> None:
        if refit := self._predictor.refit(self._seed):
            self._predictor.adopt(refit.run())
            self._fitted_on = len(refit.examples)

    def _read(self, request: Request) -> Query:
        if known := self._queries.get(request.request_id):
            return known
        prompt = Prompt("", self._prompts[int(request.request_id)], request.prompt_tokens)
        query = _query(request, prompt)
        features = self._features(prompt)
        query = Query(
            query.model, "", query.prompt_tokens, query.max_tokens, features, query.prompt
        )
        self._queries[request.request_id] = query
        return query


def _query(request: Request, prompt: Prompt | None = None) -> Query:
    return Query(
        request.model, request.application, request.prompt_tokens, request.max_tokens, prompt=prompt
    )


def build_forecaster(
    name: str, workload: Workload, answer_tokens: Callable[[str], int], seed: int
) -> Forecaster:
    """The predictor of this name. Raises ValueError for one that needs prompts which the workload
    lacks, or an encoder."""
    match name:
        case "oracle":
            return TrueLengths(answer_tokens)
        case "words" if workload.prompts:
            return LearnedWords(workload.prompts, Options(), seed)
        case "history" | "max":
            from services.predictor.predictors import build

            return LearnedLengths(build(name, Options()))
        case "words":
            raise ValueError(
                f"the predictor 'words' reads prompts, and {workload.name} has none: add a prompt "
                "column to the trace, or choose a predictor that needs none: history, max, oracle"
            )
        case _:
            raise ValueError(
                f"the predictor {name!r} is not simulated yet: it needs a sentence encoder; "
                "choose history, max, oracle or words"
            )
