"""Transcripts: what those whose clients ask are told is foreseen of them, and when.

The worker's step takes 0.05 s, and 0.05 s a sequence that decodes; a token of a prompt 0.01 s.
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
from services.scheduler.core.admission import Limits
from services.scheduler.core.forecast_updates import RESEND_S
from services.scheduler.core.ledger import UNMEASURED
from services.scheduler.observe.event_log import EventLog, Head, read
from tests.scheduler.state_driver import G, admitted, queued, report, request, state, told

COST = CostModel(0.05, 0.01, 0.05, 0.0)
SOME = Forecast((10.0, 30.0), (0.5, 0.5), 50, "retrieval")
OTHERS = Forecast((20.0, 40.0), (0.5, 0.5), 50, "retrieval")


def attach(s: Any, now: float = 0.0, name: str = "w0", places: int = 8, model: str = "demo") -> Any:
    view = WorkerView(name, f"unix:/{name}", model, 1_000, 16, places, 500)
    told(s, ev.WorkerAttached(f"{name}#1", view), now)
    return told(s, ev.Costed(name, COST), now)


def served(places: int = 8) -> Any:
    s = state()
    attach(s, places=places)
    return s


def asker(name: str = "r", **fields: Any) -> Request:
    asked: Request = replace(request(name), include_forecast=True, **fields)
    return asked


def foretold(actions: Any) -> Any:
    return [action for action in actions if isinstance(action, ev.SendForecast)]


def submitted(s: Any, asked: Request, now: float, forecast: Forecast = SOME) -> Any:
    """Submit, forecast and plan; what is foretold."""
    first = s.step(ev.Submitted(G, asked), now)
    return foretold(first + told(s, ev.Forecasted(((asked.request_id, forecast),)), now))


def test_one_that_runs_at_once_is_told_with_its_first_plan() -> None:
    """Its prompt of 10 takes 0.05 + 0.1 s, and it has waited 0.5 s; alone, a token takes 0.1 s."""
    s = served()
    [word] = submitted(s, asker(arrival_s=1.5), 2.0)
    assert (word.link, word.request_id, word.forecast) == (G, "r", SOME)
    assert word.token_s == pytest.approx(0.10)
    assert word.ttft_s == pytest.approx(0.5 + 0.15)


def test_who_does_not_ask_is_told_nothing() -> None:
    s = served()
    assert submitted(s, request("r"), 0.0) == []
    assert foretold(told(s, ev.Forecasted((("r", OTHERS),)), 0.0)) == []
    assert not s.ledger.with_forecast and not s.ledger.awaiting_promise


def test_prompts_that_came_before_are_in_the_way_and_those_that_decode_take_their_share() -> None:
    """One decodes, and two begin with the same round: 10 and 10 + 20 tokens of prompt."""
    s = served()
    admitted(s, request("old", prompt=40))
    report(s, 1, 0.0, progress=(RequestProgress("old", 5, 44, 3),))
    for asked in (asker("a"), asker("b", prompt_tokens=20)):
        s.step(ev.Submitted(G, asked), 0.0)
    a, b = foretold(told(s, ev.Forecasted((("a", SOME), ("b", SOME))), 0.0))
    assert a.ttft_s == pytest.approx(0.05 + 0.05 + 10 * 0.01)
    assert b.ttft_s == pytest.approx(0.05 + 0.05 + 30 * 0.01)
    assert a.token_s == b.token_s == pytest.approx(0.05 + 3 * 0.05)


def test_one_that_waits_is_promised_its_turn() -> None:
    """One runs, of which 15 tokens are left: 1.5 s. Then its own prompt, in a step like the
    present. Another waits, but came later."""
    s = served(places=1)
    submitted(s, request("runs"), 0.0, certain(20))
    report(s, 1, 0.0, progress=(RequestProgress("runs", 5, 14, 1),))
    submitted(s, request("later"), 0.0, certain(30))
    [word] = submitted(s, asker(arrival_s=-0.25), 0.0)
    assert queued(s) == ["later", "r"]
    assert word.token_s == pytest.approx(0.1)
    assert word.ttft_s == pytest.approx(0.25 + 1.5 + 0.1 + 0.1)


def test_behind_another_its_turn_is_later_and_two_workers_share_what_is_ahead() -> None:
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


def test_one_that_ran_before_its_forecast_came_keeps_the_promise_of_then() -> None:
    """The forecast is late: the request runs, as if it made all that it may."""
    s = state(patience_s=0.5)
    attach(s)
    told(s, ev.Submitted(G, asker()), 0.0)
    assert foretold(told(s, ev.Tick(), 1.0)) == []
    assert list(s.workers["w0"].running) == ["r"]
    report(s, 1, 1.3, progress=(RequestProgress("r", 2, 11, 1),))
    [word] = foretold(told(s, ev.Forecasted((("r", SOME),)), 1.4))
    assert word.ttft_s == pytest.approx(1.0 + 0.15)
    [again] = foretold(told(s, ev.Forecasted((("r", OTHERS),)), 1.5))
    assert (again.forecast, again.ttft_s) == (OTHERS, None)


def test_one_that_waits_is_promised_nothing_before_its_forecast_is_known() -> None:
    """Till then it stands behind all others, as if it were the longest."""
    s = state(patience_s=0.5)
    attach(s, places=1)
    submitted(s, request("runs"), 0.0, certain(20))
    told(s, ev.Submitted(G, asker()), 0.0)
    assert foretold(told(s, ev.Tick(), 1.0)) == []
    assert queued(s) == ["r"]
    [word] = foretold(told(s, ev.Forecasted((("r", SOME),)), 1.5))
    assert word.ttft_s == pytest.approx(1.5 + 2.0 + 0.1 + 0.1)


def test_a_forecast_is_told_again_when_it_is_replaced_by_another() -> None:
    s = served()
    submitted(s, asker(), 0.0)
    assert foretold(told(s, ev.Forecasted((("r", SOME),)), 0.1)) == []
    [word] = foretold(told(s, ev.Forecasted((("r", OTHERS), ("gone", SOME))), 0.2))
    assert (word.forecast, word.ttft_s) == (OTHERS, None)


def test_a_populations_forecast_is_told_anew_now_and_then() -> None:
    s = served()

    def of_all(longest: float, version: int) -> Forecast:
        return Forecast((longest,), (1.0,), UNCAPPED, "history", version, "history/demo")

    for name in ("a", "b"):
        submitted(s, asker(name), 0.0, of_all(10, 1))
    submitted(s, asker("own"), 0.0)
    words = foretold(told(s, ev.Refreshed((of_all(11, 2),)), 1.0))
    assert [(w.request_id, w.forecast) for w in words] == [
        ("a", of_all(11, 2)),
        ("b", of_all(11, 2)),
    ]
    assert foretold(told(s, ev.Refreshed((of_all(12, 3),)), 1.0 + RESEND_S / 2)) == []
    words = foretold(told(s, ev.Refreshed((of_all(13, 4),)), 1.0 + RESEND_S))
    assert [w.forecast for w in words] == [of_all(13, 4)] * 2


def test_while_no_worker_has_its_model_nothing_is_known_of_its_time() -> None:
    s = state()
    assert submitted(s, asker(), 0.0) == []
    view = WorkerView("w0", "unix:/w0", "demo", 1_000, 16, 8, 500)
    [word] = foretold(told(s, ev.WorkerAttached("w0#1", view), 4.0))
    assert word.token_s == pytest.approx(UNMEASURED.step_s(0, 1, 10))
    assert word.ttft_s == pytest.approx(4.0 + UNMEASURED.step_s(10, 0, 10))


def test_one_that_goes_on_has_no_first_token_to_be_promised() -> None:
    s = served()
    [word] = submitted(s, asker(delivered_tokens=4), 0.0)
    assert (word.forecast, word.ttft_s) == (SOME, None)


def test_a_gateway_that_is_back_is_told_again() -> None:
    s = served()
    submitted(s, asker(), 0.0)
    back = asker(worker_id="w0", delivered_tokens=1)
    [word] = foretold(s.step(ev.Submitted("gateway#2", back), 1.0))
    assert (word.link, word.forecast, word.ttft_s) == ("gateway#2", SOME, None)


def test_one_whose_worker_is_lost_is_told_no_second_promise() -> None:
    s = served()
    submitted(s, asker(), 0.0)
    report(s, 1, 0.5, progress=(RequestProgress("r", 3, 12, 1),))
    told(s, ev.WorkerLost("w0#1", "w0"), 1.0)
    assert foretold(told(s, ev.Forecasted((("r", OTHERS),)), 1.0)) == []  # nobody could run it
    view = WorkerView("w0", "unix:/w0", "demo", 1_000, 16, 8, 500)
    [word] = foretold(told(s, ev.WorkerAttached("w0#2", view), 2.0))
    assert (word.forecast, word.ttft_s) == (OTHERS, None)


@pytest.mark.parametrize("how", ["finished", "cancelled", "lost", "refused"])
def test_nothing_is_kept_of_one_that_is_over(how: str) -> None:
    s = served()
    submitted(s, asker(), 0.0)
    if how == "finished":
        report(s, 1, 1.0, finished=(Completion("r", 10, FinishReason.STOP),))
    elif how == "cancelled":
        told(s, ev.Cancelled(G, "r", FinishReason.CANCELLED, 3), 1.0)
    elif how == "lost":
        told(s, ev.GatewayLost(G), 1.0)
    else:
        told(s, ev.Cancelled(G, "r", FinishReason.CANCELLED, 3), 1.0)
        assert submitted(s, asker("long", max_tokens=10_000), 1.0) == []
    assert not s.ledger.with_forecast and not s.ledger.awaiting_promise


def test_a_log_of_it_reads_as_it_was_written(tmp_path: Path) -> None:
    s = served()
    path = tmp_path / "log"
    written = list(_steps(s))
    with EventLog(path, 2**20, Head(s.preset, Limits())) as log:
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


def test_a_promise_is_given_once_though_no_worker_has_its_model_for_a_while() -> None:
    s = served(places=1)
    submitted(s, request("first"), 0.0)
    [word] = submitted(s, asker(), 0.0)
    assert word.ttft_s is not None
    told(s, ev.WorkerLost("w0#1", "w0"), 1.0)
    assert foretold(told(s, ev.Forecasted((("r", OTHERS),)), 1.0)) == []  # nobody could say when
    view = WorkerView("w1", "unix:/w1", "demo", 1_000, 16, 8, 500)
    words = foretold(told(s, ev.WorkerAttached("w1#1", view), 2.0))
    assert [(w.forecast, w.ttft_s) for w in words] == [(OTHERS, None)]
