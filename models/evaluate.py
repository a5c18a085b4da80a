"""Accuracy of the demo model on held-out prompts: exact greedy answers that the model ended."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.agents import AGENT_TASKS
from models.batches import prompt_text
from models.tasks import TASKS, Example, stream

EVALUATED = TASKS | AGENT_TASKS
BATCH = 48
MAX_ANSWER_TOKENS = 450


@dataclass(frozen=True)
class Score:
    """Number of an application's prompts that were answered exactly, and the first wrong answer."""

    application: str
    prompts: int
    exact: int
    wrong: str = ""


def held_out_examples(
    seed: int, prompts_per_task: int, applications: Iterable[str] = tuple(EVALUATED)
) -> list[Example]:
    """Returns different held-out prompts of each application, in all three forms."""
    chosen: list[Example] = []
    for application in applications:
        rng = Random(f"{seed} {application}")
        source = stream(rng, True, {application: 1.0}, EVALUATED)
        different = {prompt_text(e): e for e in islice(source, 4 * prompts_per_task)}
        chosen += list(different.values())[:prompts_per_task]
    return chosen


@torch.inference_mode()
def answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str]
) -> list[str]:
    """Returns the greedy answer to each prompt, followed by "…" if the model did not end it."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, str] = {}
    greedy = GenerationConfig(
        max_new_tokens=MAX_ANSWER_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        inputs = tokenizer([prompts[index] for index in part], padding=True, return_tensors="pt")
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            generation_config=greedy,
        )
        for index, row in zip(part, output[:, inputs["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            found[index] = text if tokenizer.eos_token_id in row else f"{text}…"
    return [found[index] for index in range(len(prompts))]


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    chosen: Sequence[Example],
) -> list[Score]:
    """Returns one score per application, in the order of EVALUATED."""
    model.eval()
    predicted = answers(model, tokenizer, [prompt_text(example) for example in chosen])
    scores = []
    for application in EVALUATED:
        rows = [
            (example, answer)
            for example, answer in zip(chosen, predicted, strict=True)
            if example.application == application
        ]
        wrong = [f"{e.user!r}: {a!r}, not {e.answer!r}" for e, a in rows if a != e.answer]
        if rows:
            exact = len(rows) - len(wrong)
            scores.append(Score(application, len(rows), exact, wrong[0] if wrong else ""))
    return scores
