"""benchmarks.grammars: schemas, and the figures of some of them."""

import json
import math

from benchmarks.grammars.__main__ import make_job, summarize
from benchmarks.grammars.engines import LIBRARIES, measure
from benchmarks.grammars.schemas import make_schemas
from foretoken.running.options import demo_model


def test_figures_of_some_schemas() -> None:
    named = dict(make_schemas())
    assert 30 <= len(named) <= 60
    some = [json.dumps(named[name]) for name in ("user", "tree", "matrix", "contains")]
    job = make_job(demo_model(), some)
    answers = job["answers"]
    assert isinstance(answers, list) and answers[0] and not answers[3]
    compile_schema = LIBRARIES["llguidance"](job)
    found = [measure(compile_schema, *pair) for pair in zip(some, answers, strict=True)]
    figures = summarize(found)
    assert figures["enforced"] == 0.75 and figures["accepted"] == 1.0
    assert all(math.isfinite(each) and each >= 0 for each in figures.values())
