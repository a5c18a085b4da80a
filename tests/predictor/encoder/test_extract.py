"""Feature extraction: splitting, words, caches and packing."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.encoder.extract import Extractor, split_prompt, word_features
from services.predictor.encoder.packing import VERSION, pack, unpack
from services.predictor.encoder.words import HEAD_CHARS, INSTRUCTION_SHARE, MAX_WORDS, bag, columns
from services.predictor.interface import LAYERS, NUMBERS, WORD_COLUMNS, Features, Prompt

ALPACA = Prompt("", "Translate into German.\nThe sea is calm.", 14)


class Recorder:
    """Records the texts it encodes; vectors differ by text."""

    head_chars = 1_024
    dim = 8

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.calls.append(list(texts))
        size = (LAYERS, self.dim)
        rows = np.stack([np.random.default_rng(len(text) + 1).normal(size=size) for text in texts])
        return np.asarray(rows / np.linalg.norm(rows, axis=2, keepdims=True), np.float32)


def same(a: Features, b: Features) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("instruction", "user_input", "words", "numbers")
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("", "Sum it.\n1, 2, 3"), ("Sum it.", "1, 2, 3")),
        (("", "\n Sum it. \n\n1\n2\n"), ("Sum it.", "1\n2")),
        (("", "Sum it."), ("", "Sum it.")),
        (("", "Sum it.\n \n"), ("", "Sum it.\n \n")),
        (("Be brief.", "Sum it.\n1, 2"), ("Be brief.", "Sum it.\n1, 2")),
        (("", ""), ("", "")),
        (("", "\n\n"), ("", "\n\n")),
    ],
)
def test_first_line_of_multiline_input_is_instruction(
    given: tuple[str, str], expected: tuple[str, str]
) -> None:
    assert split_prompt(*given) == expected


def test_features_match_worked_example() -> None:
    encoder = Recorder()
    prompt = Prompt("", ALPACA.user_input, 14, (100, 40))
    (features,) = Extractor(encoder).extract([prompt])
    assert encoder.calls == [["Translate into German.", "The sea is calm."]]
    np.testing.assert_array_equal(
        np.stack([features.instruction, features.user_input]),
        encoder.encode(["Translate into German.", "The sea is calm."]),
    )
    assert len(NUMBERS) == 8
    expected = [math.log1p(n) for n in (16, 22, 14, 2, 40, 70, 0, 4)]
    np.testing.assert_allclose(features.numbers, expected, rtol=1e-6)
    assert len(features.words) == 17  # "." is in both parts; 8 other words and signs, 9 pairs


def test_cached_prompt_needs_no_encoder() -> None:
    encoder = Recorder()
    extractor = Extractor(encoder)
    (first,) = extractor.extract([ALPACA])
    (again,) = extractor.extract([ALPACA])
    assert same(first, again)
    assert len(encoder.calls) == 1


def test_prompt_numbers_are_not_cached() -> None:
    encoder = Recorder()
    extractor = Extractor(encoder)
    extractor.extract([ALPACA])
    (later,) = extractor.extract([Prompt("", ALPACA.user_input, 500, (7,))])
    assert len(encoder.calls) == 1
    np.testing.assert_allclose(np.expm1(later.numbers), [16, 22, 500, 1, 7, 7, 0, 4], rtol=1e-5)


def test_repeated_system_prompt_is_encoded_once() -> None:
    encoder = Recorder()
    extractor = Extractor(encoder)
    extractor.extract([Prompt("Be brief.", "Why?", 5), Prompt("Be brief.", "How?", 5)])
    extractor.extract([Prompt("Be brief.", "Since when?", 5), Prompt("", "Why?", 5)])
    assert encoder.calls == [["Be brief.", "Why?", "How?"], ["Since when?", ""]]


def test_feature_caches_evict_least_recently_used() -> None:
    encoder = Recorder()
    extractor = Extractor(encoder, cache_entries=3)
    for i in range(20):
        extractor.extract([Prompt("kept", f"question {i}", 3)])
    assert sum(call.count("kept") for call in encoder.calls) == 1
    extractor.extract([Prompt("kept", "question 19", 3)])
    assert len(encoder.calls) == 20
    extractor.extract([Prompt("kept", "question 0", 3)])
    assert encoder.calls[20:] == [["question 0"]]


def test_feature_cache_smaller_than_prompt_still_works() -> None:
    encoder = Recorder()
    extractor = Extractor(encoder, cache_entries=1)
    first, second = extractor.extract([ALPACA, ALPACA])
    assert same(first, second)
    assert len(encoder.calls) == 1
    extractor.extract([ALPACA])
    assert len(encoder.calls) == 2


def test_word_features_need_no_encoder() -> None:
    (read,) = Extractor(Recorder()).extract([ALPACA])
    at_once = word_features(ALPACA)
    np.testing.assert_array_equal(at_once.words, read.words)
    np.testing.assert_array_equal(at_once.numbers, read.numbers)
    assert not at_once.user_input.any() and not at_once.instruction.any()


def test_extractor_is_thread_safe() -> None:
    extractor = Extractor(Recorder(), cache_entries=5)
    prompts = [Prompt("Be brief.", "x" * (i % 9), i) for i in range(200)]
    expected = [Extractor(Recorder()).extract([prompt])[0] for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: extractor.extract([prompt])[0], prompts))
    assert all(map(same, found, expected))


def test_cached_feature_arrays_are_read_only() -> None:
    (features,) = Extractor(Recorder()).extract([ALPACA])
    for array in (features.instruction, features.user_input, features.words):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@given(st.text(), st.text())
def test_word_columns_of_any_text_are_valid(instruction: str, user_input: str) -> None:
    words = bag(columns(instruction), columns(user_input))
    assert words.dtype == np.int32
    assert len(words) <= MAX_WORDS
    assert (np.diff(words) > 0).all()
    assert ((words >= 0) & (words < WORD_COLUMNS)).all()


@pytest.mark.parametrize("text", ["", "\ud800 \udfff", "\0", "😀 🎉", "x" * 10**6, "a b " * 10**6])
def test_unusual_and_long_texts_have_features(text: str) -> None:
    (features,) = Extractor(Recorder()).extract([Prompt(text, text, 10)])
    assert np.isfinite(features.numbers).all()
    np.testing.assert_array_equal(columns(text), columns(text[:HEAD_CHARS]))


def test_words_are_lower_case_and_pairs_are_ordered() -> None:
    def overlap(a: str, b: str) -> int:
        return len(set(columns(a).tolist()) & set(columns(b).tolist()))

    assert columns("Sum It").tolist() == columns("sum it").tolist()
    assert len(columns("sum it")) == 4  # two words, the start pair and their pair
    assert overlap("sum it", "it sum") == 2
    assert overlap("please sum it", "do sum it") == 3


def test_word_bag_keeps_columns_of_both_parts() -> None:
    long = columns(" ".join(f"w{i}" for i in range(600)))
    other = columns(" ".join(f"v{i}" for i in range(600)))
    few = columns("only these words")
    assert len(long) == MAX_WORDS
    assert set(few.tolist()) <= set(bag(long, few).tolist())
    assert set(few.tolist()) <= set(bag(few, long).tolist())
    both = set(bag(long, other).tolist())
    assert set(long[:INSTRUCTION_SHARE].tolist()) <= both
    assert set(other[: MAX_WORDS - INSTRUCTION_SHARE].tolist()) <= both


def test_word_columns_are_equal_in_every_process() -> None:
    text = "Translate “the sea” into 日本語, in 3 ways."
    code = (
        "import sys; from services.predictor.encoder.words import columns;"
        "print(columns(sys.argv[1]).tolist())"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-X", "utf8", "-c", code, text],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert printed == {str(columns(text).tolist())}


def test_word_columns_are_stable() -> None:
    assert columns("Sum it.").tolist() == [217787, 89855, 217390, 105220, 186714, 62386]


@st.composite
def features(draw: st.DrawFn) -> Features:
    dim = draw(st.integers(0, 32))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = rng.normal(size=(2, LAYERS, dim))
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    rows[:, : draw(st.integers(0, LAYERS - 1))] = 0  # layers that the encoder lacks
    rows[draw(st.lists(st.integers(0, 1)))] = 0
    words = draw(st.sets(st.integers(0, WORD_COLUMNS - 1), max_size=MAX_WORDS))
    numbers = draw(st.lists(st.floats(0, 30, width=32), min_size=8, max_size=8))
    return Features(
        rows[0].astype(np.float32),
        rows[1].astype(np.float32),
        np.array(sorted(words), np.int32),
        np.array(numbers, np.float32),
    )


@given(features())
def test_packed_features_round_trip(given: Features) -> None:
    back = unpack(pack(given))
    for name in ("instruction", "user_input"):
        ours, theirs = getattr(back, name), getattr(given, name)
        assert ours.dtype == np.float32
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, atol=5e-4)
    np.testing.assert_array_equal(back.words, given.words)
    np.testing.assert_array_equal(back.numbers, given.numbers)
    assert pack(back) == pack(given)


@settings(max_examples=200)
@given(features(), st.data())
def test_truncated_packed_features_are_rejected(given: Features, data: st.DataObject) -> None:
    packed = pack(given)
    cut = data.draw(st.integers(0, len(packed) - 1))
    for torn in (packed[:cut], packed + b"\0" * (cut + 1)):
        with pytest.raises(ValueError, match="features"):
            unpack(torn)


@given(features(), st.data())
def test_packed_features_with_a_flipped_byte_are_valid_or_rejected(
    given: Features, data: st.DataObject
) -> None:
    packed = bytearray(pack(given))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = unpack(bytes(packed))
    except ValueError:
        return
    assert np.isfinite(np.concatenate([found.instruction, found.user_input])).all()
    assert np.isfinite(found.numbers).all()
    assert (np.diff(found.words) > 0).all()


@given(st.binary(max_size=200))
def test_unpacking_features_rejects_random_bytes(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"features|embedding|word"):
        unpack(junk)


def test_packed_features_of_another_version_are_rejected() -> None:
    (known,) = Extractor(Recorder()).extract([ALPACA])
    packed = pack(known)
    with pytest.raises(ValueError, match=f"not features of version {VERSION}"):
        unpack(bytes([VERSION + 1]) + packed[1:])


def test_invalid_features_are_not_packed() -> None:
    (known,) = Extractor(Recorder()).extract([ALPACA])
    nan = np.full((LAYERS, 8), np.nan, np.float32)
    narrow, one, two = np.zeros((LAYERS, 4), np.float32), known.user_input[-1], known.user_input[1:]
    for bad in (
        Features(nan, known.user_input, known.words, known.numbers),
        Features(narrow, known.user_input, known.words, known.numbers),
        Features(one, one, known.words, known.numbers),
        Features(two, two, known.words, known.numbers),
        Features(known.user_input, known.user_input, known.words[::-1], known.numbers),
        Features(known.user_input, known.user_input, known.words, known.numbers[:2]),
        Features(known.user_input * 9, known.user_input, known.words, known.numbers),
    ):
        with pytest.raises(ValueError, match=r"features|embedding|word"):
            pack(bad)
