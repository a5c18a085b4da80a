"""Levels of priority, in front of whatever an order says: one place for all orders and
arrangements."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from services.forecast import Ints
from services.policies.order.ranking import Ranking


def rank_by_priority(ranking: Ranking, priority: Ints) -> Ranking:
    """The same ranking with everybody of a lower priority ahead of everybody of a higher one, and
    within one exactly as it was; `priority` is the jobs' column. Who makes way for nobody still
    does not. Where all are equal, it is the ranking itself: one comparison a job, no copy.

    Waiting alone brings nobody of a later level to the front. O(jobs log jobs) where levels differ.
    """
    level = priority[ranking.rows]
    if not len(level) or not np.any(level != level[0]):
        return ranking
    nth = np.unique(level, return_inverse=True)[1]
    both = np.concatenate([ranking.key, ranking.queue_key])
    place = np.unique(both, return_inverse=True)[1].astype(float)  # keys and lines are compared
    key = place[: len(level)] + nth * float(len(both))
    line = place[len(level) :] + nth * float(len(both))
    return replace(
        ranking,
        key=key,
        queue_key=np.where(np.isneginf(ranking.queue_key), -np.inf, line),
        lift_s=np.where(nth > 0, np.inf, ranking.lift_s),
    )


def split_by_priority(at: Ints, priority: Ints) -> Iterator[Ints]:
    """These positions by their priority, the lower first, in their order within one."""
    level = priority[at]
    for each in np.unique(level).tolist():
        yield at[level == each]
