"""What an emulated engine reads of a model's folder."""

import json
from pathlib import Path
from shutil import copy

import pytest

from foretoken.running.emulation import chat_frame
from foretoken.running.options import demo_model
from gateway.requests.text import Text
from services.worker.emulation.vocabulary import Vocabulary

DEMO = Path(demo_model())
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] "
    "+ '\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}{% else %}{% set system = '' %}"
    "{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ system if loop.first "
    "else '' }}{{ m['content'].strip() }} [/INST]{% else %} {{ m['content'] }} {% endif %}"
    "{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}### {{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}### assistant\n"
)
CHATS = {
    "alone": [{"role": "user", "content": "Where is the station?"}],
    "after a system message": [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": " Where is the station?\n"},
    ],
    "later in a conversation": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! What do you need?"},
        {"role": "user", "content": "Where is the station?"},
    ],
}


ALONE, WITH_SYSTEM, LATER = CHATS


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        *(("", chat) for chat in CHATS),
        (LLAMA_2, ALONE),  # a system prompt is a part of its first user message
        (LLAMA_2, LATER),
        (NO_SYSTEM, ALONE),
        (NO_SYSTEM, LATER),
    ],
)
def test_last_user_message_is_found_in_a_prompt(tmp_path: Path, template: str, chat: str):
    file = ""
    if template:
        file = str(tmp_path / "template.jinja")
        Path(file).write_text(template)
    ids = Text(str(DEMO), file).encode_chat(CHATS[chat])
    vocabulary = Vocabulary(str(DEMO), chat_frame(str(DEMO), file))
    assert next(iter(vocabulary.texts(ids))) == "Where is the station?"


def test_whole_text_is_the_last_choice():
    text = Text(str(DEMO))
    vocabulary = Vocabulary(str(DEMO), chat_frame(str(DEMO)))
    assert list(vocabulary.texts(text.encode("Where is it? "))) == ["Where is it?"]
    assert list(Vocabulary(str(DEMO)).texts(text.encode("Where is it? "))) == ["Where is it?"]


def test_words_are_ordinary_tokens_with_a_text():
    vocabulary, text = Vocabulary(str(DEMO)), Text(str(DEMO))
    texts = [text.decode([token], skip_special_tokens=False) for token in vocabulary.words]
    assert len(texts) > 100
    assert all(each[0] == " " and each[1:].isalpha() and len(each) > 3 for each in texts)
    assert vocabulary.eos_ids == text.eos_ids and vocabulary.size == text.vocabulary_tokens


def test_tokenizer_without_words_has_other_ordinary_tokens(tmp_path: Path):
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    kept = dict(list(tokenizer["model"]["vocab"].items())[:200])
    tokenizer["model"] |= {"vocab": kept, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 7]}')
    vocabulary = Vocabulary(str(tmp_path))
    assert vocabulary.words and not {0, 1, 2, 3, 4, 7} & set(vocabulary.words)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "{}"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "", "config.json": "[]"}, "config.json is not a JSON object"),
        ({"tokenizer.json": "", "config.json": "{"}, "config.json cannot be read"),
        ({"tokenizer.json": "", "config.json": "{}"}, "names no eos_token_id"),
    ],
)
def test_unusable_folder_is_one_sentence(tmp_path: Path, files: dict[str, str], message: str):
    for name, content in files.items():
        if content:
            (tmp_path / name).write_text(content)
        else:
            copy(DEMO / name, tmp_path)
    with pytest.raises(ValueError, match=message):
        Vocabulary(str(tmp_path))
