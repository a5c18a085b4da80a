"""All forms of the continuous arrangement: which requests of a queue may run together."""

from services.policies.form.curve import PARAMS as CURVE_PARAMS
from services.policies.form.curve import curves, feedback
from services.policies.form.demand import Form
from services.policies.form.past_future import PARAMS as PAST_FUTURE_PARAMS
from services.policies.form.past_future import past_future
from services.policies.form.sums import (
    BATCH_SIZE,
    TOKEN_BUDGET,
    aggressive,
    conservative,
    fixed,
    sliced,
    token_budget,
)
from services.policies.parameters import Param

FORMS: dict[str, Form] = {
    "aggressive": Form(aggressive, {"watermark": Param(0.95, 0.0, 1.0)}),
    "conservative": Form(conservative, {"overcommit": Param(1.0, 0.0, 10.0)}),
    "fixed": Form(fixed, BATCH_SIZE, reserves=True),
    "sliced": Form(sliced, {"zeta": Param(0.9, 0.0, 1.0)}, renews=True),
    "token_budget": Form(token_budget, TOKEN_BUDGET),
    "past_future": Form(past_future, PAST_FUTURE_PARAMS),
    "curve": Form(curves, CURVE_PARAMS, feedback),
}
