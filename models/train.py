"""Trains and evaluates the demo model: `python -m models.train [--evaluate]`."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from models.batches import IGNORED, Batch, batches, repetition_batches
from models.evaluate import Score, evaluate, held_out_examples
from models.muon import Muon
from models.shape import make_config, make_model
from models.tasks import REVISIONS
from models.tokenizer import make_tokenizer

DEMO = Path(__file__).parent / "demo"
REPETITION_SHARE = 0.055  # of the steps, at the start
STAGES = ((0.3, 72), (0.5, 200), (1.0, 720))  # share of the steps at the end, tokens per row
MAX_TOKENS = STAGES[-1][1]
WARMUP_STEPS = 60
REPORT_EVERY, SAVE_EVERY = 50, 250


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Replaces the weights in the folder atomically, as bfloat16 safetensors."""
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    unfinished = folder / f"model.safetensors.{os.getpid()}.tmp"
    save_file(weights, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(folder / "model.safetensors")


def save_configs(config: LlamaConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes both configurations, the tokenizer and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Loads the model, in float32, and the tokenizer."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Returns the mean cross-entropy over the answers' tokens.

    Rows are padded on the right and attention is causal, so no mask is needed. Logits are computed
    at labelled positions only.
    """
    hidden = model.model(input_ids=batch.ids[:, :-1], use_cache=False).last_hidden_state
    labels = batch.labels[:, 1:]
    learned = labels != IGNORED
    return cross_entropy(model.lm_head(hidden[learned]), labels[learned])


def make_optimizers(
    model: LlamaForCausalLM,
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Returns Muon for the layers' matrices and AdamW for embedding and norms, with peak rates."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    others = [model.model.embed_tokens.weight, *vectors]
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    return [(Muon(matrices), 0.02), (adam, 4e-3)]


def schedule(step: int, steps: int) -> float:
    """Returns the share of the peak learning rate: it rises, stays for a fifth, falls linearly."""
    left = (steps - step) / (0.8 * steps)
    return min((step + 1) / WARMUP_STEPS, 1.0, left)


def fit(
    model: LlamaForCausalLM,
    source: Iterator[Batch],
    steps: int,
    rate: float,
    folder: Path,
) -> None:
    """Trains for `steps` batches; reports and saves at intervals."""
    optimizers = make_optimizers(model)
    model.train()
    started, recent = time.perf_counter(), []
    for step in range(steps):
        loss = loss_of(model, next(source))
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch gives it no types
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = rate * peak * schedule(step, steps)
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % REPORT_EVERY == 0:
            elapsed = time.perf_counter() - started
            mean = sum(recent) / len(recent)
            typer.echo(f"step {step + 1} of {steps}: loss {mean:.5f}, {elapsed:.0f} s")
            recent.clear()
        if (step + 1) % SAVE_EVERY == 0:
            save(model, folder)
    save(model, folder)


def first_pass(seed: int, tokenizer: PreTrainedTokenizerFast, steps: int) -> Iterator[Batch]:
    """Yields the batches of the first pass: repetitions, then rows of increasing length."""
    done = round(REPETITION_SHARE * steps)
    yield from islice(repetition_batches(seed, tokenizer), done)
    for stage, (share, longest) in enumerate(STAGES):
        until = round(share * steps)
        yield from islice(batches(10 * seed + stage, tokenizer, longest), until - done)
        done = until


def report(scores: list[Score]) -> float:
    """Prints the scores and returns the share of exact answers over all prompts."""
    for score in scores:
        wrong = f"   e.g. {score.wrong}" if score.wrong else ""
        typer.echo(f"{score.application:10} {score.exact:4} of {score.prompts:4} exact{wrong}")
    exact, prompts = sum(s.exact for s in scores), sum(s.prompts for s in scores)
    typer.echo(f"{'overall':10} {exact:4} of {prompts:4} exact: {exact / prompts:.2%}")
    return exact / prompts


def main(
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate", help="Evaluate without training.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the model.")] = DEMO,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts per task.")] = 50,
    steps: Annotated[int, typer.Option(min=0, help="Batches of the first pass.")] = 3600,
    rate: Annotated[float, typer.Option(help="Factor on the learning rates.")] = 1.0,
    resume: Annotated[
        bool, typer.Option(help="Run only the last revision, from the weights in --out.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="PyTorch threads.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="File of the result.")] = None,
) -> None:
    """Trains the demo model, then prints its greedy accuracy on held-out prompts."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    started, cpu_started = time.perf_counter(), time.process_time()
    if not evaluate_only:
        tokenizer = make_tokenizer()
        config = make_config(tokenizer)
        save_configs(config, tokenizer, out)
        model = load(out)[0] if resume else make_model(config)
        if not resume:
            fit(model, first_pass(seed, tokenizer, steps), steps, rate, out)
        for number, revision in enumerate(REVISIONS):
            if not resume or revision is REVISIONS[-1]:
                source = batches(
                    10 * seed + len(STAGES) + number,
                    tokenizer,
                    MAX_TOKENS,
                    revision.shares,
                    revision.multi_turn,
                    revision.exchanges,
                    revision.agents,
                )
                fit(
                    model,
                    source,
                    round(revision.steps * steps),
                    revision.rate * rate,
                    out,
                )
    elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    model, tokenizer = load(out)
    scores = evaluate(model, tokenizer, held_out_examples(seed, prompts))
    exact = report(scores)
    parameters = sum(p.numel() for p in model.parameters())
    typer.echo(f"{parameters:,} parameters")
    if not evaluate_only:
        typer.echo(f"training took {elapsed_s:.0f} s, {cpu_s:.0f} CPU seconds, {threads} threads")
    if json_file:
        result = {
            "exact": exact,
            "scores": [asdict(score) for score in scores],
            "parameters": parameters,
            "train_s": None if evaluate_only else elapsed_s,
            "train_cpu_s": None if evaluate_only else cpu_s,
        }
        json_file.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
