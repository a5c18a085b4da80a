"""A run's event log, run again: its state and its stories as they were."""

from dataclasses import dataclass
from pathlib import Path

from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.event_log import Head, read, read_head
from services.scheduler.observe.replay_sla import ReplayJudge
from services.scheduler.observe.story_recorder import StoryRecorder


@dataclass(frozen=True)
class ReplayedRun:
    """`differing` of the `steps` came out otherwise than was written: by another version of
    policies, say. What is told is then what would happen here."""

    head: Head
    state: SchedulerState
    recorder: StoryRecorder
    judge: ReplayJudge
    steps: int
    differing: int


def replay(path: Path, ended_most: int) -> ReplayedRun:
    """Raises ValueError for a file that is none of ours, and OSError."""
    head = read_head(path)
    state = SchedulerState(head.preset, head.limits, head.apart)
    recorder, judge = StoryRecorder(ended_most), ReplayJudge()
    steps = differing = 0
    for entry in read(path):
        actions = state.step(entry.event, entry.now)
        recorder.tell(entry.event, entry.now, actions, state)
        judge.hear(entry.event, entry.now, actions)
        steps += 1
        differing += actions != entry.actions
    return ReplayedRun(head, state, recorder, judge, steps, differing)
