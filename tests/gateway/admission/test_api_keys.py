"""Stored keys, key files, and a keyring with a file that changes."""

import logging
import os
from hashlib import sha256
from pathlib import Path

import pytest

from gateway.admission.keyring import Keyring
from gateway.config import GatewayConfig
from gateway.types.api_keys import (
    KeyFault,
    NamedHash,
    Unauthenticated,
    find_name,
    hash_key,
    mask_key,
    name_keys,
    new_key,
    parse_bearer,
    read_key_file,
)
from services.runtime.config import ConfigError, load

HASH = sha256(b"secret").hexdigest()


def test_new_key_is_random_and_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("ft-") and len(key) == 46 for key in keys)


def test_key_hash_is_sha256_in_hex() -> None:
    assert hash_key("secret") == HASH


@pytest.mark.parametrize(
    ("key", "reported"),
    [("", "****"), ("short", "****"), ("elevenchars", "****"), ("sk-0123456789abcd", "****abcd")],
)
def test_masked_key_shows_at_most_its_end(key: str, reported: str) -> None:
    assert mask_key(key) == reported


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("BEARER a b", "a b"), ("abc", ""),
        ("Basic abc", ""), ("", ""), ("Bearer", ""), ("Bearer ", ""),
    ],
)  # fmt: skip
def test_bearer_key_is_parsed(header: str, key: str) -> None:
    assert parse_bearer(header) == key


def test_key_file_is_parsed() -> None:
    text = f"# ours\n\nalice:{HASH}\nbob : {HASH.upper()}  # until May\n"
    assert read_key_file(text) == [NamedHash("alice", HASH), NamedHash("bob", HASH)]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (HASH, "line 1: must be name:hash"),
        (f"\n:{HASH}", "line 2: must be name:hash"),
        (f"al ice:{HASH}", "line 1: must be name:hash"),
        (f"{'a' * 65}:{HASH}", "line 1: must be name:hash"),
        ("alice:secret", "line 1: the hash of alice must be 64 hex digits"),
        (f"alice:{HASH[:-1]}g", "line 1: the hash of alice must be 64 hex digits"),
    ],
)
def test_invalid_key_file_line_is_an_error(text: str, fault: str) -> None:
    with pytest.raises(KeyFault, match=f"^{fault}") as caught:
        read_key_file(text)
    assert HASH not in str(caught.value) and "secret" not in str(caught.value)


def test_configured_keys_are_named_by_their_hash() -> None:
    kept = name_keys(["secret", "other"])
    assert [each.name for each in kept] == [f"key-{HASH[:8]}", f"key-{hash_key('other')[:8]}"]
    assert (find_name("secret", kept), find_name("Secret", kept)) == (f"key-{HASH[:8]}", "")
    assert HASH not in repr(kept)


@pytest.mark.parametrize("key", ["", " ", " secret", "secret\n"])
def test_invalid_configured_key_is_an_error_without_the_key(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^gateway\.api_keys: an API key is empty, or") as caught:
        Keyring(["good", key])
    assert "secret" not in str(caught.value)


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_keyring_without_keys_accepts_every_request() -> None:
    ring = Keyring()
    assert (ring.required, ring.check(""), ring.check("any")) == (False, "", "")


def test_wrong_key_error_shows_only_its_end() -> None:
    ring = Keyring(["secret"])
    for key, message in (
        ("", "You didn't provide an API key"),
        ("sk-0123456789abcd", r"Incorrect API key provided: \*\*\*\*abcd\."),
    ):
        with pytest.raises(Unauthenticated, match=message) as caught:
            ring.check(key)
        assert "0123" not in str(caught.value)


def write(path: Path, text: str, at_s: int) -> None:
    path.write_text(text)
    os.utime(path, (at_s, at_s))


def test_changed_key_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, clock = tmp_path / "keys", FakeClock()
    write(path, f"alice:{HASH}", 1)
    ring = Keyring(["own-key"], str(path), clock)
    own = f"key-{hash_key('own-key')[:8]}"
    assert (ring.check("secret"), ring.check("own-key")) == ("alice", own)

    write(path, f"alice:{hash_key('new')}\nalice:{HASH}", 2)
    with pytest.raises(Unauthenticated):
        ring.check("new")  # the file is not read again yet
    clock.now_s = 1.0
    assert (ring.check("new"), ring.check("secret")) == ("alice", "alice")

    write(path, f"bob:{hash_key('new')}", 3)
    clock.now_s = 2.0
    assert (ring.check("new"), ring.check("own-key")) == ("bob", own)
    with pytest.raises(Unauthenticated):
        ring.check("secret")
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


def test_broken_key_file_keeps_the_keys_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys", FakeClock()
    write(path, f"alice:{HASH}", 1)
    ring = Keyring([], str(path), clock)
    write(path, "nonsense", 2)
    for second in range(1, 5):
        clock.now_s = float(second)
        assert ring.check("secret") == "alice"
    path.unlink()
    for second in range(5, 9):
        clock.now_s = float(second)
        assert ring.check("secret") == "alice"
    reported = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(reported) == 2
    assert "line 1: must be name:hash" in reported[0] and "cannot be read" in reported[1]
    write(path, f"carol:{HASH}", 9)
    clock.now_s = 9.0
    assert ring.check("secret") == "carol"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "cannot be read: No such file"),
        (b"nonsense", "line 1: must"),
        (b"\xff", "is not a text file"),
    ],
)
def test_bad_key_file_at_start_is_a_config_error(
    content: bytes | None, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^gateway\.api_key_file: .*" + fault) as caught:
        Keyring([], str(path))
    assert "\n" not in str(caught.value)


def test_empty_key_file_refuses_every_request(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")
    ring = Keyring([], str(path))
    assert ring.required
    with pytest.raises(Unauthenticated):
        ring.check("any")


def test_config_validates_keys_and_file(tmp_path: Path) -> None:
    for given, line in (
        ({"api_keys": '["", "secret"]'}, "gateway.api_keys: an API key is empty"),
        ({"api_keys": ""}, "gateway.api_keys: an API key is empty"),
        ({"api_key_file": str(tmp_path / "none")}, "gateway.api_key_file: the file does not exist"),
        ({"shared_prefixes": "a, b c"}, "gateway.shared_prefixes: 'b c' is not a key's name"),
    ):
        with pytest.raises(ConfigError, match=line) as caught:
            load(GatewayConfig, given)
        assert "secret" not in str(caught.value)
    assert load(GatewayConfig, {"api_keys": "a, b"}).api_keys == ("a", "b")
    assert "secret" not in repr(load(GatewayConfig, {"api_keys": "secret"}))
