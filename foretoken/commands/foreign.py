"""How vLLM, SGLang, TGI and llama.cpp spell options of a server, and what they are here.

Whoever comes from there has scripts and habits.
"""

from collections.abc import Mapping
from types import MappingProxyType

SET = "--set {}=VALUE"
AS_IT_IS = "is not needed: "
SEED = "is not there: requests bring their own seed"

# Theirs → ours, or a sentence after the option's name. Whatever is an option of ours is none here.
FOREIGN: Mapping[str, str] = MappingProxyType(
    {
        # vLLM
        "--tensor-parallel-size": "--tensor-parallel N",
        "-tp": "--tensor-parallel N",
        "--pipeline-parallel-size": "is not there: spread a model with --tensor-parallel N",
        "-pp": "is not there: spread a model with --tensor-parallel N",
        "--data-parallel-size": "--workers N",
        "-dp": "--workers N",
        "--gpu-memory-utilization": "--kv-tokens N (tokens, not a share of memory), or "
        "--set worker.gpu_memory_utilization=SHARE",
        "--max-num-seqs": SET.format("worker.max_running"),
        "--max-num-batched-tokens": SET.format("worker.max_batch_tokens"),
        "--block-size": SET.format("worker.block_tokens"),
        "--kv-cache-dtype": "--kv-dtype auto | int8",
        "--kv-cache-memory-bytes": "--kv-tokens N (tokens, not bytes)",
        "--num-gpu-blocks-override": "--kv-tokens N (tokens, not blocks)",
        "--swap-space": "--host-gib GIB",
        "--cpu-offload-gb": "is not there for weights; --host-gib GIB is for KV that waits",
        "--enforce-eager": "--set worker.cuda_graphs=off --set worker.compile=off",
        "--enable-prefix-caching": AS_IT_IS + "prefixes are always shared",
        "--no-enable-prefix-caching": "--set worker.prefix_sharing=false",
        "--enable-chunked-prefill": AS_IT_IS + "prefill is always chunked",
        "--no-enable-chunked-prefill": "is not there: prefill is always chunked",
        "--scheduling-policy": "--policy NAME, as `foretoken presets` lists them",
        "--load-format": AS_IT_IS + "weights are read from safetensors, or as transformers can",
        "--tokenizer": "is not there: the tokenizer is the model's",
        "--revision": "is not there: give the folder of that revision",
        "--download-dir": "is not there: set HF_HOME, or give a folder",
        "--generation-config": "--set gateway.generation_config=auto | off",
        "--uvicorn-log-level": "--log-level LEVEL",
        "--allowed-origins": "--cors-origins ORIGINS",
        "--disable-log-requests": AS_IT_IS + "requests are logged at --log-level debug alone",
        "--disable-log-stats": AS_IT_IS + "figures are at /metrics",
        "--enable-auto-tool-choice": "is not there: tools are not served yet",
        "--tool-call-parser": "is not there: tools are not served yet",
        "--enable-lora": "is not there: adapters are not served yet",
        "--speculative-config": "is not there: speculative decoding is not served yet",
        "--hf-token": "is not there: set HF_TOKEN",
        "--root-path": "is not there: let the proxy strip it",
        "--seed": SEED,
        "--ssl-keyfile": "is not there: let a proxy speak TLS",
        "--ssl-certfile": "is not there: let a proxy speak TLS",
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
        "--tokenizer-path": "is not there: the tokenizer is the model's",
        "--enable-metrics": AS_IT_IS + "/metrics is always there",
        "--random-seed": SEED,
        # TGI
        "--model-id": "--model MODEL",
        "--num-shard": "--tensor-parallel N",
        "--hostname": "--host ADDRESS",
        "--max-concurrent-requests": SET.format("gateway.max_sessions"),
        "--max-input-length": "--max-model-len TOKENS, of prompt and answer together",
        "--max-input-tokens": "--max-model-len TOKENS, of prompt and answer together",
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
        "--n-gpu-layers": "is not there: a model runs whole on --device cpu or cuda",
        "-ngl": "is not there: a model runs whole on --device cpu or cuda",
        "--cache-type-k": "--kv-dtype auto | int8",
        "--cache-type-v": "--kv-dtype auto | int8",
        "--chat-template-file": "--chat-template FILE",
        "--cont-batching": AS_IT_IS + "batches are always continuous",
        "--metrics": AS_IT_IS + "/metrics is always there",
        "--hf-repo": "--model MODEL",
        # of several
        "--quantization": "is not there: KV can be INT8 (--kv-dtype int8), weights are as they are",
        "-q": "is not there: KV can be INT8 (--kv-dtype int8), weights are as they are",
        "--trust-remote-code": "is not there: no code of a model's folder is run",
    }
)
