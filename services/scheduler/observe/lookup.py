"""Which requests somebody means who asks why, by the id that a client was told."""

from collections.abc import Sequence
from itertools import islice

from services.runtime.errors import Code, InvalidArgument, ServiceError
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.story import Story
from services.scheduler.observe.story_recorder import StoryRecorder

SPELLED = ("chatcmpl-", "cmpl-")  # what OpenAI's endpoints put before the id of a call
LEAST_CHARS = 4  # of a beginning: fewer say nothing
MOST_NAMED = 5
MOST_STORIES = 256  # in one answer: of the choices of one call, and their submissions


def call_id(request_id: str) -> str:
    """A gateway names a choice `call-index`, and submits it again as `call-index~again`."""
    return request_id.rpartition("-")[0] or request_id


def find_stories(asked: str, recorder: StoryRecorder, state: SchedulerState) -> Sequence[Story]:
    """The stories of one call or one choice. Raises ServiceError, with a sentence, for none and
    for an id that several calls begin with."""
    name = asked.strip()
    for prefix in SPELLED:
        name = name.removeprefix(prefix)
    if len(name) < LEAST_CHARS and not recorder.store.knows(name):
        raise InvalidArgument("request_id", f"give at least {LEAST_CHARS} characters of it")
    found = [name] if recorder.store.knows(name) else recorder.store.ids(name)
    calls = list(dict.fromkeys(call_id(each) for each in found))
    if name in calls:
        found = [each for each in found if call_id(each) == name]
    elif len(calls) > 1:
        listed = ", ".join(islice(calls, MOST_NAMED)) + (", …" if len(calls) > MOST_NAMED else "")
        raise InvalidArgument("request_id", f"{len(calls)} requests begin with {name!r}: {listed}")
    told = (recorder.story(each, state) for each in sorted(found)[:MOST_STORIES])
    stories = [story for story in told if story]
    if not stories:
        raise ServiceError(Code.NOT_FOUND, _nobody(asked, recorder))
    return stories


def _nobody(asked: str, recorder: StoryRecorder) -> str:
    said = (
        f"no request {asked[:80]!r} is remembered: {len(recorder.store.live)} are live, and "
        f"{recorder.store.kept_count} of the {recorder.store.ended_count} that have ended are kept"
    )
    if recorder.store.ended_count > recorder.store.kept_count:
        said += "; scheduler.story_requests sets how many"
    return said
