"""Small models of every architecture, and a minimal scheduler that keeps an engine busy."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from random import Random
from threading import Event
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from services.core import FinishReason, Grant, Pause, Plan, Report, Residency
from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.model.paged import PagedModel
from services.worker.requests.types.batch import NewToken, StepResult
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from tests.worker.family_models import FAMILIES, Family

VOCABULARY = 96
EOS = 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide enough for answers with different tokens
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
GROUPED: dict[str, Any] = SIZES | {"num_key_value_heads": 2}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=7)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            **{k: v for k, v in SIZES.items() if k not in ("intermediate_size", "pad_token_id")},
            ffn_dim=64, word_embed_proj_dim=32, init_std=0.3, pad_token_id=1,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256,
            initializer_range=0.3, bos_token_id=EOS, eos_token_id=EOS, pad_token_id=EOS,
        )
    ),
    "pythia": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **GROUPED, head_dim=16, sliding_window=7, query_pre_attn_scalar=16,
            attn_logit_softcapping=5.0, final_logit_softcapping=8.0,
        )
    ),
    "phi": lambda: PhiForCausalLM(PhiConfig(**GROUPED)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**GROUPED, sliding_window=9)),
}  # fmt: skip


@cache
def reference(name: str) -> PreTrainedModel:
    """transformers' model; the same weights at each call."""
    torch.manual_seed(len(name))
    return (MODELS[name]() if name in MODELS else of_family(FAMILIES[name])).eval()


def of_family(family: Family) -> PreTrainedModel:
    settings = deepcopy({**GROUPED, **family.settings})
    beside = deepcopy(dict(family.beside))
    if beside:
        config = AutoConfig.for_model(family.model_type, text_config=settings, **beside)
    else:
        config = AutoConfig.for_model(family.model_type, **settings)
    return AutoModelForCausalLM.from_config(config)


def engine_of(name: str, **settings: Any) -> Engine:
    return make_engine(reference(name), **settings)


def make_engine(module: PreTrainedModel, **settings: Any) -> Engine:
    config = EngineConfig(model="", **{"kv_tokens": 2048, "host_gib": 0, **settings})
    fuse = config.fused_forward == "auto"
    model = PagedModel(deepcopy(module), torch.device("cpu"), fuse)
    if most := config.most_adapters:
        model.hold_adapters(most, config.most_adapters_on_device, config.max_lora_rank)
    return Engine(model, config)


def prompt_tokens(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCABULARY, (length,), generator=generator).tolist())


def generate(name: str, tokens: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
    """The greedy answer of `generate()`, and the smallest lead of a token over the second."""
    output: Any = reference(name).generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        max_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return output.sequences[0, len(tokens) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def clear_cases(name: str, lengths: Sequence[int], new_tokens: int) -> dict[str, Any]:
    """Prompts of these lengths, and answers that rounding cannot change: {id: (prompt, answer)}."""
    cases = {}
    for number, length in enumerate(lengths):
        for seed in range(100 * number, 100 * number + 100):
            answer, lead = generate(name, tokens := prompt_tokens(seed, length), new_tokens)
            if lead > 1e-3:
                cases[f"r{number}"] = (tokens, answer)
                break
    assert len(cases) == len(lengths)
    return cases


def add_prepared(engine: Engine, prompt: Prompt) -> str | None:
    """Adds a prompt once its grammar is compiled, as the engine's loop does."""
    ready = Event()
    if not engine.prepare(prompt, ready.set):
        assert ready.wait(60)
    return engine.add(prompt, 0.0)


class Feeder:
    """A scheduler that admits requests, extends ended slices, and admits evicted requests again."""

    def __init__(self, engine: Engine, slice_tokens: int = 0):
        self.engine = engine
        self.slice_tokens = slice_tokens
        self.output: dict[str, list[int]] = defaultdict(list)
        self.drawn: dict[str, list[NewToken]] = defaultdict(list)
        self.finished: dict[str, FinishReason] = {}
        self.evictions = 0
        self.on_step: Callable[[StepResult], None] = lambda _: None
        self.on_report: Callable[[Report], None] = lambda _: None
        self._seq = 0
        self._max_tokens: dict[str, int] = {}

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
        adapter: str = "",
    ) -> None:
        prompt = Prompt(
            request_id, tuple(tokens), len(tokens), max_tokens, sampling, adapter=adapter
        )
        assert add_prepared(self.engine, prompt) is None
        self._max_tokens[request_id] = max_tokens
        self.plan(admit=(self._grant(request_id),))

    def plan(self, **directives: Any) -> None:
        self._seq += 1
        self.engine.state.apply_plan(Plan(self._seq, **directives), 0.0)

    def _grant(self, request_id: str, so_far: int = 0) -> Grant:
        most = self._max_tokens[request_id]
        return Grant(
            request_id, min(most, so_far + self.slice_tokens) if self.slice_tokens else most
        )

    def step(self) -> bool:
        result = self.engine.step()
        if result:
            self.on_step(result)
        for token in (*(result.tokens if result else ()), *self.engine.state.ends.pop_late()):
            assert token.offset == len(self.output[token.request_id])
            self.output[token.request_id].append(token.token_id)
            self.drawn[token.request_id].append(token)
        self.engine.state.check_integrity()
        if report := self.engine.state.report():
            self.on_report(report)
            self._read(report)
        return result is not None

    def _read(self, report: Report) -> None:
        self.finished |= {f.request_id: f.reason for f in report.finished}
        self.evictions += len(report.evicted)
        again = tuple(self._grant(p.request_id, p.output_tokens) for p in report.evicted)
        more = tuple(self._grant(p.request_id, p.output_tokens) for p in report.progress)
        if again or (more and self.slice_tokens):
            self.plan(admit=again, extend=more)

    def run(self) -> dict[str, list[int]]:
        while set(self.finished) != set(self._max_tokens):
            assert self.step(), "requests are left, but nothing runs"
        assert self.engine.state.pool.free_blocks == self.engine.state.pool.blocks
        return self.output


class PausingFeeder(Feeder):
    """Pauses running requests, with their KV in host memory, and resumes them later."""

    random = Random(3)

    def step(self) -> bool:
        state = self.engine.state
        for name in [name for name in state.sequences if name not in state.running]:
            self.plan(admit=(self._grant(name, state.sequences[name].output_tokens),))
        if state.running and self.random.random() < 0.4:
            name = self.random.choice(list(state.running))
            self.plan(pause=(Pause(name, self.random.choice(list(Residency))),))
        return super().step() or bool(state.sequences)
