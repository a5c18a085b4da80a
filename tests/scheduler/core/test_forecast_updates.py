"""Transcripts of forecast updates: what a client that includes forecasts receives, and when.

A step takes 0.05 s plus 0.05 s per decoding sequence; a prompt token takes 0.01 s.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.core import Completion, FinishReason, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import UNCAPPED, Forecast, certain
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.forecast_updates import RESEND_S
from services.scheduler.core.ledger import UNMEASURED
from services.scheduler.observe.event_log import EventLog, Head, read
from tests.scheduler.state_driver import G, admitted, queued, report, request, run_step, state

COST = CostModel(0.05, 0.01, 0.05, 0.0)
SOME = Forecast((10.0, 30.0), (0.5, 0.5), 50, "retrieval")
OTHERS = Forecast((20.0, 40.0), (0.5, 0.5), 50, "retrieval")


def attach(s: Any, now: float = 0.0, name: str = "w0", places: int = 8, model: str = "demo") -> Any:
    view = WorkerView(name, f"unix:/{name}", model, 1_000, 16, places, 500)
    run_step(s, ev.WorkerAttached(f"{name}#1", view), now)
    return run_step(s, ev.Costed(name, COST), now)


def served(places: int = 8) -> Any:
    s = state()
    attach(s, places=places)
    return s


def asker(name: str = "r", **fields: Any) -> Request:
    asked: Request = replace(request(name), include_forecast=True, **fields)
    return asked


def forecast_updates(actions: Any) -> Any:
    return [action for action in actions if isinstance(action, ev.SendForecast)]


def submitted(s: Any, asked: Request, now: float, forecast: Forecast = SOME) -> Any:
    """Submits, forecasts and plans; returns the forecast updates."""
    first = s.step(ev.Submitted(G, asked), now)
    return forecast_updates(
        first + run_step(s, ev.Forecasted(((asked.request_id, forecast),)), now)
    )


def test_admitted_request_gets_forecast_with_first_plan() -> None:
    """Its prompt of 10 takes 0.05 + 0.1 s, and it has waited 0.5 s; alone, a token takes 0.1 s."""
    s = served()
    [word] = submitted(s, asker(arrival_s=1.5), 2.0)
    assert (word.link, word.request_id, word.forecast) == (G, "r", SOME)
    assert word.token_s == pytest.approx(0.10)
    assert word.ttft_s == pytest.approx(0.5 + 0.15)


def test_least_tokens_bound_a_request_s_own_forecast_and_its_population_s() -> None:
    s = served()
    [word] = submitted(s, asker(arrival_s=1.5, min_tokens=20), 2.0)
    assert word.forecast == replace(SOME, points=(30.0,), weights=(1.0,))
    shared = replace(SOME, max_tokens=UNCAPPED, shared_key="history/demo")
    run_step(s, ev.Submitted(G, replace(request("other"))), 2.0)
    run_step(s, ev.Forecasted((("other", shared), ("r", shared))), 2.0)
    rows = [s.jobs[name].row for name in ("r", "other")]
    assert s.ledger.board.jobs.total[rows].tolist() == [30, 20]
    newer = replace(shared, points=(4.0, 40.0), version=2)
    words = forecast_updates(s.step(ev.Refreshed((newer,)), 2.0 + RESEND_S))
    assert [word.forecast.points for word in words] == [(40.0,)]
    assert s.ledger.board.jobs.total[rows].tolist() == [40, 22]


def test_token_takes_a_part_of_a_step_with_speculation() -> None:
    """The worker's report divides the time of a token, not that of a prompt. It outlasts the next
    cost model, and a change of less than 2 % makes no other."""
    s = served()
    report(s, 1, 0.0, tokens_per_step=2.0)
    run_step(s, ev.Costed("w0", replace(COST, version=2)), 0.0)
    [word] = submitted(s, asker(arrival_s=1.5), 2.0)
    assert word.token_s == pytest.approx(0.10 / 2)
    assert word.ttft_s == pytest.approx(0.5 + 0.15)
    known = s.workers["w0"].cost
    assert (known.version, known.tokens_per_step) == (2, 2.0)
    assert known.decode_tokens_per_s(2, 0.0) == pytest.approx(2 * 2.0 / 0.15)
    report(s, 2, 2.5, tokens_per_step=2.01)
    assert s.workers["w0"].cost is known
    report(s, 3, 2.6, tokens_per_step=1.0)
    assert s.workers["w0"].cost.tokens_per_step == 1.0


def test_no_forecast_update_without_include_forecast() -> None:
    s = served()
    assert submitted(s, request("r"), 0.0) == []
    assert forecast_updates(run_step(s, ev.Forecasted((("r", OTHERS),)), 0.0)) == []
    assert not s.ledger.with_forecast and not s.ledger.awaiting_promise


def test_promise_counts_earlier_prefills_and_decoding_requests() -> None:
    """One request decodes, and two are admitted in one round: 10 and 10 + 20 prompt tokens."""
    s = served()
    admitted(s, request("old", prompt=40))
    report(s, 1, 0.0, progress=(RequestProgress("old", 5, 44, 3),))
    for asked in (asker("a"), asker("b", prompt_tokens=20)):
        s.step(ev.Submitted(G, asked), 0.0)
    a, b = forecast_updates(run_step(s, ev.Forecasted((("a", SOME), ("b", SOME))), 0.0))
    assert a.ttft_s == pytest.approx(0.05 + 0.05 + 10 * 0.01)
    assert b.ttft_s == pytest.approx(0.05 + 0.05 + 30 * 0.01)
    assert a.token_s == b.token_s == pytest.approx(0.05 + 3 * 0.05)


def test_promise_of_waiting_request_is_its_turn() -> None:
    """A running request has 15 tokens left: 1.5 s. Then its own prompt takes one step. Another
    request waits, but arrived later."""
    s = served(places=1)
    submitted(s, request("runs"), 0.0, certain(20))
    report(s, 1, 0.0, progress=(RequestProgress("runs", 5, 14, 1),))
    submitted(s, request("later"), 0.0, certain(30))
    [word] = submitted(s, asker(arrival_s=-0.25), 0.0)
    assert queued(s) == ["later", "r"]
    assert word.token_s == pytest.approx(0.1)
    assert word.ttft_s == pytest.approx(0.25 + 1.5 + 0.1 + 0.1)


def test_promise_counts_work_ahead_over_all_workers() -> None:
    """Ahead are 0.1 s of prompt and 30 tokens."""
    for workers, share in ((1, 1.0), (2, 0.5)):
        s = served(places=1)
        submitted(s, request("runs"), 0.0, certain(20))
        if workers == 2:
            attach(s, name="w1", places=1)
            submitted(s, request("too"), 0.0, certain(20))
        submitted(s, request("ahead", at=-1.0), 0.0, certain(30))
        [word] = submitted(s, asker(arrival_s=0.0), 0.0)
        assert word.ttft_s == pytest.approx(2.0 + share * 3.1 + 0.1 + 0.1)


def test_promise_made_before_forecast_is_kept() -> None:
    """The forecast is late: the request runs, and is expected to generate max_tokens."""
    s = state(patience_s=0.5)
    attach(s)
    run_step(s, ev.Submitted(G, asker()), 0.0)
    assert forecast_updates(run_step(s, ev.Tick(), 1.0)) == []
    assert list(s.workers["w0"].running) == ["r"]
    report(s, 1, 1.3, progress=(RequestProgress("r", 2, 11, 1),))
    [word] = forecast_updates(run_step(s, ev.Forecasted((("r", SOME),)), 1.4))
    assert word.ttft_s == pytest.approx(1.0 + 0.15)
    [again] = forecast_updates(run_step(s, ev.Forecasted((("r", OTHERS),)), 1.5))
    assert (again.forecast, again.ttft_s) == (OTHERS, None)


def test_waiting_request_has_no_promise_before_forecast() -> None:
    """Until then it is ranked behind all others, as the longest."""
    s = state(patience_s=0.5)
    attach(s, places=1)
    submitted(s, request("runs"), 0.0, certain(20))
    run_step(s, ev.Submitted(G, asker()), 0.0)
    assert forecast_updates(run_step(s, ev.Tick(), 1.0)) == []
    assert queued(s) == ["r"]
    [word] = forecast_updates(run_step(s, ev.Forecasted((("r", SOME),)), 1.5))
    assert word.ttft_s == pytest.approx(1.5 + 2.0 + 0.1 + 0.1)


def test_replaced_forecast_is_sent_again() -> None:
    s = served()
    submitted(s, asker(), 0.0)
    assert forecast_updates(run_step(s, ev.Forecasted((("r", SOME),)), 0.1)) == []
    [word] = forecast_updates(run_step(s, ev.Forecasted((("r", OTHERS), ("gone", SOME))), 0.2))
    assert (word.forecast, word.ttft_s) == (OTHERS, None)


def test_population_forecast_is_resent_periodically() -> None:
    s = served()

    def of_all(longest: float, version: int) -> Forecast:
        return Forecast((longest,), (1.0,), UNCAPPED, "history", version, "history/demo")

    for name in ("a", "b"):
        submitted(s, asker(name), 0.0, of_all(10, 1))
    submitted(s, asker("own"), 0.0)
    words = forecast_updates(run_step(s, ev.Refreshed((of_all(11, 2),)), 1.0))
    assert [(w.request_id, w.forecast) for w in words] == [
        ("a", of_all(11, 2)),
        ("b", of_all(11, 2)),
    ]
    assert forecast_updates(run_step(s, ev.Refreshed((of_all(12, 3),)), 1.0 + RESEND_S / 2)) == []
    words = forecast_updates(run_step(s, ev.Refreshed((of_all(13, 4),)), 1.0 + RESEND_S))
    assert [w.forecast for w in words] == [of_all(13, 4)] * 2


def test_no_forecast_update_without_worker_for_model() -> None:
    s = state()
    assert submitted(s, asker(), 0.0) == []
    view = WorkerView("w0", "unix:/w0", "demo", 1_000, 16, 8, 500)
    [word] = forecast_updates(run_step(s, ev.WorkerAttached("w0#1", view), 4.0))
    assert word.token_s == pytest.approx(UNMEASURED.step_s(0, 1, 10))
    assert word.ttft_s == pytest.approx(4.0 + UNMEASURED.step_s(10, 0, 10))


def test_resubmitted_request_has_no_promise() -> None:
    s = served()
    [word] = submitted(s, asker(delivered_tokens=4), 0.0)
    assert (word.forecast, word.ttft_s) == (SOME, None)


def test_reconnected_gateway_receives_forecast_again() -> None:
    s = served()
    submitted(s, asker(), 0.0)
    back = asker(worker_id="w0", delivered_tokens=1)
    [word] = forecast_updates(s.step(ev.Submitted("gateway#2", back), 1.0))
    assert (word.link, word.forecast, word.ttft_s) == ("gateway#2", SOME, None)


def test_promise_is_not_repeated_after_worker_loss() -> None:
    s = served()
    submitted(s, asker(), 0.0)
    report(s, 1, 0.5, progress=(RequestProgress("r", 3, 12, 1),))
    run_step(s, ev.WorkerLost("w0#1", "w0"), 1.0)
    assert (
        forecast_updates(run_step(s, ev.Forecasted((("r", OTHERS),)), 1.0)) == []
    )  # no worker can run it
    view = WorkerView("w0", "unix:/w0", "demo", 1_000, 16, 8, 500)
    [word] = forecast_updates(run_step(s, ev.WorkerAttached("w0#2", view), 2.0))
    assert (word.forecast, word.ttft_s) == (OTHERS, None)


@pytest.mark.parametrize("how", ["finished", "cancelled", "lost", "refused"])
def test_ended_request_leaves_no_forecast_state(how: str) -> None:
    s = served()
    submitted(s, asker(), 0.0)
    if how == "finished":
        report(s, 1, 1.0, finished=(Completion("r", 10, FinishReason.STOP),))
    elif how == "cancelled":
        run_step(s, ev.Cancelled(G, "r", FinishReason.CANCELLED, 3), 1.0)
    elif how == "lost":
        run_step(s, ev.GatewayLost(G), 1.0)
    else:
        run_step(s, ev.Cancelled(G, "r", FinishReason.CANCELLED, 3), 1.0)
        assert submitted(s, asker("long", max_tokens=10_000), 1.0) == []
    assert not s.ledger.with_forecast and not s.ledger.awaiting_promise


def test_forecast_updates_round_trip_through_event_log(tmp_path: Path) -> None:
    s = served()
    path = tmp_path / "log"
    written = list(_steps(s))
    with EventLog(path, 2**20, Head(s.preset, SchedulerLimits())) as log:
        for step in written:
            log.append(step)
    assert list(read(path)) == written


def _steps(s: Any) -> Iterator[ev.Step]:
    events: list[ev.Event] = [
        ev.Submitted(G, asker()), ev.Forecasted((("r", SOME),)), ev.Round(),
    ]  # fmt: skip
    for at, event in enumerate(events):
        s.step(event, float(at))
        yield s.last_step


@pytest.mark.parametrize(
    ("quantile", "fields", "bound"),
    [  # half of the answers have 10 tokens, half 30
        (0.0, {}, None),
        (0.3, {}, 10),
        (0.95, {}, 30),
        (0.3, {"min_tokens": 11}, 30),
        (0.3, {"delivered_tokens": 10}, 30),
        (0.95, {"max_tokens": 31}, 30),
        (0.95, {"max_tokens": 30}, None),  # it says no more than max_tokens
        (0.5, {"delivered_tokens": 40, "max_tokens": 100}, 61),  # as long again: 40 + 30 ln 2
        (1.0, {"delivered_tokens": 40, "max_tokens": 100}, None),
    ],
)
def test_a_quantile_bounds_the_length(
    quantile: float, fields: dict[str, int], bound: int | None
) -> None:
    s = served()
    s.step(ev.Submitted(G, replace(request("r"), length_quantile=quantile, **fields)), 0.0)
    actions = s.step(ev.Forecasted((("r", SOME.truncated(100)),)), 0.0)
    expected = [ev.SendLengthBound(G, "r", bound)] if bound else []
    assert [each for each in actions if isinstance(each, ev.SendLengthBound)] == expected


@pytest.mark.parametrize(("quantile", "asks"), [(0.0, False), (0.3, True)])
def test_a_bound_that_the_earlier_link_may_have_lost_is_sent_again(
    quantile: float, asks: bool
) -> None:
    s = served()
    bounded = replace(request("r"), length_quantile=quantile)
    s.step(ev.Submitted(G, bounded), 0.0)
    s.step(ev.Forecasted((("r", SOME),)), 0.0)
    s.step(ev.Round(), 0.0)
    actions = s.step(ev.Submitted("g2", replace(bounded, worker_id="w0")), 1.0)
    again = [each.requests for each in actions if isinstance(each, ev.AskForecast)]
    assert again == ([(bounded,)] if asks else [])
    bounds = s.step(ev.Forecasted((("r", SOME),)), 1.0)
    assert (ev.SendLengthBound("g2", "r", 10) in bounds) is asks


def test_a_shared_forecast_bounds_a_length_once_most_answers_are_known() -> None:
    """Mass on UNCAPPED stands for each request's own limit."""
    s = served()
    s.step(ev.Submitted(G, replace(request("r"), length_quantile=0.9)), 0.0)
    for longest, bounds in ((0.2, []), (0.05, [10])):
        shared = Forecast((10.0, UNCAPPED), (1 - longest, longest), UNCAPPED, "history", 1, "all")
        actions = s.step(ev.Forecasted((("r", shared),)), 0.0)
        sent = [each.output_tokens for each in actions if isinstance(each, ev.SendLengthBound)]
        assert sent == bounds


def test_promise_is_sent_once_across_worker_absence() -> None:
    s = served(places=1)
    submitted(s, request("first"), 0.0)
    [word] = submitted(s, asker(), 0.0)
    assert word.ttft_s is not None
    run_step(s, ev.WorkerLost("w0#1", "w0"), 1.0)
    assert (
        forecast_updates(run_step(s, ev.Forecasted((("r", OTHERS),)), 1.0)) == []
    )  # without an expected time
    view = WorkerView("w1", "unix:/w1", "demo", 1_000, 16, 8, 500)
    words = forecast_updates(run_step(s, ev.WorkerAttached("w1#1", view), 2.0))
    assert [(w.forecast, w.ttft_s) for w in words] == [(OTHERS, None)]
