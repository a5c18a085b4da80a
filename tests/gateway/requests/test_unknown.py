"""Unknown fields: logged once, limited, or refused with a suggestion."""

import logging

import pytest

from gateway.requests import unknown
from gateway.requests.unknown import UnknownFields
from services.runtime.errors import InvalidArgument

KNOWN = ("max_tokens", "temperature", "stop")


def test_unknown_field_is_logged_once_and_returned_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING, unknown.__name__):
        assert fields.handle(["max_token", "mood"], KNOWN) == "max_token, mood"
        assert fields.handle(["mood"], KNOWN) == "mood"
        assert fields.handle([], KNOWN) == ""
    assert [record.getMessage() for record in caplog.records] == [
        "requests contain the unknown field max_token, which is ignored; did you mean max_tokens?",
        "requests contain the unknown field mood, which is ignored",
    ]


def test_refused_unknown_field_has_a_suggestion() -> None:
    fields = UnknownFields(refuses=True)
    assert fields.handle([], KNOWN) == ""
    for name, sentence in (
        ("temprature", "temprature: unknown field; did you mean temperature?"),
        ("mood", "mood: unknown field"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            fields.handle([name], KNOWN)
        assert (caught.value.message, caught.value.field) == (sentence, name)


def test_unknown_field_names_are_sanitized_and_limited(caplog: pytest.LogCaptureFixture) -> None:
    fields = UnknownFields()
    assert fields.handle(["a\r\nb", "é", "x" * 100, "messages[].x"], KNOWN) == ", ".join(
        ["a??b", "?", "x" * 64, "messages[].x"]
    )
    named = fields.handle([f"f{at}" for at in range(20)], KNOWN)
    assert named.startswith("f0, f1, ") and named.endswith("f15, and 4 more")


def test_logged_names_are_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown, "MAX_LOGGED", 2)
    fields = UnknownFields()
    with caplog.at_level(logging.WARNING, unknown.__name__):
        for name in ("a", "b", "c", "a", "c"):
            fields.handle([name], KNOWN)
    assert len(caplog.records) == 2
