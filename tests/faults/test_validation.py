"""Verdicts and gaps, worked by hand."""

import json

import pytest

from foretoken.client.answers import Choice
from services.core import FinishReason
from tests.faults.validation import (
    Delivery,
    Injected,
    Verdict,
    compare,
    judge,
    longest_gaps,
    quantile,
    summarize,
)

ANSWER = Choice("abcd", [1, 2, 3, 4], finish_reason=FinishReason.LENGTH)
BEGUN = Choice("ab", [1, 2])


@pytest.mark.parametrize(
    ("got", "complete", "verdict"),
    [
        ("abcdef", True, "right"),
        ("abc", False, "right"),
        ("", False, "right"),
        ("abc", True, "missing"),
        ("", True, "missing"),
        ("abef", True, "missing"),
        ("abe", False, "missing"),
        ("bcdef", True, "missing"),
        ("ababcdef", True, "duplicated"),
        ("abcc", False, "duplicated"),
        ("abcdefef", True, "duplicated"),
        ("abcdefg", True, "wrong"),
        ("abxdef", True, "wrong"),
        ("abcabc", False, "duplicated"),
        ("x", False, "wrong"),
    ],
)
def test_comparison_names_what_differs_from_abcdef(got: str, complete: bool, verdict: str) -> None:
    assert compare("abcdef", got, complete) == verdict
    assert compare(list("abcdef"), list(got), complete) == verdict


@pytest.mark.parametrize(
    ("delivery", "verdict"),
    [
        (Delivery(0, [ANSWER]), Verdict.RIGHT),
        (Delivery(0, [BEGUN], cancelled=True), Verdict.CANCELLED),
        (Delivery(0, [BEGUN], status="Unavailable"), Verdict.REFUSED),
        (Delivery(0, [Choice()], status="Overloaded"), Verdict.REFUSED),
        (Delivery(0, [BEGUN], status="ServerError"), Verdict.FAILED),
        (Delivery(0, [BEGUN], ended=False), Verdict.LOST),
        (Delivery(0, [BEGUN]), Verdict.LOST),
        (Delivery(0, [Choice("b", [2])], status="Unavailable"), Verdict.MISSING),
        (Delivery(0, [Choice("x", [9])], cancelled=True), Verdict.WRONG),
        (
            Delivery(0, [Choice("abcd", [1, 2, 3, 4], finish_reason=FinishReason.STOP)]),
            Verdict.WRONG,
        ),
        (Delivery(0, [Choice("ab", [1, 2], finish_reason=FinishReason.LENGTH)]), Verdict.MISSING),
        (Delivery(0, [Choice("abcd", [1, 2, 2, 3, 4])]), Verdict.DUPLICATED),
    ],
)
def test_verdict_on_a_delivery(delivery: Delivery, verdict: Verdict) -> None:
    assert judge([ANSWER], delivery) is verdict


def test_text_alone_counts_if_tokens_go_beyond_a_stop_string() -> None:
    delivered = Choice("abcd", [1, 2, 3], finish_reason=FinishReason.LENGTH)
    assert judge([ANSWER], Delivery(0, [delivered])) is Verdict.MISSING
    assert judge([ANSWER], Delivery(0, [delivered], by_text=True)) is Verdict.RIGHT


def test_every_choice_is_judged() -> None:
    assert judge([ANSWER, ANSWER], Delivery(0, [ANSWER, BEGUN])) is Verdict.LOST


def test_longest_gap_overlaps_the_fault() -> None:
    streams = [[0.0, 3.0, 4.0, 9.0], [3.5, 4.2], [0.0, 2.0], [7.0], []]
    fault = Injected("kill", "worker-0", 3.2, 4.5)
    deliveries = [Delivery(0, [], arrivals_s=[stream]) for stream in streams]
    assert list(longest_gaps(deliveries, fault)) == pytest.approx([5.0, 0.7])


def test_quantile_of_few_values() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.5, 0.51, 0.99, 1.0)] == [
        2,
        3,
        4,
        4,
    ]


def test_report_counts_and_shows_evidence() -> None:
    deliveries = [
        Delivery(0, [ANSWER], arrivals_s=[[1.0, 1.5]]),
        Delivery(0, [BEGUN], status="Unavailable", message="draining"),
        Delivery(0, [Choice("x", [9])], cancelled=True),
    ]
    faults = [Injected("kill", "worker-0", 1.2, 1.3), Injected("cut", "scheduler", 5.0, 5.0)]
    report = summarize({0: [ANSWER]}, deliveries, faults)
    assert report.verdicts == {Verdict.RIGHT: 1, Verdict.REFUSED: 1, Verdict.WRONG: 1}
    assert report.statuses == {"Unavailable: draining": 1}
    assert report.gaps_s == {"kill worker": [0.5], "cut scheduler": []}
    assert not report.good
    assert "request 0 is wrong" in str(report)
    figures = json.loads(json.dumps(report.figures()))
    assert figures["requests"] == 3
    assert figures["verdicts"] == dict.fromkeys(Verdict, 0) | {"right": 1, "refused": 1, "wrong": 1}
    gaps_s = {"p50": 0.5, "p99": 0.5, "max": 0.5}
    assert figures["faults"] == {
        "cut scheduler": {"faults": 1, "streams": 0, "longest_gap_s": {}},
        "kill worker": {"faults": 1, "streams": 1, "longest_gap_s": gaps_s},
    }
    assert summarize({0: [ANSWER]}, deliveries[:2], []).good
