"""Stored responses: by owner, within a number and a size, shared by processes."""

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gateway.faces.http.responses.store import Entry, ResponseStore, StoredResponse
from services.runtime.config import ConfigError

LARGE = 2**30


def response(name: str, text: str = "", running: bool = False) -> StoredResponse:
    status = "in_progress" if running else "completed"
    content: Entry = {"id": name, "status": status, "text": text, "output": []}
    return StoredResponse(name, "me", content, [{"role": "user", "content": "é"}], running)


def kept(store: ResponseStore, names: str) -> str:
    return "".join(name for name in names if store.find(name, "me"))


def test_store_finds_a_response_of_its_owner_only() -> None:
    store = ResponseStore("", 10, LARGE)
    store.keep(response("a"))
    assert store.find("a", "me") == response("a")
    assert store.find("a", "") is None and store.find("b", "me") is None
    assert not store.delete("a", "") and store.delete("a", "me")
    assert not store.delete("a", "me") and store.find("a", "me") is None


def test_store_drops_the_responses_that_were_used_longest_ago() -> None:
    store = ResponseStore("", 3, LARGE)
    store.keep(response("a", running=True))
    for name in "bc":
        store.keep(response(name))
    assert store.find("b", "me")
    store.keep(response("d"))
    assert kept(store, "abcd") == "abd", "c was used before b, and a still runs"
    assert not kept(ResponseStore("", 0, LARGE), "a")


def test_store_holds_its_size() -> None:
    size = len(json.dumps(response("a", "x" * 1000).content))
    store = ResponseStore("", 100, 3 * size)
    for name in "abcdef":
        store.keep(response(name, "x" * 1000))
    assert kept(store, "abcdef") == "ef"
    store.keep(response("g", "x" * 4 * size))
    assert kept(store, "efg") == "", "what is larger than the store is not kept, and clears it"


def test_finished_response_is_not_kept_once_deleted() -> None:
    store = ResponseStore("", 10, LARGE)
    for name in "ab":
        store.keep(response(name, running=True))
    store.delete("a", "me")
    for name in "ab":
        store.finish(response(name, "done"))
    assert store.find("a", "me") is None
    assert store.find("b", "me") == response("b", "done")


def test_processes_share_a_file(tmp_path: Path) -> None:
    file = str(tmp_path / "responses.db")
    first, second = ResponseStore(file, 10, LARGE, "g0"), ResponseStore(file, 10, LARGE, "g1")
    for name in "abc":
        first.keep(response(name, running=True))
    second.keep(response("d", running=True))
    assert first.shared and second.find("a", "me") == response("a", running=True)
    second.cancel("a")
    second.delete("b", "me")
    assert first.wanted() == {"c", "d"}
    restarted = ResponseStore(file, 10, LARGE, "g0")
    found = restarted.find("c", "me")
    assert found is not None and not found.running
    assert found.content["status"] == "failed" and "restarted" in json.dumps(found.content)
    assert restarted.wanted() == {"d"}


def test_find_does_not_wait_for_a_process_that_writes(tmp_path: Path) -> None:
    file = str(tmp_path / "responses.db")
    store = ResponseStore(file, 10, LARGE)
    store.keep(response("a"))
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(1) as pool:
        keeping = pool.submit(store.keep, response("b"))
        assert store.find("a", "me") == response("a") and store.find("b", "me") is None
        other.execute("COMMIT")
        keeping.result()
    other.close()
    assert kept(store, "ab") == "ab"


def test_unusable_file_is_a_config_error(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "none" / "responses.db"):
        with pytest.raises(ConfigError, match="responses_file"):
            ResponseStore(str(file), 10, LARGE)
