"""What is asked, the same for one seed."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from foretoken.bench.lengths import parse_lengths
from foretoken.bench.prompts import Prompt, TokenScale, demo_tasks, from_file, synthetic


def test_seed_determines_the_requests() -> None:
    draw = parse_lengths("5-50", "-")
    prompts = synthetic(draw, draw, TokenScale(), ("a", "b"), chat=True)
    one, same, other = (list(islice(prompts(Random(seed)), 9)) for seed in (1, 1, 2))
    assert one == same != other
    assert len({p.messages[0]["content"] for p in one}) == 9


@pytest.mark.parametrize(
    ("few", "many", "tokens", "words"),
    [
        ((10, 25), (110, 225), 105, 50),  # 2 a word, 5 around
        ((10, 10), (110, 110), 64, 64),
        ((10, 25), (110, 225), 3, 1),  # less than what is around: one word
        ((10, 0), (110, 0), 13, 10),  # no usage: 1.3 tokens per word
        ((10, 20), (110, 20), 13, 10),
    ],
)
def test_token_scale_converts_tokens_to_words(
    few: tuple[int, int], many: tuple[int, int], tokens: int, words: int
) -> None:
    assert TokenScale.from_probes(few, many).words_for(tokens) == words


def test_file_prompts_repeat(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}], "max_tokens": 3}\n'
    )
    found = list(islice(from_file(file, None, chat=True)(Random(0)), 4))
    assert found[:2] == found[2:]
    wanted = [
        Prompt(None, [{"role": "user", "content": "a"}], None),
        Prompt(None, [{"role": "user", "content": "b"}], 3),
    ]
    assert sorted(found[:2], key=str) == sorted(wanted, key=str)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": 1}',
        '{"prompt": "a", "messages": []}',
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": "a", "max_tokens": 0}',
        '{"prompt": "a", "max_tokens": "9"}',
    ],
)
def test_invalid_prompt_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"f.jsonl, line 2: expected a JSON object with `prompt`"):
        from_file(file, None, chat=True)


def test_file_without_prompts_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    with pytest.raises(ValueError, match="cannot read"):
        from_file(file, None, chat=True)
    file.write_text("\n")
    with pytest.raises(ValueError, match="contains no prompt"):
        from_file(file, None, chat=True)
    file.write_text('{"messages": [{"role": "user", "content": "b"}]}')
    with pytest.raises(ValueError, match="line 1: has `messages`; use --endpoint chat"):
        from_file(file, None, chat=False)


@pytest.mark.parametrize("chat", [True, False])
def test_demo_tasks_match_the_endpoint(chat: bool) -> None:
    for prompt in islice(demo_tasks(chat, 99)(Random(0)), 20):
        assert (prompt.prompt is None) == chat == bool(prompt.messages)
        assert prompt.max_tokens == 99
