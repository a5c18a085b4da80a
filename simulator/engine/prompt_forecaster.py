"""A predictor that reads prompts, in virtual time: the served models and their learning."""

from collections.abc import Sequence

from services.core import LiveAnswers, Outcome, Request
from services.forecast import Forecast
from services.predictor.blend.content import MIN_EXAMPLES_TO_FIT, Refit, Refitted
from services.predictor.interface import Example, Features, Options, Query
from services.predictor.learning.rules import DEFAULT_RULES, RULES
from services.predictor.learning.schedule import RefitSchedule
from services.predictor.models.oracle import NO_LENGTH
from services.predictor.predictors import ENCODERLESS, build_reading

# When and on what the served predictor refits: services/predictor/config.py.
SERVED = RefitSchedule(180.0, examples_min=64, new_min=50, new_share=0.05, seed=0)
EXAMPLES = 20_000


class LearnedPrompts:
    """A served predictor that reads prompts: it learns online and is refitted when the served one
    would be. A fit takes no virtual time.

    features: of each request of the workload; its row is the request id.
    """

    def __init__(
        self, name: str, features: Sequence[Features], options: Options, schedule: RefitSchedule
    ):
        self.encodes = name not in ENCODERLESS
        self._predictor = build_reading(name, options)
        self._trains_on = RULES[DEFAULT_RULES.get(name, "all")]
        self._features, self._schedule = features, schedule
        self._means: dict[str, float] = {}  # forecasts of live requests; 0: no model's
        self._fitted_on = 0
        self._check_s = schedule.check_interval_s(has_fitted=False)

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        queries = [
            self._query(int(r.request_id), r.model, r.prompt_tokens, r.max_tokens) for r in requests
        ]
        forecasts = self._predictor.forecast(queries)
        for request, forecast in zip(requests, forecasts, strict=True):
            by_model = forecast.source != NO_LENGTH and not forecast.shared_key
            self._means[request.request_id] = forecast.mean() if by_model else 0.0
        return forecasts

    def learn(self, outcome: Outcome, now: float) -> None:
        mean = self._means.pop(outcome.request_id, None)
        if mean is not None and self._trains_on(mean, outcome.output_tokens):
            row = int(outcome.request_id)
            query = self._query(row, outcome.model, outcome.prompt_tokens, outcome.max_tokens)
            self._predictor.learn([Example(query, outcome.output_tokens, outcome.reason)])
        if now >= self._check_s:
            if self._schedule.is_due(self._predictor.pending, self._fitted_on):
                self._refit()
            self._check_s = now + self._schedule.check_interval_s(bool(self._fitted_on))

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        self._predictor.observe_live(answers)

    def study(self, examples: Sequence[Example]) -> None:
        self._predictor.learn(examples)
        if not self._refit():
            raise ValueError(
                f"{len(examples)} requests are too few to train on: hold out at least "
                f"{MIN_EXAMPLES_TO_FIT}"
            )

    def _refit(self) -> bool:
        refit = self._predictor.refit(self._schedule.seed)
        if refit:
            self._predictor.adopt(_run(refit))
            self._fitted_on = len(refit.examples)
        return refit is not None

    def _query(self, row: int, model: str, prompt_tokens: int, max_tokens: int) -> Query:
        return Query(model, "", prompt_tokens, max_tokens, features=self._features[row])


def _run(refit: Refit) -> Refitted:
    """Fits on one thread, so that equal seeds give equal models on any number of cores."""
    import torch  # imported by the models already

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return refit.run()
    finally:
        torch.set_num_threads(threads)
