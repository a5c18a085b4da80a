"""Replays an event log: rebuilds the state, the stories and the SLA verdicts of the run."""

from dataclasses import dataclass
from pathlib import Path

from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.event_log import Head, read, read_head
from services.scheduler.observe.replay_sla import ReplayJudge
from services.scheduler.observe.story_recorder import StoryRecorder


@dataclass(frozen=True)
class ReplayedRun:
    """`differing` of the `steps` gave other actions than the log has, for example because another
    version wrote it. The stories then describe what this version would do."""

    head: Head
    state: SchedulerState
    recorder: StoryRecorder
    judge: ReplayJudge
    steps: int
    differing: int


def replay(path: Path, max_ended: int) -> ReplayedRun:
    """Raises ValueError for a file that is not an event log, and OSError."""
    head = read_head(path)
    state = SchedulerState(head.preset, head.limits, head.apart)
    recorder, judge = StoryRecorder(max_ended), ReplayJudge()
    steps = differing = 0
    for logged in read(path):
        step = state.try_step(logged.event, logged.now)
        recorder.observe(step, state)
        judge.observe(step)
        steps += 1
        differing += step.actions != logged.actions
    return ReplayedRun(head, state, recorder, judge, steps, differing)
