"""Start of a process: imports without garbage collection, and durations of its parts."""

import gc
import subprocess
import sys
import time
import weakref

import pytest

from services.runtime.startup import (
    RARE_COLLECTIONS,
    Laps,
    frozen_start,
    importing,
    process_age_s,
    rare_collections,
)


@pytest.fixture(autouse=True)
def thawed():
    yield
    gc.unfreeze()
    gc.enable()


def test_importing_disables_collection_and_freezes_objects():
    frozen = gc.get_freeze_count()
    with importing():
        assert not gc.isenabled()
        kept: list[list[int]] = [[] for _ in range(1_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + len(kept)


def test_failed_import_restores_collection():
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_importing_keeps_disabled_collection_disabled():
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()


def test_objects_of_the_start_are_frozen_until_the_end_of_the_block():
    kept: list[list[int]] = [[] for _ in range(1_000)]
    with frozen_start():
        assert gc.get_freeze_count() >= len(kept)
    assert gc.get_freeze_count() == 0


def test_cycles_of_the_start_are_freed_before_the_rest_is_frozen():
    class Node:
        me: object

    node = Node()
    node.me = node
    freed = weakref.ref(node)
    gc.disable()
    del node
    with frozen_start():
        assert freed() is None


def test_rare_collections_end_with_the_block():
    before = gc.get_threshold()
    with pytest.raises(KeyError), rare_collections():
        assert gc.get_threshold() == RARE_COLLECTIONS
        raise KeyError
    assert gc.get_threshold() == before


def test_frozen_objects_are_thawed_at_exit():
    reported = run(
        "import atexit\n"
        "counts = [atexit._ncallbacks()]\n"
        "from services.runtime.startup import importing\n"
        "for _ in range(3):\n"
        "    counts.append(atexit._ncallbacks())\n"
        "    with importing():\n"
        "        pass\n"
        "print(*counts, atexit._ncallbacks())\n"
    )
    before, *after = map(int, reported.split())
    assert after == [before, before + 1, before + 1, before + 1]


def test_laps_are_reported_in_order():
    now = iter([10.0, 12.5, 12.54, 15.5])
    laps = Laps(lambda: next(now))
    for name in ("imports", "model", "kernels loaded"):
        laps.lap(name)
    assert str(laps) == "imports 2.5 s, model 0.0 s, kernels loaded 3.0 s"
    assert str(Laps()) == ""


def test_process_age_counts_from_the_process_start():
    began_s = time.monotonic()
    reported = run("from services.runtime.startup import process_age_s; print(process_age_s())")
    tick_s = 0.02
    assert 0 < float(reported) <= time.monotonic() - began_s + tick_s
    assert process_age_s() >= float(reported)


@pytest.mark.parametrize(
    ("module", "later"),
    [
        ("services.worker.__main__", {"torch", "transformers", "numba"}),
        ("foretoken.running.embedded", {"fastapi", "scipy", "transformers", "gateway.gateway"}),
    ],
)
def test_heavy_imports_follow_config_validation(module: str, later: set[str]):
    imported = run(f"import sys, {module}; print(*sys.modules)").split()
    assert module in imported
    assert not later & set(imported)


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
