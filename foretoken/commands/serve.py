"""`foretoken serve`: starts all services on this machine and serves a model."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.client.address import API_KEY_VARIABLE
from foretoken.commands.engine_arguments import (
    BACKEND_KEY_VARIABLE,
    check_cluster,
    count_workers,
)
from foretoken.commands.model_arguments import (
    FoundModel,
    check_several,
    find_models,
    read_adapters,
    read_models,
)
from foretoken.commands.options import option_maker
from foretoken.commands.usage import UsageError, check_log_level

model_option = option_maker("Model")
memory_option = option_maker("Memory for KV")
policy_option = option_maker("Policy")
engine_option = option_maker("Engine")
emulation_option = option_maker("Emulation")
address_option = option_maker("Addresses")
request_option = option_maker("Clients and requests")
process_option = option_maker("Processes and settings")


def serve(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=]MODEL...",
            help="Folder or hub name of a causal language model; several share the ports.",
            show_default="the demo model",
        ),
    ] = None,
    model: Annotated[str, model_option("The model, as an option.", "MODEL", "the demo model")] = "",
    served_model_name: Annotated[
        str, model_option("Name of the model for clients.", "NAME", "the folder's or hub name")
    ] = "",
    max_model_len: Annotated[
        int,
        model_option("Longest prompt and answer together; 0: the model's limit.", "TOKENS", min=0),
    ] = 0,
    dtype: Annotated[str, model_option("auto, float32, bfloat16 or float16.", "NAME", "auto")] = "",
    quantization: Annotated[
        str,
        model_option("Dtype of the layers' weights: none (the model's) or int8.", "NAME", "none"),
    ] = "",
    speculative_tokens: Annotated[
        int,
        model_option(
            "Most tokens drafted ahead of an answer by prompt lookup; 0: none.", "N", min=0
        ),
    ] = 0,
    lora_modules: Annotated[
        list[str] | None,
        model_option(
            "A LoRA adapter in PEFT's format, for requests with this model name; repeatable.",
            "NAME=FOLDER",
            "none",
        ),
    ] = None,
    chat_template: Annotated[
        str, model_option("Jinja chat template.", "FILE", "the model's own")
    ] = "",
    tool_call_parser: Annotated[
        str,
        model_option(
            "Format of tool calls, such as hermes, by vLLM's names; none: none.",
            "NAME",
            "the chat template's",
        ),
    ] = "",
    reasoning_parser: Annotated[
        str,
        model_option(
            "Format of reasoning, such as qwen3, by vLLM's names; none: none.",
            "NAME",
            "the chat template's",
        ),
    ] = "",
    device: Annotated[str, model_option("auto, cpu, cuda or cuda:N.", "NAME", "auto")] = "",
    tensor_parallel: Annotated[
        int, model_option("Processes per replica, one GPU each.", "N", "1", min=0)
    ] = 0,
    workers: Annotated[int, model_option("Replicas of each model.", "N", min=1, max=64)] = 1,
    kv_tokens: Annotated[
        int, memory_option("KV cache tokens per worker; 0: what memory allows.", "TOKENS")
    ] = 0,
    kv_dtype: Annotated[
        str, memory_option("KV cache dtype: auto (the model's) or int8.", "NAME", "auto")
    ] = "",
    host_gib: Annotated[
        float | None,
        memory_option(
            "Host memory per worker for the KV of paused requests; 0: none.",
            "GIB",
            "up to 4 GiB of free memory",
        ),
    ] = None,
    policy: Annotated[
        str,
        policy_option("Scheduling preset; `foretoken presets` lists them.", "NAME", "foretoken"),
    ] = "",
    presets: Annotated[str, policy_option("TOML file with more presets.", "FILE", "none")] = "",
    engine: Annotated[
        str,
        engine_option(
            "What computes: foretoken, vllm (in vLLM's environment), or openai, other servers.",
            "NAME",
        ),
    ] = "foretoken",
    backend: Annotated[
        list[str] | None,
        engine_option(
            "A server for --engine openai, of the same model; repeatable, one worker each.",
            "URL",
            "none",
        ),
    ] = None,
    backend_key: Annotated[
        str,
        engine_option(
            "API key that is sent to the backends.", "KEY", "none", envvar=BACKEND_KEY_VARIABLE
        ),
    ] = "",
    emulate: Annotated[
        str,
        emulation_option(
            "Hardware file of the simulator to emulate: no model computes, answers are made up.",
            "HARDWARE",
            "none, the model computes",
        ),
    ] = "",
    emulate_lengths: Annotated[
        str,
        emulation_option(
            "Prompts and the output tokens of their answers, JSON lines or CSV.",
            "FILE",
            "all drawn",
        ),
    ] = "",
    host: Annotated[str, address_option("Address to listen on.", "ADDRESS")] = "127.0.0.1",
    http_port: Annotated[
        int,
        address_option("OpenAI HTTP; 0: any free port.", "PORT", names=("--http-port", "--port")),
    ] = 8000,
    grpc_port: Annotated[int, address_option("gRPC; 0: any free port.", "PORT")] = 50051,
    ui: Annotated[
        bool, address_option("The live page at /ui of the HTTP address.", names=["--ui/--no-ui"])
    ] = True,
    api_key: Annotated[
        list[str] | None,
        request_option(
            "API key that clients must send; repeatable.",
            "KEY",
            "no key required",
            envvar=API_KEY_VARIABLE,
        ),
    ] = None,
    api_key_file: Annotated[
        str,
        request_option(
            "File of named, hashed keys; `foretoken key` prints its lines.", "FILE", "none"
        ),
    ] = "",
    cors_origins: Annotated[
        str,
        request_option("Allowed CORS origins, comma-separated; *: any.", "ORIGINS", "none"),
    ] = "",
    unknown_fields: Annotated[
        str, request_option("Unknown request fields: ignore or refuse.", "ACTION", "ignore")
    ] = "",
    batch_folder: Annotated[
        str,
        request_option(
            "Folder of /v1/files and /v1/batches, kept between runs.", "FOLDER", "no batches"
        ),
    ] = "",
    gateways: Annotated[
        int | None,
        process_option(
            "Gateway processes that share the ports; 0: gateway and scheduler are one process.",
            "N",
            "one per 8 cores; 0 on a single core",
            min=0,
            max=64,
        ),
    ] = None,
    separate: Annotated[
        bool,
        process_option("Run every service as a separate process over TCP.", names=["--separate"]),
    ] = False,
    cluster: Annotated[
        str,
        process_option(
            "Where the workers run: ray, the nodes of a running Ray cluster.", "NAME", "here"
        ),
    ] = "",
    state_dir: Annotated[
        str,
        process_option(
            "Folder of what is learned, for one server at a time.",
            "FOLDER",
            "the user's state folder",
        ),
    ] = "",
    log_level: Annotated[
        str,
        process_option(
            "Log level of every process: debug, info, warning or error.", "LEVEL", "warning"
        ),
    ] = "",
    sets: Annotated[
        list[str] | None,
        process_option(
            "Any setting; repeatable; overrides the other options.",
            "SECTION.KEY=VALUE",
            "none",
            names=["--set"],
        ),
    ] = None,
) -> None:
    """Start all services on this machine and serve a model, or several."""
    asked = read_models(names or [], model, served_model_name)
    if len(asked) > 1:
        check_several(cluster, gateways, backend or [])
    check_log_level(log_level)
    if chat_template and not Path(chat_template).expanduser().is_file():
        raise UsageError(f"--chat-template: the file does not exist (got {chat_template!r})")
    if emulate_lengths and not emulate:
        raise UsageError("--emulate-lengths needs --emulate HARDWARE, such as h100-llama3-8b")
    check_cluster(cluster, engine)
    for option, given in (("--separate", separate), ("--cluster", cluster)):
        if given and gateways == 0:
            raise UsageError(f"{option} needs a gateway process: give --gateways 1 or more")
    backends = backend or []
    workers = count_workers(engine, backends, backend_key, workers, emulate)
    from foretoken.running.engines import ENGINES
    from foretoken.running.options import ServeOptions, default_gateways, demo_model
    from foretoken.running.serve import serve as run
    from services.runtime.process_limits import cores

    found = find_models(asked, weights=ENGINES[engine].ours and not emulate)
    first, *others = found or [FoundModel(demo_model())]
    if gateways is None:
        gateways = max(default_gateways(cores()), int(bool(others)))
    run(
        ServeOptions(
            model=first.folder,
            served_model_name=served_model_name or first.name,
            more_models=[(each.name, each.folder) for each in others],
            max_model_len=max_model_len,
            dtype=dtype,
            quantization=quantization,
            speculative_tokens=speculative_tokens,
            device=device,
            tensor_parallel=tensor_parallel,
            lora_modules=read_adapters(lora_modules or [], len(asked)),
            chat_template=chat_template,
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            policy=policy,
            presets=presets,
            kv_tokens=kv_tokens,
            kv_dtype=kv_dtype,
            host_gib=host_gib,
            engine=engine,
            backends=backends,
            backend_key=backend_key,
            emulate=emulate,
            emulate_lengths=emulate_lengths,
            workers=workers,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            api_keys=api_key or [],
            api_key_file=api_key_file,
            cors_origins=cors_origins,
            unknown_fields=unknown_fields,
            batch_folder=batch_folder,
            state_dir=state_dir,
            log_level=log_level,
            gateways=gateways,
            separate=separate,
            cluster=cluster,
            ui=ui,
            sets=sets or [],
        )
    )
