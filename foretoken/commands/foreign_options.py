"""Server options of vLLM, SGLang, TGI and llama.cpp, and what to use instead."""

from collections.abc import Mapping
from types import MappingProxyType

SET = "--set {}=VALUE"
NOT_NEEDED = "is not needed: "
SEED = "is not supported: requests set their own seed"

# Foreign option → foretoken's option, or the rest of a sentence.
FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        # vLLM
        "--tensor-parallel-size": "--tensor-parallel N",
        "-tp": "--tensor-parallel N",
        "--pipeline-parallel-size": "is not supported: spread a model with --tensor-parallel N",
        "-pp": "is not supported: spread a model with --tensor-parallel N",
        "--data-parallel-size": "--workers N",
        "-dp": "--workers N",
        "--api-server-count": "--gateways N",
        "-asc": "--gateways N",
        "--gpu-memory-utilization": "--kv-tokens N (tokens, not a share of memory), or "
        "--set worker.gpu_memory_utilization=SHARE",
        "--max-num-seqs": SET.format("worker.max_running"),
        "--max-num-batched-tokens": SET.format("worker.max_batch_tokens"),
        "--block-size": SET.format("worker.block_tokens"),
        "--kv-cache-dtype": "--kv-dtype auto | int8",
        "--kv-cache-memory-bytes": "--kv-tokens N (tokens, not bytes)",
        "--num-gpu-blocks-override": "--kv-tokens N (tokens, not blocks)",
        "--swap-space": "--host-gib GIB",
        "--cpu-offload-gb": "is not supported for weights; --host-gib GIB is for paused KV",
        "--enforce-eager": "--set worker.cuda_graphs=off --set worker.compile=off",
        "--enable-prefix-caching": NOT_NEEDED + "prefix caching is always on",
        "--no-enable-prefix-caching": "--set worker.prefix_sharing=false",
        "--enable-chunked-prefill": NOT_NEEDED + "prefill is always chunked",
        "--no-enable-chunked-prefill": "is not supported: prefill is always chunked",
        "--scheduling-policy": "--policy NAME, as `foretoken presets` lists them",
        "--load-format": NOT_NEEDED + "transformers reads the weights, safetensors first",
        "--tokenizer": "is not supported: the model's own tokenizer is used",
        "--revision": "is not supported: pass the folder of that revision",
        "--download-dir": "is not supported: set HF_HOME, or pass a folder",
        "--generation-config": "--set gateway.generation_config=auto | off",
        "--uvicorn-log-level": "--log-level LEVEL",
        "--allowed-origins": "--cors-origins ORIGINS",
        "--disable-log-requests": NOT_NEEDED + "requests are logged only at --log-level debug",
        "--disable-log-stats": NOT_NEEDED + "see /metrics",
        "--enable-auto-tool-choice": NOT_NEEDED + "the chat template has the format of calls",
        "--enable-lora": "--lora-modules NAME=FOLDER, or --set worker.max_adapters=N",
        "--max-loras": SET.format("worker.adapter_slots"),
        "--max-lora-rank": SET.format("worker.max_lora_rank"),
        "--max-cpu-loras": SET.format("worker.max_adapters"),
        "--lora-paths": "--lora-modules NAME=FOLDER",
        "--lora-adapters": "--lora-modules NAME=FOLDER",
        "--speculative-config": "--speculative-tokens N (drafts by prompt lookup, method ngram)",
        "--num-speculative-tokens": "--speculative-tokens N",
        "--hf-token": "is not supported: set HF_TOKEN",
        "--root-path": "is not supported: configure the proxy to strip it",
        "--seed": SEED,
        "--ssl-keyfile": "is not supported: terminate TLS in a proxy",
        "--ssl-certfile": "is not supported: terminate TLS in a proxy",
        # SGLang
        "--model-path": "--model MODEL",
        "--tp-size": "--tensor-parallel N",
        "--tp": "--tensor-parallel N",
        "--dp-size": "--workers N",
        "--mem-fraction-static": "--kv-tokens N (tokens, not a share of memory), or "
        "--set worker.gpu_memory_utilization=SHARE",
        "--context-length": "--max-model-len TOKENS",
        "--max-running-requests": SET.format("worker.max_running"),
        "--max-total-tokens": "--kv-tokens N",
        "--chunked-prefill-size": SET.format("worker.max_batch_tokens"),
        "--schedule-policy": "--policy NAME, as `foretoken presets` lists them",
        "--disable-radix-cache": "--set worker.prefix_sharing=false",
        "--attention-backend": SET.format("worker.kernels"),
        "--tokenizer-path": "is not supported: the model's own tokenizer is used",
        "--enable-metrics": NOT_NEEDED + "/metrics is always available",
        "--random-seed": SEED,
        # TGI
        "--model-id": "--model MODEL",
        "--num-shard": "--tensor-parallel N",
        "--hostname": "--host ADDRESS",
        "--max-concurrent-requests": SET.format("gateway.max_sessions"),
        "--max-input-length": "--max-model-len TOKENS (prompt and answer together)",
        "--max-input-tokens": "--max-model-len TOKENS (prompt and answer together)",
        "--max-batch-prefill-tokens": SET.format("worker.max_batch_tokens"),
        "--max-batch-total-tokens": "--kv-tokens N",
        "--cuda-memory-fraction": "--kv-tokens N (tokens, not a share of memory), or "
        "--set worker.gpu_memory_utilization=SHARE",
        "--cors-allow-origin": "--cors-origins ORIGINS",
        "--otlp-endpoint": SET.format("tracing.endpoint"),
        "--json-output": "--set logging.format=json",
        # llama.cpp
        "-m": "--model MODEL",
        "--ctx-size": "--max-model-len TOKENS",
        "-c": "--max-model-len TOKENS",
        "--alias": "--served-model-name NAME",
        "-a": "--served-model-name NAME",
        "--parallel": SET.format("worker.max_running"),
        "-np": SET.format("worker.max_running"),
        "--threads": SET.format("worker.torch_threads"),
        "-t": SET.format("worker.torch_threads"),
        "--n-gpu-layers": "is not supported: the whole model runs on --device cpu or cuda",
        "-ngl": "is not supported: the whole model runs on --device cpu or cuda",
        "--cache-type-k": "--kv-dtype auto | int8",
        "--cache-type-v": "--kv-dtype auto | int8",
        "--chat-template-file": "--chat-template FILE",
        "--cont-batching": NOT_NEEDED + "batches are always continuous",
        "--metrics": NOT_NEEDED + "/metrics is always available",
        "--hf-repo": "--model MODEL",
        # several of them
        "-q": "--quantization none | int8",
        "--trust-remote-code": "is not supported: code from a model's folder is never executed",
    }
)
