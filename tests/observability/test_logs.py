"""Logs: text and JSON lines, context, and repeated warnings."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.logs import (
    MAX_SIMILAR,
    JsonLines,
    LogHandler,
    RepeatFilter,
    TextLines,
    add_log_context,
    log_context,
    trace_id_of,
)
from tests.live import wait_for

EVERY_S = 10.0


def record(
    at_s: float, message: str = "gone: %s", *args: object, level: int = logging.WARNING, name="a"
) -> logging.LogRecord:
    """A record with the same text for all arguments; `known_as` identifies it."""
    made = logging.LogRecord(name, level, __file__, 1, message, ("x",), None)
    made.created, made.__dict__["known_as"] = at_s, str(args[0]) if args else "x"
    return made


def summarized(records: Iterable[logging.LogRecord]) -> list[tuple[str, int]]:
    return [
        (each.getMessage().replace("x", each.__dict__["known_as"]), getattr(each, "repeated", 0))
        for each in records
    ]


INFO, ERROR = logging.INFO, logging.ERROR

# A record, and the lines logged when it arrives: text, and the number of similar records.
TABLE = [
    (record(0, "gone: %s", 1), [("gone: 1", 0)]),  # the first is logged
    (record(1, "gone: %s", 2), []),
    (record(2, "gone: %s", 3), []),
    (record(3, "gone: %s", 4, name="b"), [("gone: 4", 0)]),  # another logger
    (record(4, "gone: %s", 5, level=ERROR), [("gone: 5", 0)]),  # another level
    (record(5, "late: %s", 6), [("late: 6", 0)]),
    (record(6, "gone: %s", 7, level=INFO), [("gone: 7", 0)]),  # below warning: always logged
    (record(6, "gone: %s", 8, level=INFO), [("gone: 8", 0)]),
    (record(9, "gone: %s", 9), []),
    (record(10, "gone: %s", 10), [("gone: 10", 3)]),  # with 2, 3 and 9
    (record(11, "gone: %s", 11), []),
    (record(12, "late: %s", 12), []),
    (record(13, "gone: %s", 13), []),
    # 4 and 5 were logged over 10 s ago without repetitions; the summary of 12 is due
    (record(16, "here: %s", 14, level=INFO), [("late: 12", 0), ("here: 14", 0)]),
    # the summary of 11 and 13 is due
    (record(20, "here: %s", 15, level=INFO), [("gone: 13", 1), ("here: 15", 0)]),
    (record(21, "gone: %s", 16), []),
    (record(50, "gone: %s", 17), [("gone: 17", 1)]),
    (record(51, "gone: %s", 18), []),
]


def test_repeated_warning_is_logged_once_then_with_its_count():
    repeats = RepeatFilter(EVERY_S)
    for number, (each, expected) in enumerate(TABLE):
        assert summarized(repeats.filter(each, each.created)) == expected, f"row {number}"
    assert summarized(repeats.flush()) == [("gone: 18", 0)]
    assert repeats.flush() == []


def test_other_exception_is_a_different_warning():
    repeats = RepeatFilter(EVERY_S)
    for error in (KeyError("a"), ValueError("b")):
        broken = record(0, "request failed", level=ERROR)
        broken.args, broken.exc_info = (), (type(error), error, None)
        assert repeats.filter(broken, 0) == [broken]
    again = record(1, "request failed", level=ERROR)
    again.args, again.exc_info = (), (KeyError, KeyError("c"), None)
    assert repeats.filter(again, 1) == []
    [kept] = repeats.flush()
    assert kept.exc_info is None  # holds no frames
    assert kept.exc_text == "KeyError: 'a'"  # the text of the first one


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.integers(0, 6), st.sampled_from([INFO, logging.WARNING])),
        max_size=60,
    ),
    st.integers(1, 4),
)
def test_counts_are_complete_and_memory_is_bounded(
    records: list[tuple[float, int, int]], most: int
) -> None:
    repeats, now_s, lines = RepeatFilter(EVERY_S, most), 0.0, []
    for after_s, template, level in records:
        now_s += after_s
        lines += repeats.filter(record(now_s, f"{template}: %s", level=level), now_s)
        assert len(repeats._logged) <= most
    lines += repeats.flush()
    assert sum(1 + more for _, more in summarized(lines)) == len(records)


def logged(formatter: logging.Formatter) -> tuple[logging.Logger, LogHandler, io.StringIO]:
    stream = io.StringIO()
    handler = LogHandler(stream, RepeatFilter(EVERY_S))
    handler.setFormatter(formatter)
    logger = logging.Logger("services.some")
    logger.addHandler(handler)
    return logger, handler, stream


def test_json_line_has_all_known_fields():
    logger, handler, stream = logged(JsonLines("worker"))
    logger.info("up in %.1f s: %s", 1.25, "Zürich\nand more")
    logger.warning("late", extra={"request_id": "r-1", "trace_id": "ab" * 16})
    for _ in range(4):
        logger.warning("late", extra={"request_id": "r-2"})
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("it broke")
    handler.close()
    first, late, broke, more = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time")[10] == "T"
    assert first == {
        "level": "INFO", "service": "worker", "logger": "services.some",
        "message": "up in 1.2 s: Zürich\nand more",
    }  # fmt: skip
    assert (late["request_id"], late["trace_id"], "repeated" in late) == ("r-1", "ab" * 16, False)
    assert broke["exception"].endswith("ValueError: bad")
    assert (more["message"], more["repeated"], more["request_id"]) == ("late", 3, "r-2")


def test_text_line_has_its_context():
    logger, handler, stream = logged(TextLines("gateway"))
    logger.info("listening on %s", "x")
    for request_id in ("1", "2", "3"):
        logger.warning("slow", extra={"request_id": request_id})
    handler.close()
    first, second, third = stream.getvalue().splitlines()
    assert first.endswith(" gateway INFO services.some: listening on x")
    assert second.endswith(" gateway WARNING services.some: slow [request_id=1]")
    assert third.endswith(": slow (and 1 more like it) [request_id=3]")


async def test_log_lines_carry_the_task_s_context():
    logger, _, stream = logged(JsonLines("gateway"))
    add_log_context(trace_id="cd" * 16)
    add_log_context(request_id="call-7")
    logger.info("inside")
    logger.info("another's", extra={"request_id": "call-8"})
    inside, other = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (inside["request_id"], inside["trace_id"]) == ("call-7", "cd" * 16)
    assert other["request_id"] == "call-8"


async def test_log_context_is_per_task():
    logger, _, stream = logged(JsonLines("gateway"))
    logger.info("outside")
    assert "request_id" not in json.loads(stream.getvalue())


REPEATING = """
import logging
from observability.logs import set_up_logging
set_up_logging("worker", "INFO", "json")
for number in range(1_000):
    logging.getLogger("x").warning("gone", extra={"request_id": str(number)})
"""


def test_pending_counts_are_logged_at_exit():
    command = [sys.executable, "-c", REPEATING]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, last = (json.loads(line) for line in ended.stderr.splitlines())
    assert (first["request_id"], "repeated" in first) == ("0", False)
    assert (last["request_id"], last["repeated"]) == ("999", 998)


@pytest.mark.slow
@pytest.mark.parametrize("lines", ["xml", ""])
def test_unknown_log_format_is_a_one_line_error(lines: str) -> None:
    command = [sys.executable, "-m", "services.batcher", "--set", f"logging.format={lines}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("foretoken batcher: logging.format: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "others", "apart"),
    [
        ("%s", (("one",), ("two",)), True),
        ("gone: %s", (("one",), ("two",)), True),
        ("gone: %s", (("one",), ("one",)), False),
        ("gone: %s", (("o" * 2_000,), ("o" * 2_000 + "!",)), False),  # equal in the first MAX_CHARS
    ],
)
def test_other_words_are_a_different_warning(
    template: str, others: tuple[tuple[object, ...], ...], apart: bool
) -> None:
    repeats, lines = RepeatFilter(EVERY_S), []
    for args in others:
        made = record(0, template)
        made.args = args
        lines += repeats.filter(made, 0)
    assert len(lines) == (2 if apart else 1)


def test_distinguished_warnings_per_format_are_bounded() -> None:
    repeats, lines = RepeatFilter(EVERY_S), []
    for number in range(MAX_SIMILAR + 5):
        made = record(0, "gone: %s", number)
        made.args = (number,)
        lines += repeats.filter(made, 0)
    assert len(lines) == MAX_SIMILAR + 1  # the last one summarizes all others
    assert [each.__dict__["repeated"] for each in repeats.flush()] == [3]
    assert not repeats._similar_counts


def broken(at_s: float, name: str) -> logging.LogRecord:
    """A KeyError, raised in another line for each name."""
    made = record(at_s, "request %s failed", level=ERROR)
    made.args = (name,)
    try:
        if name == "a":
            raise KeyError("one")
        raise KeyError("two")
    except KeyError:
        made.exc_info = sys.exc_info()
    return made


def test_exceptions_from_other_lines_are_different_warnings() -> None:
    repeats = RepeatFilter(EVERY_S)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines("worker"))
    names = ("a", "b", "a", "a")
    for at_s, name in enumerate(names):
        for each in repeats.filter(broken(at_s, name), at_s):
            handler.emit(each)
    assert stream.getvalue().count("Traceback") == 2
    [summary] = repeats.due(EVERY_S + 0.5)
    assert summary.__dict__["repeated"] == 1 and "KeyError: 'one'" in (summary.exc_text or "")
    handler.setFormatter(JsonLines("worker"))
    handler.emit(summary)
    assert "KeyError: 'one'" in json.loads(stream.getvalue().splitlines()[-1])["exception"]


def test_wall_clock_that_jumps_back_delays_no_summary() -> None:
    repeats = RepeatFilter(EVERY_S)
    assert len(repeats.filter(record(86_400), 0.0)) == 1
    assert repeats.filter(record(1), 1.0) == []
    assert len(repeats.due(EVERY_S)) == 1


def test_count_is_logged_without_another_record() -> None:
    stream = io.StringIO()
    handler = LogHandler(stream, RepeatFilter(0.3))
    handler.setFormatter(TextLines("worker"))
    logger = logging.Logger("services.some")
    logger.addHandler(handler)
    for _ in range(2):  # a timer starts for each summary
        before = stream.getvalue().count("more like it)")
        for _ in range(4):
            logger.warning("late")
        wait_for(lambda before=before: stream.getvalue().count("more like it)") > before)  # type: ignore[misc]  # mypy infers no default
    handler.close()


def test_malformed_record_does_not_break_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logger, handler, stream = logged(TextLines("worker"))
    logger.warning("gone: %d %d", 1)
    logger.warning("fine")
    handler.close()
    assert "--- Logging error ---" in capsys.readouterr().err
    assert stream.getvalue().count("\n") == 1


def test_log_context_ends_with_its_block() -> None:
    logger, _, stream = logged(JsonLines("scheduler"))
    with log_context("r-1", f"00-{'ab' * 16}-{'cd' * 8}-01"):
        logger.info("inside")
        with log_context("r-2", ""):
            logger.info("deeper")
    logger.info("outside")
    inside, deeper, outside = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (inside["request_id"], inside["trace_id"]) == ("r-1", "ab" * 16)
    assert (deeper["request_id"], deeper["trace_id"]) == ("r-2", "ab" * 16)
    assert "request_id" not in outside and "trace_id" not in outside


@pytest.mark.parametrize("traceparent", ["", "nonsense", "00-ab-cd-01", "#1"])
def test_invalid_traceparent_has_no_trace_id(traceparent: str) -> None:
    assert trace_id_of(traceparent) == ""
