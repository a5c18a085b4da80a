"""Resolves an id that a client knows to the stories of its requests."""

from collections.abc import Sequence
from itertools import islice

from services.runtime.errors import Code, InvalidArgument, ServiceError
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.story import Story
from services.scheduler.observe.story_recorder import StoryRecorder

PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # of ids in answers over HTTP
MIN_CHARS = 4  # of an abbreviated id
MAX_NAMED = 5  # ids listed in an error
MAX_STORIES = 256  # per answer: the choices of one call, and their submissions


def call_id(request_id: str) -> str:
    """A gateway names a choice `call-index`, and a resubmission of it `call-index~number`."""
    return request_id.rpartition("-")[0] or request_id


def find_stories(client_id: str, recorder: StoryRecorder, state: SchedulerState) -> Sequence[Story]:
    """The stories of one call or one choice, by its id or an unambiguous beginning of it. Raises
    ServiceError if there is none, or if several calls match."""
    name = client_id.strip()
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    store = recorder.store
    if len(name) < MIN_CHARS and not store.knows(name):
        raise InvalidArgument("request_id", f"give at least {MIN_CHARS} characters of it")
    found = [name] if store.knows(name) else store.ids(name)
    calls = list(dict.fromkeys(call_id(each) for each in found))
    if name in calls:
        found = [each for each in found if call_id(each) == name]
    elif len(calls) > 1:
        listed = ", ".join(islice(calls, MAX_NAMED)) + (", …" if len(calls) > MAX_NAMED else "")
        raise InvalidArgument("request_id", f"{len(calls)} requests begin with {name!r}: {listed}")
    every = (recorder.story(each, state) for each in sorted(found)[:MAX_STORIES])
    stories = [story for story in every if story]
    if not stories:
        raise ServiceError(Code.NOT_FOUND, _not_found(client_id, recorder))
    return stories


def _not_found(client_id: str, recorder: StoryRecorder) -> str:
    store = recorder.store
    message = (
        f"no request {client_id[:80]!r} is remembered: {len(store.live)} are live, and "
        f"{store.kept_count} of the {store.ended_count} that have ended are kept"
    )
    if store.ended_count > store.kept_count:
        message += "; scheduler.story_requests sets how many"
    return message
