"""Training data: rendered conversations, tokenized, in batches of similar length."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from transformers import PreTrainedTokenizerFast

from models import exchanges
from models.agents import AGENT_SHARES, AGENT_TASKS
from models.chat import END, Message, Turns, turns
from models.tasks import (
    EXCHANGE_SHARE,
    GENERIC_SYSTEM,
    MULTI_TURN_SHARE,
    SHARES,
    Example,
    stream,
)
from models.tokenizer import SPECIAL_TOKENS

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


def prompt_text(example: Example) -> str:
    """Returns the text that the example's answer continues."""
    *earlier, (prompt, _) = _turns(example)
    return "".join(f"{text}{answer}{END}" for text, answer in earlier) + prompt


def _turns(example: Example) -> Turns:
    if example.plain:
        return [(f"{example.user}\n", example.answer)]
    return turns(example.messages, example.tools, example.answer)


def conversations(
    rng: Random,
    shares: Mapping[str, float] = SHARES,
    multi_turn: float = MULTI_TURN_SHARE,
    exchanged: float = EXCHANGE_SHARE,
    agents: float = 0.0,
) -> Iterator[Turns]:
    """Yields conversations endlessly: single tasks, 2 or 3 tasks in turn, greetings, and tasks of
    agents."""
    source = stream(rng, held_out=False, shares=shares)
    agent_tasks = stream(rng, False, AGENT_SHARES, AGENT_TASKS)
    for example in source:
        kind = rng.random()
        if kind < exchanged:
            yield _exchange(rng)
        elif kind < exchanged + multi_turn:
            yield _dialogue(rng, source)
        elif kind < exchanged + multi_turn + agents:
            yield _turns(next(agent_tasks))
        else:
            yield _turns(example)


def _exchange(rng: Random) -> Turns:
    prompt, answer = exchanges.draw(rng)
    system = rng.choice((None, None, *GENERIC_SYSTEM))
    plain = rng.random() < 0.2
    return _turns(Example("exchange", prompt, system, prompt, answer, plain=plain))


def _dialogue(rng: Random, source: Iterator[Example]) -> Turns:
    """Returns 2 or 3 tasks in user turns, with short answers before the last turn. Some start with
    a greeting or end with thanks."""
    in_user_turn = (each for each in source if each.system is None and not each.plain)
    short = (each for each in in_user_turn if len(each.answer) <= MAX_TURN_CHARS)
    earlier = list(islice(short, rng.randint(1, 2)))
    last = next(in_user_turn)
    pairs = [(example.user, example.answer) for example in (*earlier, last)]
    if rng.random() < EXCHANGE_TURN_SHARE:
        pairs.insert(rng.choice((0, len(pairs))), exchanges.draw(rng))
    *before, (user, answer) = pairs
    system = rng.choice((None, None, *GENERIC_SYSTEM))
    messages = [Message(role="system", content=system)] if system else []
    for earlier_user, earlier_answer in before:
        messages.append({"role": "user", "content": earlier_user})
        messages.append({"role": "assistant", "content": earlier_answer})
    return turns([*messages, {"role": "user", "content": user}], (), answer)


def _tokenize(
    tokenizer: PreTrainedTokenizerFast, pool: list[Turns]
) -> list[tuple[list[int], list[int]]]:
    flat = [piece for each in pool for prompt, answer in each for piece in (prompt, answer + END)]
    encoded = iter(tokenizer(flat)["input_ids"])
    rows = []
    for conversation in pool:
        ids: list[int] = []
        labels: list[int] = []
        for _ in conversation:
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
    agents: float = 0.0,
) -> Iterator[Batch]:
    """Yields batches of conversations of at most `longest` tokens, endlessly."""
    rng = Random(seed)
    source = conversations(rng, shares, multi_turn, exchanged, agents)
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
