"""Priority levels, applied before any order, for all orders and arrangements."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from services.forecast import Ints
from services.policies.order.ranking import Ranking


def rank_by_priority(ranking: Ranking, priority: Ints) -> Ranking:
    """The same ranking with every request of a lower priority value ahead of every higher one.
    Within a level nothing changes. `priority` is the board's column. Requests that cannot be
    preempted remain so. With equal priorities it returns the ranking itself: one comparison per
    job, no copy.

    Waiting does not lift a request over a better level. O(jobs log jobs) if levels differ.
    """
    level = priority[ranking.rows]
    if not len(level) or (level == level[0]).all():
        return ranking
    nth = np.unique(level, return_inverse=True)[1]
    both = np.concatenate([ranking.key, ranking.queue_key])
    # keys and queue keys are compared with each other
    place = np.unique(both, return_inverse=True)[1].astype(float)
    key = place[: len(level)] + nth * float(len(both))
    queue_key = place[len(level) :] + nth * float(len(both))
    return replace(
        ranking,
        key=key,
        queue_key=np.where(np.isneginf(ranking.queue_key), -np.inf, queue_key),
        lift_s=np.where(nth > 0, np.inf, ranking.lift_s),
    )


def split_by_priority(at: Ints, priority: Ints) -> Iterator[Ints]:
    """The positions of each priority, lowest first, in their given order."""
    level = priority[at]
    for each in np.unique(level).tolist():
        yield at[level == each]
