"""The command `foretoken`; `python -m foretoken` is the same."""

import os
from typing import Annotated

import typer

app = typer.Typer(
    name="foretoken",
    help="SLA-aware LLM serving that schedules by foresight.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """SLA-aware LLM serving that schedules by foresight."""


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(help="Folder or hub name of a causal LM; the demo model if left out.")
    ] = "",
    policy: Annotated[str, typer.Option(help="Preset, as `foretoken presets` lists them.")] = "",
    presets: Annotated[
        str, typer.Option(metavar="FILE", help="TOML of more presets, as presets.toml has them.")
    ] = "",
    kv_tokens: Annotated[
        int, typer.Option(help="KV cache size a worker, in tokens; 0: by free memory.")
    ] = 0,
    kv_dtype: Annotated[
        str, typer.Option(help="KV on the device: auto, as the model's; int8, half the bytes.")
    ] = "",
    host_gib: Annotated[
        float | None, typer.Option(help="Host memory for KV that waits, a worker, in GiB; 0: none.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Model replicas.")] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="OpenAI HTTP; 0: any free port.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC; 0: any free port.")] = 50051,
    separate: Annotated[
        bool, typer.Option("--separate", help="Every service a process of its own, over TCP.")
    ] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, any setting; repeatable.")
    ] = None,
) -> None:
    """Start everything on this machine and serve a model."""
    from foretoken.options import ServeOptions
    from foretoken.serve import serve as run

    run(
        ServeOptions(
            model=model,
            policy=policy,
            presets=presets,
            kv_tokens=kv_tokens,
            kv_dtype=kv_dtype,
            host_gib=host_gib,
            workers=workers,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            separate=separate,
            sets=sets or [],
        )
    )


def main() -> None:
    """Run the command; a mistake of the user's is one line and status 2."""
    # gRPC's core would otherwise remark on every process we start. Read when it is first imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from foretoken.chat import chat
    from foretoken.evaluate import EvaluateCommand, evaluate
    from foretoken.presets import presets
    from foretoken.train import app as train
    from foretoken.why import why
    from services.runtime.main import leave

    app.command()(chat)
    app.command()(presets)
    app.command()(why)
    app.command(cls=EvaluateCommand)(evaluate)
    app.add_typer(train, name="train")
    try:
        app()
    except (ValueError, ExceptionGroup) as error:
        leave("foretoken", error)


if __name__ == "__main__":
    main()
