"""`foretoken calibrate`: fits a hardware file of the simulator to a live server's timings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import UsageError, check_outputs

if TYPE_CHECKING:
    from services.costs import StepTiming
    from simulator.hardware.calibrate import Calibration
    from simulator.hardware.request_log import RequestLog
    from simulator.hardware.roofline import Roofline


def calibrate(
    log: Annotated[
        Path,
        typer.Option(
            help="CSV, plain or gzip: a request log (input_tokens, output_tokens, scheduled_s, "
            "first_token_s, last_token_s) or step timings (prefill_tokens, decode_seqs, "
            "context_tokens, elapsed_s)."
        ),
    ],
    name: Annotated[str, typer.Option(help="What was measured, such as h100-llama3-8b.")],
    out: Annotated[Path, typer.Option(help="Hardware file to write.")],
    gpu: Annotated[
        str, typer.Option(help="GPU; with --model, bounds the fit by what it can do.")
    ] = "",
    model: Annotated[str, typer.Option(help="Model that the server ran.")] = "",
    tensor_parallel: Annotated[int, typer.Option(min=1, max=64, help="GPUs of a replica.")] = 1,
    kv_tokens: Annotated[
        int,
        typer.Option(min=0, help="KV capacity; 0: what fits the GPU, else the most in the log."),
    ] = 0,
    host_tokens: Annotated[int, typer.Option(min=0, help="KV capacity of host memory.")] = 0,
    max_running: Annotated[int, typer.Option(min=1, help="Most sequences of a step.")] = 256,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a step.")] = 2_048,
) -> None:
    """Fit a hardware file to a request log or to step timings of a live server.

    Prints the error of a model fitted to one part of the data on the other part. Capacities and
    limits are not measured: give those of the server.
    """
    from simulator.hardware.calibrate import NO_BOUNDS
    from simulator.hardware.calibrate import calibrate as run
    from simulator.hardware.hardware import Hardware
    from simulator.hardware.hardware_file import SUFFIX, read_hardware, write_hardware
    from simulator.hardware.request_log import read_timings
    from simulator.hardware.roofline import derive_bounds
    from simulator.rows import writing

    check_outputs(out, inputs=[log])
    if out.suffix != SUFFIX:
        raise UsageError(f"--out {out}: a hardware file's name ends in {SUFFIX}")
    if not name.strip():
        raise UsageError("--name: the name is empty; say what was measured")
    roofline = _roofline(gpu, model, tensor_parallel)
    timings = read_timings(log)
    capacity = kv_tokens or _capacity(timings, roofline)
    found = run(timings, derive_bounds(roofline) if roofline else NO_BOUNDS)
    lines = list(_describe(found, log.name, roofline))
    hardware = Hardware(
        name,
        found.cost,
        capacity,
        host_tokens,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        source=" ".join(lines),
        about=f"{name}, calibrated",
    )
    text = write_hardware(hardware)
    read_hardware(text, name, str(out))  # refuses capacities that cannot be simulated
    with writing(out):
        out.write_text(text, encoding="utf-8")
    for line in lines:
        print(line)
    print(f"{capacity:,} KV tokens. Wrote {out}; check its [memory] and [engine].")


def _roofline(gpu: str, model: str, tensor_parallel: int) -> "Roofline | None":
    """The shape of the server, None if it was not given. Raises UsageError if only half is."""
    from simulator.hardware.devices import find_gpu, find_model
    from simulator.hardware.roofline import Roofline

    if not gpu and not model:
        if tensor_parallel > 1:
            raise UsageError("--tensor-parallel needs --gpu and --model")
        return None
    if not (gpu and model):
        raise UsageError("--gpu and --model belong together: give both, or none")
    find_gpu(gpu)
    find_model(model)
    return Roofline(gpu=gpu, model=model, tensor_parallel=tensor_parallel)


def _capacity(timings: "RequestLog | list[StepTiming]", roofline: "Roofline | None") -> int:
    """KV tokens by the GPU's memory, else the most that the log's requests held together."""
    from simulator.hardware.hardware_file import DEFAULT_UTILIZATION, DEFAULT_WORKSPACE_GIB
    from simulator.hardware.reconstruct import peak_load
    from simulator.hardware.roofline import derive_kv_tokens

    if roofline:
        return derive_kv_tokens(
            roofline, DEFAULT_UTILIZATION, DEFAULT_WORKSPACE_GIB, "raise --tensor-parallel"
        )
    if isinstance(timings, list):
        raise UsageError(
            "step timings say nothing of memory: give --kv-tokens, or --gpu and --model"
        )
    return peak_load(timings)[1]


def _describe(found: "Calibration", file: str, roofline: "Roofline | None") -> list[str]:
    cost = found.cost
    lines = [f"Fitted by foretoken calibrate to {cost.samples} {found.rows} of {file}."]
    if found.paused:
        lines.append(
            f"Left out: {found.paused} requests with gaps, as if paused for lack of memory."
        )
    if roofline:
        lines.append(f"Not below the peaks of {roofline.gpu} for {roofline.model}.")
    lines.append(
        f"Error when fitted to {found.fitted} {found.rows} and measured on {found.held_out} "
        f"others: median {cost.error_p50:.1%}, p90 {cost.error_p90:.1%}."
    )
    return lines
