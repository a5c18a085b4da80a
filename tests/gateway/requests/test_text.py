"""Text in pieces equals the text in one, wherever it is cut."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models

from gateway.requests.incremental import Detokenizer, StopMatcher
from gateway.requests.sampling import Sampling
from gateway.requests.text import TemplateError, Text
from models.tokenizer import make_tokenizer
from services.runtime.config import ConfigError
from tests.gateway.gateway_fakes import demo_folder, demo_text, tokens_of

VOCABULARY = demo_text().vocabulary_tokens
token_ids = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)


def cut(items: Sequence[int], lengths: Sequence[int]) -> list[Sequence[int]]:
    """`items` in chunks of these lengths, over and over."""
    chunks, at, turn = [], 0, 0
    while at < len(items):
        length = lengths[turn % len(lengths)]
        chunks.append(items[at : at + length])
        at, turn = at + length, turn + 1
    return chunks


@given(token_ids, st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_any_tokens_in_any_chunks_decode_to_the_whole(ids: list[int], lengths: list[int]) -> None:
    detokenizer = demo_text().detokenizer()
    pieces = [detokenizer.feed(chunk) for chunk in cut(ids, lengths)]
    assert "".join(pieces) + detokenizer.flush() == demo_text().decode(ids)


@given(st.text(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_no_piece_holds_part_of_a_character(text: str, lengths: list[int]) -> None:
    detokenizer = demo_text().detokenizer()
    pieces = [detokenizer.feed(chunk) for chunk in cut(demo_text().encode(text), lengths)]
    pieces.append(detokenizer.flush())
    assert "".join(pieces) == text
    assert "�" in text or not any("�" in piece for piece in pieces)


def test_an_incomplete_character_waits_and_ends_as_a_replacement() -> None:
    ids = demo_text().encode("😀")
    assert len(ids) == 4
    detokenizer = demo_text().detokenizer()
    assert [detokenizer.feed([i]) for i in ids[:3]] == ["", "", ""]
    assert detokenizer.flush() == "�"


@pytest.mark.parametrize("text", ["a", "é", "漢", "👩‍👩‍👧", "Z͑ͫ̓", "\x00\n\t", "<|end|>x"])
def test_bytes_of_tokens_spell_the_text(text: str) -> None:
    ids = demo_text().encode(text)
    assert b"".join(demo_text().token_bytes(i) for i in ids) == text.encode()


def stops_by_the_character(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """What reading one character at a time finds: the dumb oracle."""
    for end in range(1, len(text) + 1):
        done = [s for s in stops if text[:end].endswith(s)]
        if done:
            return text[: end - len(max(done, key=len))], True
    return text, False


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_stop_strings_are_found_alike_however_the_text_is_cut(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    matcher, out, found = StopMatcher(stops), "", False
    for chunk in cut([ord(c) for c in text], lengths):
        safe, found = matcher.feed("".join(map(chr, chunk)))
        out += safe
        if found:
            break
    out += "" if found else matcher.flush()
    assert (out, found) == stops_by_the_character(text, stops)


def test_what_may_become_a_stop_string_is_held_back_and_no_more() -> None:
    matcher = StopMatcher(["END", "\n\n"])
    assert matcher.feed("the E") == ("the ", False)
    assert matcher.feed("N") == ("", False)
    assert matcher.feed("x\n") == ("ENx", False)
    assert matcher.feed("y") == ("\ny", False)
    assert matcher.feed("EN") == ("", False)
    assert matcher.feed("D and more") == ("", True)


def test_a_conversation_is_rendered_by_the_models_own_template() -> None:
    ids = demo_text().encode_chat([{"role": "user", "content": "hi"}])
    rendered = demo_text().backend.decode(ids, skip_special_tokens=False)
    assert rendered == "<|user|>hi<|end|><|assistant|>"


def test_what_the_template_refuses_is_told_in_its_words() -> None:
    with pytest.raises(TemplateError, match="Unknown role: tool"):
        demo_text().encode_chat([{"role": "tool", "content": "x"}])


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(TemplateError, match="no chat template"):
        Text(str(tmp_path)).encode_chat([{"role": "user", "content": "x"}])


def test_context_and_vocabulary_come_from_the_models_config(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(str(tmp_path))
    config = {"model_type": "llama", "max_position_embeddings": 77, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = Text(str(tmp_path))
    assert (text.context_tokens, text.vocabulary_tokens) == (77, 1024)


def test_broken_folders_are_one_line(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    (broken := tmp_path / "broken").mkdir()
    (broken / "tokenizer.json").write_text("{")
    (listed := tmp_path / "listed").mkdir()
    make_tokenizer().save_pretrained(str(listed))
    (listed / "config.json").write_text("[]")
    for folder in (tmp_path / "missing", empty, broken, listed):
        with pytest.raises(ConfigError, match=r"gateway\.model") as caught:
            Text(str(folder))
        assert "\n" not in str(caught.value)
    assert Text(demo_folder()).vocabulary_tokens == VOCABULARY


SPECIALS = [demo_text().encode(f"<|{name}|>")[0] for name in ("end", "user", "assistant")]
END, USER, ASSISTANT = SPECIALS
spiced = st.lists(st.one_of(st.integers(0, VOCABULARY - 1), st.sampled_from(SPECIALS)), max_size=40)


def asking(**fields: Any) -> Sampling:
    return Sampling(seed=0, max_tokens=99, **fields)


@given(
    spiced,
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([frozenset(), frozenset((USER, 40))]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_whatever_is_asked_of_special_tokens_pieces_decode_to_the_whole(
    ids: list[int], lengths: list[int], skips: bool, stops: frozenset[int], ignores: bool,
    includes: bool, stopped: bool,
) -> None:  # fmt: skip
    """The oracle: all tokens at once, without a last one that has ended the answer."""
    sampling = asking(
        skip_special_tokens=skips, stop_token_ids=stops, ignore_eos=ignores,
        include_stop_str_in_output=includes,
    )  # fmt: skip
    detokenizer = demo_text().detokenizer(sampling)
    pieces = [detokenizer.feed(chunk) for chunk in cut(ids, lengths)]
    enders = stops | (frozenset() if ignores else frozenset((END,)))
    silent = ids and ids[-1] in enders and stopped and not includes
    whole = demo_text().decode(ids[:-1] if silent else ids, skips)
    assert "".join(pieces) + detokenizer.flush(stopped) == whole


def test_a_stop_token_that_ends_nothing_is_text() -> None:
    detokenizer = demo_text().detokenizer(asking(stop_token_ids=frozenset(tokens_of("2"))))
    assert [detokenizer.feed(tokens_of(c)) for c in "122"] == ["1", "", "2"]
    assert detokenizer.flush(stopped=False) == "2"


def test_between_special_tokens_no_space_is_put_where_none_is_wanted() -> None:
    """Of a tokenizer whose decoder joins tokens by spaces."""
    vocabulary = {"<a>": 0, "<b>": 1, "x": 2, "?": 3}
    words = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="?"))
    words.add_special_tokens(["<a>", "<b>"])
    specials = {0: "<a>", 1: "<b>"}
    for unspaced, text in ((None, "<a> <b> x <a> <b>"), (specials, "<a><b> x <a><b>")):
        for lengths in ([1], [2], [5]):
            detokenizer = Detokenizer(words, False, frozenset(), unspaced)
            pieces = [detokenizer.feed(chunk) for chunk in cut([0, 1, 2, 0, 1], lengths)]
            assert "".join(pieces) + detokenizer.flush() == text
    assert demo_text().detokenizer(asking(spaces_between_special_tokens=False)).feed([40]) != ""


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_an_included_stop_string_is_the_text_s_end(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    matcher, out, found = StopMatcher(stops, included=True), "", False
    for chunk in cut([ord(c) for c in text], lengths):
        safe, found = matcher.feed("".join(map(chr, chunk)))
        out += safe
        if found:
            break
    out += "" if found else matcher.flush()
    ends = [end for end in range(1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    assert (out, found) == (text[: ends[0]] if ends else text, bool(ends))


def test_a_word_s_tokens_are_those_at_the_beginning_and_behind_a_space() -> None:
    text = demo_text()
    assert list(text.spell_word("apple")) == [text.encode("apple"), text.encode(" apple")]
    assert list(text.spell_word(" apple")) == list(text.spell_word("apple"))
    unknown = text.encode("漢")  # behind a space it is the same behind a token for the space
    assert list(text.spell_word("漢")) == [unknown]


def test_what_ends_an_answer_is_read_as_a_worker_reads_it(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(str(tmp_path))
    assert Text(str(tmp_path)).eos_ids == {END}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "vocab_size": 1024}))
    assert Text(str(tmp_path)).eos_ids == {7}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    text = Text(str(tmp_path))
    assert text.eos_ids == {8, 9}
    detokenizer = text.detokenizer()
    assert detokenizer.feed([40, 8]) + detokenizer.flush(stopped=True) == text.decode([40])
