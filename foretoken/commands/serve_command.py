"""The options of `foretoken serve`."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.client.address import API_KEY_VARIABLE
from foretoken.commands.usage import UsageError, near

MODEL, MEMORY, POLICY = "Model", "Memory for KV", "Policy"
ADDRESS, REQUESTS, PROCESSES = "Addresses", "Clients and requests", "Processes and settings"
LEVELS = ("debug", "info", "warning", "error", "critical")


def serve(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Folder or hub name of a causal language model.",
            show_default="the demo model",
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The model, as an option.",
            rich_help_panel=MODEL,
            show_default="the demo model",
        ),
    ] = "",
    served_model_name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of the model for clients.",
            rich_help_panel=MODEL,
            show_default="the folder's or hub name",
        ),
    ] = "",
    max_model_len: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            min=0,
            help="Longest prompt and answer together; 0: the model's limit.",
            rich_help_panel=MODEL,
        ),
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, float32, bfloat16 or float16.",
            rich_help_panel=MODEL,
            show_default="auto",
        ),
    ] = "",
    chat_template: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Jinja chat template.",
            rich_help_panel=MODEL,
            show_default="the model's own",
        ),
    ] = "",
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, cpu, cuda or cuda:N.",
            rich_help_panel=MODEL,
            show_default="auto",
        ),
    ] = "",
    tensor_parallel: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Processes per replica, one GPU each.",
            rich_help_panel=MODEL,
            show_default="1",
        ),
    ] = 0,
    workers: Annotated[
        int,
        typer.Option(metavar="N", min=1, max=64, help="Model replicas.", rich_help_panel=MODEL),
    ] = 1,
    kv_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            help="KV cache tokens per worker; 0: what memory allows.",
            rich_help_panel=MEMORY,
        ),
    ] = 0,
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="KV cache dtype: auto (the model's) or int8.",
            rich_help_panel=MEMORY,
            show_default="auto",
        ),
    ] = "",
    host_gib: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Host memory per worker for the KV of paused requests; 0: none.",
            rich_help_panel=MEMORY,
            show_default="up to 4 GiB of free memory",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Scheduling preset; `foretoken presets` lists them.",
            rich_help_panel=POLICY,
            show_default="foretoken",
        ),
    ] = "",
    presets: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="TOML file with more presets.",
            rich_help_panel=POLICY,
            show_default="none",
        ),
    ] = "",
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on.", rich_help_panel=ADDRESS),
    ] = "127.0.0.1",
    http_port: Annotated[
        int,
        typer.Option(
            "--http-port",
            "--port",
            metavar="PORT",
            help="OpenAI HTTP; 0: any free port.",
            rich_help_panel=ADDRESS,
        ),
    ] = 8000,
    grpc_port: Annotated[
        int,
        typer.Option(metavar="PORT", help="gRPC; 0: any free port.", rich_help_panel=ADDRESS),
    ] = 50051,
    ui: Annotated[
        bool,
        typer.Option(
            "--ui/--no-ui",
            help="The live page at /ui of the HTTP address.",
            rich_help_panel=ADDRESS,
        ),
    ] = True,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar=API_KEY_VARIABLE,
            rich_help_panel=REQUESTS,
            help="API key that clients must send; repeatable.",
            show_default="no key required",
        ),
    ] = None,
    api_key_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="File of named, hashed keys; `foretoken key` prints its lines.",
            rich_help_panel=REQUESTS,
            show_default="none",
        ),
    ] = "",
    cors_origins: Annotated[
        str,
        typer.Option(
            metavar="ORIGINS",
            help="Allowed CORS origins, comma-separated; *: any.",
            rich_help_panel=REQUESTS,
            show_default="none",
        ),
    ] = "",
    unknown_fields: Annotated[
        str,
        typer.Option(
            metavar="ACTION",
            help="Unknown request fields: ignore or refuse.",
            rich_help_panel=REQUESTS,
            show_default="ignore",
        ),
    ] = "",
    separate: Annotated[
        bool,
        typer.Option(
            "--separate",
            help="Run every service as a separate process over TCP.",
            rich_help_panel=PROCESSES,
        ),
    ] = False,
    log_level: Annotated[
        str,
        typer.Option(
            metavar="LEVEL",
            help="Log level of every process: debug, info, warning or error.",
            rich_help_panel=PROCESSES,
            show_default="warning",
        ),
    ] = "",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.KEY=VALUE",
            help="Any setting; repeatable; overrides the other options.",
            rich_help_panel=PROCESSES,
            show_default="none",
        ),
    ] = None,
) -> None:
    """Start all services on this machine and serve a model."""
    if name and model and name != model:
        raise UsageError(f"two models are given, {name} and --model {model}; give one")
    if log_level and log_level.lower() not in LEVELS:
        raise UsageError(
            f"--log-level takes {', '.join(LEVELS)}; got {log_level!r}{near(log_level, LEVELS)}"
        )
    if chat_template and not Path(chat_template).expanduser().is_file():
        raise UsageError(f"the chat template {chat_template} does not exist")
    from foretoken.commands.serve import serve as run
    from foretoken.running.model import locate
    from foretoken.running.options import ServeOptions, demo_model

    asked = name or model
    located = locate(asked) if asked else None
    run(
        ServeOptions(
            model=located.folder if located else demo_model(),
            served_model_name=served_model_name or (located.name if located else ""),
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            tensor_parallel=tensor_parallel,
            chat_template=chat_template,
            policy=policy,
            presets=presets,
            kv_tokens=kv_tokens,
            kv_dtype=kv_dtype,
            host_gib=host_gib,
            workers=workers,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            api_keys=api_key or [],
            api_key_file=api_key_file,
            cors_origins=cors_origins,
            unknown_fields=unknown_fields,
            log_level=log_level,
            separate=separate,
            ui=ui,
            sets=sets or [],
        )
    )
