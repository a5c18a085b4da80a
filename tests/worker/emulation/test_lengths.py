"""Files of prompts and the lengths of their answers, and mistakes in them."""

import gzip
from pathlib import Path

import pytest

from services.worker.emulation.lengths import read_lengths

JSON = """{"id": 1, "prompt": " How are you? ", "output_tokens": 43, "model": "m"}

{"prompt": "How are you?", "output_tokens": 7}
{"prompt": "cafe\u0301\\nau lait", "output_tokens": 0}
"""
CSV = """id,prompt,output_tokens
1," How are you? ",43
2,How are you?,7
3,"cafe\u0301
au lait",0
"""


@pytest.mark.parametrize("text", [JSON, CSV, "\ufeff" + JSON, "\ufeff" + CSV])
@pytest.mark.parametrize("zipped", [False, True])
def test_read_lengths_by_normalised_prompt(tmp_path: Path, text: str, zipped: bool):
    """The first of equal prompts counts; an empty answer has its end token."""
    file = tmp_path / "lengths"
    data = text.encode()
    file.write_bytes(gzip.compress(data) if zipped else data)
    assert read_lengths(file) == {"How are you?": 43, "caf\u00e9\nau lait": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}', "line 1: output_tokens is missing"),
        ('{"prompt": "a", "output_tokens": 1}\n{"output_tokens": 1}', "line 2: prompt is missing"),
        ('{"prompt": 5, "output_tokens": 1}', "line 1: prompt must be text, got 5"),
        ('{"prompt": "a", "output_tokens": -1}', "output_tokens must be a whole number from 0 to"),
        ('{"prompt": "a", "output_tokens": true}', "from 0 to 1,000,000,000, got True"),
        ('{"prompt"', "line 1: not JSON"),
        ('{"prompt": "a", "output_tokens": 1}\n[1]', "line 2: a row must be a JSON object"),
        ("prompt,tokens\na,1\n", "needs the columns prompt, output_tokens; it has prompt, tokens"),
        ("prompt,output_tokens\na,1.5\n", "line 2: output_tokens must be a whole number from 0"),
        ("prompt,output_tokens\n", "has no rows"),
        ("", "needs the columns prompt, output_tokens; it has none"),
    ],
)
def test_mistake_names_file_and_line(tmp_path: Path, text: str, message: str):
    file = tmp_path / "lengths"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        read_lengths(file)
    assert str(file) in str(error.value) and message in str(error.value)


def test_unreadable_files_are_reported(tmp_path: Path):
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(JSON.encode() * 99)[:-20])
    latin = tmp_path / "latin"
    latin.write_bytes(b'{"prompt": "\xe9", "output_tokens": 3}')
    for file in (tmp_path / "none", tmp_path, cut, latin):
        with pytest.raises(ValueError, match=f"cannot read {file}: "):
            read_lengths(file)
