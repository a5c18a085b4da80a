"""`foretoken record`: writes a trace from the log of a server."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.commands.usage import check_outputs


def record(
    log: Annotated[
        Path,
        typer.Argument(help="An event log, OpenAI request log, vLLM benchmark or Mooncake trace."),
    ],
    trace: Annotated[Path, typer.Argument(help="The CSV to write; .gz compresses it.")],
) -> None:
    """Write a trace for `foretoken simulate` from the log of a server."""
    from simulator.workload.recording import read_recording, write_trace

    check_outputs(trace, inputs=[log])
    workload = read_recording(log)
    write_trace(trace, workload)
    print(
        f"{trace}: {len(workload):,} requests over {workload.arrival_s[-1]:,.1f} s, "
        f"{workload.input_tokens.sum():,} input and {workload.output_tokens.sum():,} output tokens"
    )
