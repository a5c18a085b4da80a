"""`foretoken generate`: answers a file of requests without a server."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.options import option_maker
from foretoken.commands.usage import UsageError, check_log_level, check_outputs

if TYPE_CHECKING:
    from foretoken.offline.settings import Settings

SHOWN_FAULTS = 20  # further ones are counted
FAILED, INTERRUPTED = 1, 130
ORDERS = {"forecast": True, "given": False}  # whether requests are ordered by forecast
job_option = option_maker("Job")
model_option = option_maker("Model")


def generate(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON lines: OpenAI's batch lines, or bodies with `prompt` or `messages`.",
        ),
    ],
    out: Annotated[
        Path,
        job_option("Answers, as lines of OpenAI's batch output; resumed if it exists.", "FILE"),
    ],
    in_flight: Annotated[int, job_option("Requests that run at a time.", "N", min=1)] = 256,
    order: Annotated[
        str, job_option("forecast: longest expected answers first; given: as in the file.", "NAME")
    ] = "forecast",
    model: Annotated[
        str, model_option("Folder or hub name of the model.", "MODEL", "the demo model")
    ] = "",
    workers: Annotated[int, model_option("Replicas of the model.", "N", min=1, max=64)] = 1,
    max_model_len: Annotated[
        int,
        model_option("Longest prompt and answer together; 0: the model's limit.", "TOKENS", min=0),
    ] = 0,
    dtype: Annotated[str, model_option("auto, float32, bfloat16 or float16.", "NAME")] = "auto",
    device: Annotated[str, model_option("auto, cpu, cuda or cuda:N.", "NAME")] = "auto",
    emulate: Annotated[
        str, model_option("Hardware file of the simulator to emulate.", "HARDWARE", "none")
    ] = "",
    log_level: Annotated[
        str,
        model_option("Log level: debug, info, warning or error.", "LEVEL", "warning"),
    ] = "",
    sets: Annotated[
        list[str] | None,
        model_option(
            "Any setting; repeatable; overrides the other options.",
            "SECTION.KEY=VALUE",
            "none",
            names=["--set"],
        ),
    ] = None,
) -> None:
    """Answer a file of requests in this process, without a server.

    A job that runs again with the same files answers only what is missing. The status is 1 if a
    line was refused.
    """
    if order not in ORDERS:
        raise UsageError(f"--order takes {' or '.join(ORDERS)}; got {order!r}")
    if not file.is_file():
        raise UsageError(f"the file does not exist (got '{file}')")
    check_log_level(log_level)
    check_outputs(out, inputs=[file])
    settings: Settings = {
        "workers": workers,
        "max_model_len": max_model_len,
        "dtype": dtype,
        "device": device,
        "emulate": emulate,
        "log_level": log_level,
        "sets": sets or [],
    }
    if faults := _run(file, out, model, in_flight, ORDERS[order], settings):
        print(f"foretoken: {faults} lines were refused; {out} says why", file=sys.stderr)
        raise typer.Exit(FAILED)


def _run(
    file: Path, out: Path, model: str, in_flight: int, by_forecast: bool, settings: "Settings"
) -> int:
    """Returns the number of refused lines."""
    from contextlib import closing

    from foretoken.offline.background import BackgroundSystem
    from foretoken.offline.file_job import FileJob
    from foretoken.offline.files import AnswerFile
    from foretoken.offline.settings import read_settings
    from foretoken.running.console.bar import ProgressBar

    options, answers = read_settings(model, settings), AnswerFile(out)
    faults = 0

    def on_fault(sentence: str) -> None:
        nonlocal faults
        faults += 1
        if faults <= SHOWN_FAULTS:
            print(sentence, file=sys.stderr)

    try:
        with closing(BackgroundSystem(options)) as background, ProgressBar("starting") as bar:
            job = FileJob(file, answers, on_fault, partial(bar.show, "generating"))
            job.run(background, in_flight, by_forecast)
    except KeyboardInterrupt:
        print("foretoken: interrupted; the same command continues the job", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    return faults
