"""Training data: rendered conversations, tokenized, in batches of similar length."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from transformers import PreTrainedTokenizerFast

from models import exchanges
from models.tasks import (
    EXCHANGE_SHARE,
    GENERIC_SYSTEM,
    MULTI_TURN_SHARE,
    SHARES,
    Example,
    Message,
    stream,
)
from models.tokenizer import END, SPECIAL_TOKENS

IGNORED = -100  # label of tokens without a loss: prompts and padding
EXCHANGE_TURN_SHARE = 0.3  # of multi-turn conversations: one turn is a greeting or the like
POOL = 2048  # conversations sorted by length at a time
MAX_TOKENS, MAX_ROWS = 3072, 48  # per batch, including padding
MAX_TURN_CHARS = 120  # of an answer before the last turn


@dataclass(frozen=True)
class Batch:
    """Right-padded token ids and labels, both [rows, longest]; labels are not shifted."""

    ids: torch.Tensor
    labels: torch.Tensor


Turns = list[tuple[str, str]]
"""Pairs of prompt text, as the model reads it, and answer text."""


def prompt_text(tokenizer: PreTrainedTokenizerFast, example: Example) -> str:
    """Returns the text that the example's answer continues."""
    if example.plain:
        return f"{example.user}\n"
    return _render(tokenizer, example.messages)


def _render(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> str:
    # Equal to the chat template, which is slower; a test compares both.
    turns = "".join(f"<|{message['role']}|>{message['content']}{END}" for message in messages)
    return f"{turns}<|assistant|>"


def conversations(
    rng: Random,
    tokenizer: PreTrainedTokenizerFast,
    shares: Mapping[str, float] = SHARES,
    multi_turn: float = MULTI_TURN_SHARE,
    exchanged: float = EXCHANGE_SHARE,
) -> Iterator[Turns]:
    """Yields conversations endlessly: single tasks, 2 or 3 tasks in turn, and greetings."""
    source = stream(rng, held_out=False, shares=shares)
    for example in source:
        kind = rng.random()
        if kind < exchanged:
            yield [_exchange(rng, tokenizer)]
        elif kind < exchanged + multi_turn:
            yield _dialogue(rng, tokenizer, source)
        else:
            yield [(prompt_text(tokenizer, example), example.answer)]


def _exchange(rng: Random, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    prompt, answer = exchanges.draw(rng)
    system = rng.choice((None, None, *GENERIC_SYSTEM))
    example = Example("exchange", prompt, system, prompt, answer, plain=rng.random() < 0.2)
    return prompt_text(tokenizer, example), answer


def _dialogue(rng: Random, tokenizer: PreTrainedTokenizerFast, source: Iterator[Example]) -> Turns:
    """Returns 2 or 3 tasks in user turns, with short answers before the last turn. Some start with
    a greeting or end with thanks."""
    in_user_turn = (each for each in source if each.system is None and not each.plain)
    short = (each for each in in_user_turn if len(each.answer) <= MAX_TURN_CHARS)
    earlier = list(islice(short, rng.randint(1, 2)))
    last = next(in_user_turn)
    pairs = [(example.user, example.answer) for example in (*earlier, last)]
    if rng.random() < EXCHANGE_TURN_SHARE:
        pairs.insert(rng.choice((0, len(pairs))), exchanges.draw(rng))
    turns: Turns = []
    system = rng.choice((None, None, *GENERIC_SYSTEM))
    for number, (user, answer) in enumerate(pairs):
        opening = [Message(role="system", content=system)] if system and number == 0 else []
        messages = [*opening, Message(role="user", content=user)]
        turns.append((_render(tokenizer, messages), answer))
    return turns


def _tokenize(
    tokenizer: PreTrainedTokenizerFast, pool: list[Turns]
) -> list[tuple[list[int], list[int]]]:
    flat = [piece for turns in pool for prompt, answer in turns for piece in (prompt, answer + END)]
    encoded = iter(tokenizer(flat)["input_ids"])
    rows = []
    for turns in pool:
        ids: list[int] = []
        labels: list[int] = []
        for _ in turns:
            prompt, answer = next(encoded), next(encoded)
            ids += prompt + answer
            labels += [IGNORED] * len(prompt) + answer
        rows.append((ids, labels))
    return rows


def _stack(rows: list[tuple[list[int], list[int]]], padding: int) -> Batch:
    shape = (len(rows), len(rows[-1][0]))
    ids, labels = torch.full(shape, padding), torch.full(shape, IGNORED)
    for row, (row_ids, row_labels) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        labels[row, : len(row_labels)] = torch.tensor(row_labels)
    return Batch(ids, labels)


def batches(
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    longest: int,
    shares: Mapping[str, float] = SHARES,
    multi_turn: float = MULTI_TURN_SHARE,
    exchanged: float = EXCHANGE_SHARE,
) -> Iterator[Batch]:
    """Yields batches of conversations of at most `longest` tokens, endlessly."""
    rng = Random(seed)
    source = conversations(rng, tokenizer, shares, multi_turn, exchanged)
    while True:
        rows = _tokenize(tokenizer, list(islice(source, POOL)))
        rows = sorted((row for row in rows if len(row[0]) <= longest), key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:  # sorted, so that the last row of a group is its longest
            if (len(groups[-1]) + 1) * len(row[0]) > MAX_TOKENS or len(groups[-1]) == MAX_ROWS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from (_stack(group, tokenizer.pad_token_id) for group in groups if group)


def repetition_batches(seed: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Yields batches of a random sequence repeated two or more times, endlessly. The repetitions
    are learned."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        length = int(torch.randint(4, 33, (), generator=generator))
        first = torch.randint(
            len(SPECIAL_TOKENS), len(tokenizer), (20, length), generator=generator
        )
        ids = first.repeat(1, max(2, 96 // length))
        labels = ids.clone()
        labels[:, :length] = IGNORED
        yield Batch(ids, labels)
