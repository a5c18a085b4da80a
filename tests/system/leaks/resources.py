"""What a running system holds: descriptors, tasks, KV blocks, memory and entries of tables."""

import asyncio
import os
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path

from foretoken.running.embedded import Endpoints
from tests.system.children import children

OWN = ("gateway.", "services.")  # packages of the objects with tables
CHILDREN = ("services.worker", "services.predictor")
GAUGES = re.compile(
    r"^foretoken_((?:num_requests_running|num_requests_waiting|kv_blocks)"
    r"(?:\{.*\})?) (\S+)$",
    re.MULTILINE,
)
SHARED = ("cached", "free")  # states of KV blocks that prefixes of ended requests change
# Bounded tables that fill up: memories of ended requests, windows of measurements and caches.
BOUNDED = frozenset(
    (
        "LengthWindow._cut", "LengthWindow._tokens", "OpenStory.chapters",
        "OutcomeHistory._outcomes", "PrefixIndex._hashes", "RetryBudget._submitted",
        "Second.requests", "Second.tokens", "SlaWindow._requests", "SlaWindow._seconds",
        "SlaWindow._tokens", "StoryStore._ended", "StoryStore._refused",
    )
)  # fmt: skip


def processes() -> dict[str, int]:
    """Ids by module; "" is this process."""
    found = {f"{name} {n}": pid for name in CHILDREN for n, pid in
             enumerate(children(os.getpid(), name))}  # fmt: skip
    return {"": os.getpid(), **found}


def count_descriptors() -> dict[str, int]:
    return {name: len([*Path(f"/proc/{pid}/fd").iterdir()]) for name, pid in processes().items()}


def count_tasks() -> Counter[str]:
    """Of this process, by the name of their coroutine."""
    coroutines = (task.get_coro() for task in asyncio.all_tasks())
    return Counter(f"tasks {getattr(each, '__qualname__', each)}" for each in coroutines)


def measure_memory() -> dict[str, int]:
    """Resident KiB of each process."""
    sizes = {}
    for name, pid in processes().items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes[name] = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return sizes


def count_tables(system: Endpoints) -> dict[str, int]:
    """The entries of all containers that the control plane's objects hold, summed by class and
    attribute. O(entries)."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: deque[object] = deque([system.control.scheduler, system.control.front])
    while waiting:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _attributes(each):
            if isinstance(value, dict | list | set | deque):
                sizes[f"{type(each).__name__}.{name}"] += len(value)
                inner = value.values() if isinstance(value, dict) else value
                waiting.extend(x for x in list(inner) if _is_own(x))
            elif _is_own(value):
                waiting.append(value)
    return dict(sizes)


def _is_own(value: object) -> bool:
    return type(value).__module__.startswith(OWN)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    names = {name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())}
    names |= getattr(value, "__dict__", {}).keys()
    for name in names - {"__dict__", "__weakref__"}:
        if name.startswith("__") or not hasattr(value, name):
            continue
        yield name, getattr(value, name)


async def count_resources(system: Endpoints) -> dict[str, float]:
    """All counts that are equal whenever the system is idle."""
    text = await system.control.front.aggregator.text([])
    found = GAUGES.findall(text.decode())
    gauges = {
        name: float(value)
        for name, value in found
        if not any(f'state="{state}"' in name for state in SHARED)
    }
    tables = {k: v for k, v in count_tables(system).items() if k not in BOUNDED}
    descriptors = {f"descriptors {name}": n for name, n in count_descriptors().items()}
    return {**gauges, **tables, **descriptors, **count_tasks()}


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, str]:
    """The counts that differ."""
    names = sorted(before.keys() | after.keys())
    pairs = {name: (before.get(name, 0), after.get(name, 0)) for name in names}
    return {name: f"{a:g} -> {b:g}" for name, (a, b) in pairs.items() if a != b}
