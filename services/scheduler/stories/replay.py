"""A run's event log, run again: its state and its stories as they were."""

from dataclasses import dataclass
from pathlib import Path

from services.scheduler.state import SchedulerState
from services.scheduler.stories.eventlog import Head, read, read_head
from services.scheduler.stories.judge import Judge
from services.scheduler.stories.teller import Teller


@dataclass(frozen=True)
class Replayed:
    """`differing` of the `steps` came out otherwise than was written: by another version of
    policies, say. What is told is then what would happen here."""

    head: Head
    state: SchedulerState
    teller: Teller
    judge: Judge
    steps: int
    differing: int


def replay(path: Path, ended_most: int) -> Replayed:
    """Raises ValueError for a file that is none of ours, and OSError."""
    head = read_head(path)
    state = SchedulerState(head.preset, head.limits, head.apart)
    teller, judge = Teller(ended_most), Judge()
    steps = differing = 0
    for entry in read(path):
        actions = state.step(entry.event, entry.now)
        teller.tell(entry.event, entry.now, actions, state)
        judge.hear(entry.event, entry.now, actions)
        steps += 1
        differing += actions != entry.actions
    return Replayed(head, state, teller, judge, steps, differing)
