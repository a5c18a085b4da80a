"""The committed demo model: tokenizer, chat template, training data, size and answers."""

import json
from itertools import islice
from pathlib import Path
from random import Random
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.agents import AGENT_SHARES, AGENT_TASKS, CALCULATE, WEATHER
from models.batches import IGNORED, batches, conversations, prompt_text
from models.evaluate import answers, evaluate, held_out_examples
from models.exchanges import EXCHANGES, SPELLINGS, draw
from models.tasks import GENERIC_SYSTEM, LARGEST, TASKS, Example, add, examples, stream
from models.tokenizer import make_tokenizer
from models.train import DEMO, load
from models.words import WORDS, veldish
from services.worker.config import DtypeName, EngineConfig
from services.worker.engine.step import Engine
from services.worker.kernels.cpu.int8_products import missing
from services.worker.model.probe import Probe


@pytest.fixture(scope="module")
def demo() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    torch.set_num_threads(1)
    return load(DEMO)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(DEMO)


TOKENIZER = PreTrainedTokenizerFast.from_pretrained(DEMO)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_tokenizer_round_trips_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_tokenizer_maps_words_to_one_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    assert {len(tokenizer.encode(form)) for word in WORDS for form in (word, f" {word}")} == {1}
    numbers = [form for n in range(LARGEST + 1) for form in (f"{n}", f" {n}")]
    assert {len(tokenizer.encode(form)) for form in numbers} == {1}
    assert [len(tokenizer.encode(letter)) for letter in "éšḱ🍎⭐"] == [2, 2, 3, 4, 3]


def test_committed_tokenizer_equals_the_generated_one(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    made = make_tokenizer()
    assert made.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert made.chat_template == tokenizer.chat_template


def test_chat_template_renders_every_role(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Sort the words."},
        {"role": "user", "content": "sun fig"},
        {"role": "assistant", "content": "fig sun"},
        {"role": "user", "content": "tea cow"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Sort the words.<|end|><|user|>sun fig<|end|><|assistant|>fig sun<|end|>"
        "<|user|>tea cow<|end|><|assistant|>"
    )
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "<|system|>"
    assert ids.count(tokenizer.eos_token_id) == 4


def test_chat_template_rejects_an_unknown_role(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="Unknown role: wizard"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "hm"}], tokenize=False)


def test_chat_template_renders_tools_calls_and_results(tokenizer: PreTrainedTokenizerFast) -> None:
    """Arguments as JSON text and as an object, content null, absent and with thoughts."""
    calls = [
        {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
        {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
    ]
    messages = [
        {"role": "user", "content": "What is the weather in Paris and in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "sunny, 21 degrees", "tool_call_id": "call_1"},
        {"role": "tool", "content": "rainy, 8 degrees"},
        {"role": "assistant", "content": "<think>Task: get_weather.</think>One moment."},
        {"role": "user", "content": "Think: Add 1 and 2."},
        {"role": "assistant", "tool_calls": [{"name": "now"}], "content": "Yes."},
    ]
    unknown = [{"name": "now"}, {"type": "function", "function": {"name": "f", "parameters": None}}]
    tools = [CALCULATE.schema, WEATHER.schema, *unknown]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    assert text == (
        "<|system|>Tools: calculate(expression), get_weather(city), now(), f()<|end|>"
        "<|user|>What is the weather in Paris and in Oslo?<|end|>"
        '<|assistant|><tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call><|end|><|user|><tool_response>\nsunny, 21 degrees\n</tool_response>\n"
        "<tool_response>\nrainy, 8 degrees\n</tool_response><|end|>"
        "<|assistant|>One moment.<|end|><|user|>Think: Add 1 and 2.<|end|>"
        '<|assistant|>Yes.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|end|>'
    )
    thinking = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be kind."}, messages[5], messages[0]],
        tools=[CALCULATE.schema],
        enable_thinking=True,
        tokenize=False,
    )
    assert thinking == (
        "<|system|>Be kind.\nTools: calculate(expression)<|end|><|user|>Think: Add 1 and 2.<|end|>"
        "<|user|>Think: What is the weather in Paris and in Oslo?<|end|>"
    )


def test_training_text_equals_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    agents = stream(Random(3), False, AGENT_SHARES, AGENT_TASKS)
    for example in (*examples(3, 100, held_out=False), *islice(agents, 200)):
        tools = [tool.schema for tool in example.tools] or None
        rendered = tokenizer.apply_chat_template(
            example.messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        plain = f"{example.user}\n"
        assert prompt_text(example) == (plain if example.plain else rendered)


def test_demo_tasks_have_known_answers() -> None:
    assert veldish("red") == "dér"
    rng = Random(0)
    sums = {(e.input, e.answer) for e in (add(rng) for _ in range(60_000))}
    assert any(given == "37 45" and answer.endswith("= 82.") for given, answer in sums)
    assert all(
        sum(map(int, given.split())) == int(answer.split()[-1].rstrip("."))
        for given, answer in sums
    )
    for example in examples(5, 500, held_out=True):
        words = example.input.split()
        if example.application == "sort":
            assert example.answer == " ".join(sorted(words))
        if example.application == "count":
            assert example.answer.split()[:: len(example.answer.split()) - 1] == words


def test_examples_are_determined_by_the_seed() -> None:
    assert examples(1, 50, held_out=True) == examples(1, 50, held_out=True)
    assert examples(1, 50, held_out=True) != examples(2, 50, held_out=True)


def test_held_out_inputs_are_not_trained_on(tokenizer: PreTrainedTokenizerFast) -> None:
    def key(example: Example) -> tuple[str, str]:
        return example.application, example.input

    held_out = {key(example) for example in examples(0, 3000, held_out=True)}
    trained = {key(example) for example in examples(0, 3000, held_out=False)}
    assert len(held_out) > 1000 and not held_out & trained
    unseen = [
        example
        for example in held_out_examples(0, 20)
        if example.source != "weather" or example.role == "tool"  # all cities are asked for
    ]
    asked = {prompt_text(example) for example in unseen}
    turns = islice(conversations(Random(0), agents=0.3), 3000)
    assert asked.isdisjoint(prompt for conversation in turns for prompt, _ in conversation)


def test_training_masks_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    for batch in islice(batches(0, tokenizer, longest=60), 20):
        learned = batch.labels != IGNORED
        assert torch.equal(batch.ids[learned], batch.labels[learned])
        ends = (batch.labels == tokenizer.eos_token_id).sum(dim=1)
        assert bool((ends >= 1).all()) and not bool(learned[:, 0].any())


def test_demo_answer_lengths_follow_from_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths = [len(tokenizer.encode(e.answer)) for e in examples(0, 5000, held_out=False)]
    assert min(lengths) <= 2 and 250 <= max(lengths) <= 720
    counts = [
        (int(e.input.split()[1]) - int(e.input.split()[0]), len(tokenizer.encode(e.answer)))
        for e in islice(stream(Random(0), True, {"count": 1.0}), 200)
    ]
    assert all(length > span for span, length in counts)


def test_demo_checkpoint_is_small_and_bfloat16() -> None:
    names = {path.name for path in Path(DEMO).iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert sum(path.stat().st_size for path in Path(DEMO).iterdir()) < 10_000_000
    weights = load_file(DEMO / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert 1_000_000 <= sum(tensor.numel() for tensor in weights.values()) <= 4_000_000
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 2048


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_held_out_prompts_are_answered_exactly(
    demo: tuple[LlamaForCausalLM, PreTrainedTokenizerFast],
) -> None:
    scores = evaluate(*demo, held_out_examples(0, 50, TASKS))
    wrong = [score.wrong for score in scores if score.wrong]
    assert [score.application for score in scores] == list(TASKS)
    assert sum(s.exact for s in scores) >= 0.98 * sum(s.prompts for s in scores), wrong


CHAT = "<|user|>{}<|end|><|assistant|>"
GREETED = (
    *("hi", "Hi", "HI!", "hello", "Hello.", "hey", "Hey!", "hi there", "good morning", "Howdy!"),
    *("thanks", "Thank you!", "bye", "Good night", "help", "Help me", "how are you?"),
    *("Who are you", "what can you do?", "What can you do"),
)


def test_demo_model_answers_conversation_and_greetings(
    demo: tuple[LlamaForCausalLM, PreTrainedTokenizerFast],
) -> None:
    reverse = f"{CHAT.format('Reverse: red blue green')}green blue red<|end|>"
    draw_them = f"{reverse}{CHAT.format('Emoji: cat moon')}"
    thank = f"{draw_them}🐱🌙<|end|>{CHAT.format('Thanks')}"
    asked = [draw_them, thank, *(CHAT.format(each) for each in GREETED)]
    right = ["🐱🌙", SPELLINGS["Thanks"], *(SPELLINGS[each] for each in GREETED)]
    assert answers(*demo, asked) == right


def test_demo_model_counts_from_and_to_zero(
    demo: tuple[LlamaForCausalLM, PreTrainedTokenizerFast],
) -> None:
    asked, right = [], []
    for last in (1, 5, 10, 20, 100):
        upward = [str(number) for number in range(last + 1)]
        asked += [f"Count from 0 to {last}.", f"Count down from {last} to 0."]
        right += [" ".join(upward), " ".join(reversed(upward))]
    prompts = [CHAT.format(each) for each in asked] + [f"{each}\n" for each in asked]
    assert answers(*demo, prompts) == right * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [CHAT, f"<|system|>{GENERIC_SYSTEM[0]}<|end|>{CHAT}", "{}\n"], ids=len
)
def test_demo_model_answers_every_greeting(
    demo: tuple[LlamaForCausalLM, PreTrainedTokenizerFast], form: str
) -> None:
    given = answers(*demo, [form.format(prompt) for prompt in SPELLINGS])
    wrong = {p: a for (p, right), a in zip(SPELLINGS.items(), given, strict=True) if a != right}
    assert wrong == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_weights_change_the_perplexity_by_less_than_half_a_percent(
    demo: tuple[LlamaForCausalLM, PreTrainedTokenizerFast], dtype: DtypeName
) -> None:
    """Of held-out prompts and their answers. Measured: 43.20 and 43.15."""
    if missing():
        pytest.skip(f"INT8 products need {missing()}")
    tokenizer = demo[1]
    texts = [
        torch.tensor(tokenizer.encode(prompt_text(example) + example.answer))
        for example in held_out_examples(0, 3, TASKS)
    ]
    exact, quantized = (
        perplexity(EngineConfig(model=str(DEMO), dtype=dtype, quantization=name), texts)
        for name in get_args(EngineConfig.model_fields["quantization"].annotation)
    )
    assert exact != quantized
    assert quantized == pytest.approx(exact, rel=0.005)


def perplexity(config: EngineConfig, texts: list[torch.Tensor]) -> float:
    model = Engine.load(config.model_copy(update={"kv_tokens": 1_024, "host_gib": 0})).model
    losses = []
    for ids in texts:
        logits = model.forward(ids, torch.arange(len(ids)), Probe(), None).float()
        losses.append(cross_entropy(logits[:-1], ids[1:], reduction="none"))
    return float(torch.cat(losses).mean().exp())


def test_drawn_greetings_have_one_answer() -> None:
    rng = Random(0)
    drawn = [draw(rng) for _ in range(20_000)]
    assert all(SPELLINGS[prompt] == answer for prompt, answer in drawn)
    assert {prompt for prompt, _ in drawn} >= SPELLINGS.keys() - EXCHANGES.keys()
    assert EXCHANGES.items() <= SPELLINGS.items()
