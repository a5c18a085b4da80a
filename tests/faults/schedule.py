"""When which fault hits which process: a function of a seed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from random import Random

SHORTEST_S = 0.2
# A supervisor gives up a process that ends often, so that each has time between two of its ends.
REST_S = 90.0
ENDING = ("kill", "terminate")  # faults that end the process


@dataclass(frozen=True)
class Injection:
    """A fault that begins at `at_s`. One that does not end by itself is healed after `hold_s`."""

    at_s: float
    fault: str
    target: str
    hold_s: float


def schedule(
    seed: int, targets: Mapping[str, Sequence[str]], longest_s: float, pause_s: float
) -> Iterator[Injection]:
    """Yields injections without end, in the order of their times. `targets` lists those of a fault.

    Every fault with a free target comes once before any comes again. A target is free once its last
    fault is healed, and for another end after REST_S. Most faults are short: hold_s is log-uniform
    up to longest_s. `pause_s` lies between the beginnings of two faults, on average.
    """
    chance, at_s = Random(seed), 0.0
    free_s: dict[tuple[bool, str], float] = {}
    while True:
        for fault in chance.sample(sorted(targets), len(targets)):
            at_s += chance.uniform(0.2, 1.8) * pause_s
            ends = fault in ENDING
            free = [
                each
                for each in targets[fault]
                if free_s.get((False, each), 0.0) <= at_s
                and not (ends and free_s.get((True, each), 0.0) > at_s)
            ]
            if not free:
                continue
            target = chance.choice(free)
            hold_s = SHORTEST_S * 2 ** chance.uniform(0.0, log(longest_s / SHORTEST_S, 2))
            free_s[False, target] = at_s + hold_s
            if ends:
                free_s[True, target] = at_s + REST_S
            yield Injection(at_s, fault, target, hold_s)
