"""vLLM's bare loop, `LLM.generate`, run by a Python that has vLLM: `python vllm_loop.py JSON`.

JSON holds the arguments of `LLM`. The first output line reports readiness. Each input line
{"prompts": [[ids]], "output_tokens": n} is answered by {"tokens": n, "elapsed_s": s}. The script
imports nothing of this project; vLLM's own output goes to stderr.
"""

import json
import os
import sys
import time
from importlib import import_module


def main() -> None:
    del sys.path[0]  # this folder: its names would shadow vLLM's
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vllm = import_module("vllm")
    llm = vllm.LLM(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=request["output_tokens"], ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        began_s = time.perf_counter()
        done = llm.generate(prompts, sampling, use_tqdm=False)
        elapsed_s = time.perf_counter() - began_s
        tokens = sum(len(answer.outputs[0].token_ids) for answer in done)
        print(json.dumps({"tokens": tokens, "elapsed_s": elapsed_s}), file=answers, flush=True)


if __name__ == "__main__":  # vLLM's own processes import this file again
    main()
