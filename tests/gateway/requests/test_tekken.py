"""A model that has its tokenizer only as Mistral's tekken.json."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from gateway.requests.text import TemplateError, Text
from services.runtime.config import ConfigError
from services.worker.folder import load_tokenizer

SPECIALS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
FILLED = 8  # specials with fillers
BYTES = [bytes([value]) for value in range(256)]
WORDS = [b"th", b"the", b" t", b" the"]
TEXT = "the cat é, the 😀!"
CHAT: Any = [{"role": "user", "content": "the"}]


def write_model(folder: Path, **changed: object) -> str:
    """A folder with a tokenizer of bytes and WORDS, in the format of Mistral's later models."""
    vocabulary = [
        {"rank": rank, "token_bytes": b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate([*BYTES, *WORDS])
    ]
    specials = [
        {"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(SPECIALS)
    ]
    size = FILLED + len(vocabulary)
    config = {
        "pattern": r" ?\p{L}+|\p{N}|\s+|[^\s\p{L}\p{N}]+", "num_vocab_tokens": len(vocabulary),
        "default_vocab_size": size, "default_num_special_tokens": FILLED, "version": "v7",
    }  # fmt: skip
    tekken = {"config": config, "vocab": vocabulary, "special_tokens": specials} | changed
    kept = {name: value for name, value in tekken.items() if value is not None}
    (folder / "tekken.json").write_text(json.dumps(kept))
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "eos_token_id": 2}))
    return str(folder)


def test_tekken_is_read_by_gateway_and_worker(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    text, backend = Text(folder), load_tokenizer(folder)
    ranks = [BYTES.index(b"t"), len(BYTES) + WORDS.index(b"the")]
    assert text.encode("the") == [1, FILLED + ranks[1]]
    assert text.encode("[INST]t[/INST]", add_special_tokens=False) == [3, FILLED + ranks[0], 4]
    ids = text.encode(TEXT)
    assert ids == backend.encode(TEXT).ids and text.decode(ids) == TEXT
    detokenizer = text.detokenizer()
    assert "".join(detokenizer.feed([each]) for each in ids) + detokenizer.flush() == TEXT
    assert text.eos_ids == {2} and text.token_bytes(ids[-1]) == b"!"


def test_tekken_uses_the_folder_s_chat_template(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    with pytest.raises(TemplateError, match=r"no chat template; .*foretoken\[mistral\]"):
        Text(folder).encode_chat(CHAT)
    template = "{{ bos_token }}[INST]{{ messages[0].content }}[/INST]"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert Text(folder).encode_chat(CHAT) == [1, 3, FILLED + len(BYTES) + 1, 4]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"vocab": 3}, "tekken.json cannot be read: "),
        ({"config": None}, "cannot be read: 'config'"),
    ],
)
def test_broken_tekken_is_a_config_error(tmp_path: Path, changed: Any, sentence: str) -> None:
    folder = write_model(tmp_path, **changed)
    with pytest.raises(ConfigError, match=f"gateway.model: .*{sentence}"):
        Text(folder)
    with pytest.raises(ValueError, match=f"worker.model: .*{sentence}"):
        load_tokenizer(folder)
