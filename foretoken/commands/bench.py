"""`foretoken bench`: loads servers and reports latency, throughput and goodput."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.bench_arguments import (
    budgets_by_class,
    build_workload,
    parse_rates,
    server_addresses,
)
from foretoken.commands.options import ApiKeyOption, option_maker
from foretoken.commands.usage import UsageError, check_outputs, near

if TYPE_CHECKING:
    from foretoken.bench.run import OnProgress, Plan
    from foretoken.bench.sweep import RateResult

DEFAULT_REQUESTS, DEFAULT_CONCURRENCY = 200, 8
COMPARED_ROUNDS = 3
load_option = option_maker("Load")
request_option = option_maker("Requests")
goodput_option = option_maker("Goodput")
output_option = option_maker("Output")
ENDPOINTS = ("chat", "completions")
MIN_WIDTH = 120  # columns that a table needs
INTERRUPTED = 130  # exit status after Ctrl-C


def bench(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL...", help="Servers, as --server.")
    ] = None,
    server: Annotated[
        list[str] | None,
        load_option(
            "http://host:port, grpc://host:port or host:port; several are loaded in turns "
            "and compared.",
            "ADDRESS",
            "required",
            names=("--server", "--compare"),
        ),
    ] = None,
    requests: Annotated[
        int,
        load_option("Requests per round.", "N", "200, unless --seconds is set", min=0),
    ] = 0,
    seconds: Annotated[
        float, load_option("Duration of a round; 0: until --requests are sent.", "S", min=0)
    ] = 0.0,
    rate: Annotated[
        str,
        load_option(
            "Open loop: requests per second. Several rates are swept, lowest first.",
            "R,R,…",
            "a closed loop",
        ),
    ] = "",
    arrivals: Annotated[
        str, load_option("Arrivals of an open loop: poisson or constant.", "NAME")
    ] = "poisson",
    concurrency: Annotated[
        int, load_option("Closed loop: requests in flight.", "N", "8", min=0)
    ] = 0,
    rounds: Annotated[
        int, load_option("Rounds per server.", "N", "1; 3 to compare servers", min=0)
    ] = 0,
    warm_up: Annotated[int, load_option("Requests before the measurement.", "N", min=0)] = 8,
    timeout: Annotated[
        float, load_option("Timeout of an answer, in seconds.", "S", min=0.001)
    ] = 300.0,
    seed: Annotated[int, load_option("Seed of prompts and arrivals, to repeat a load.", min=0)] = 0,
    model: Annotated[
        str, request_option("Model name.", "NAME", "the first that /v1/models lists")
    ] = "",
    endpoint: Annotated[str, request_option("chat or completions.", "NAME")] = "chat",
    prompts: Annotated[
        Path | None,
        request_option(
            "JSON lines with `prompt` or `messages`, and optionally `max_tokens`.",
            "FILE",
            "random words; for the demo model, its tasks",
        ),
    ] = None,
    input_tokens: Annotated[
        str,
        request_option("Prompt length: 128, 64-512, or lognormal:MEDIAN,SIGMA.", "TOKENS", "128"),
    ] = "",
    output_tokens: Annotated[
        str, request_option("Answer length, in the same form.", "TOKENS", "64")
    ] = "",
    max_tokens: Annotated[
        int,
        request_option(
            "Limit of answers to --prompts or the demo model's tasks; 0: none.", "TOKENS", min=0
        ),
    ] = 0,
    temperature: Annotated[float, request_option("0 is greedy.", min=0)] = 0.0,
    ignore_eos: Annotated[
        bool | None,
        request_option(
            "Whether answers run to max_tokens.",
            default="ignore for random words",
            names=["--ignore-eos/--stop-at-eos"],
        ),
    ] = None,
    api_key: ApiKeyOption = "",
    sla: Annotated[
        list[str] | None,
        goodput_option(
            "Budgets for goodput: interactive:ttft_s=1,tpot_s=0.05,mtpot_s=0.5; repeatable.",
            "CLASS:BUDGETS",
            "the gateway's classes",
        ),
    ] = None,
    as_class: Annotated[
        list[str] | None,
        goodput_option(
            "SLA class that requests name and are judged by; several in turn.",
            "CLASS,…",
            "none",
        ),
    ] = None,
    json: Annotated[
        Path | None, output_option("Write all figures and requests as JSON.", "FILE", "none")
    ] = None,
    plot: Annotated[
        Path | None,
        output_option("Plot TTFT, TPOT and the course of the load (.png, .svg).", "FILE", "none"),
    ] = None,
) -> None:
    """Load OpenAI-compatible servers and report latency, throughput and goodput.

    Ctrl-C ends the load early and reports what was measured.
    """
    addresses = server_addresses([*(urls or []), *(server or [])])
    rates = parse_rates(rate)
    if rates and concurrency:
        raise UsageError("--rate selects an open loop and --concurrency a closed loop: set one")
    if endpoint not in ENDPOINTS:
        raise UsageError(f"--endpoint takes {' or '.join(ENDPOINTS)}{near(endpoint, ENDPOINTS)}")
    if prompts and (input_tokens or output_tokens):
        raise UsageError("--prompts sets the lengths: remove --input-tokens and --output-tokens")
    check_outputs(json, plot, inputs=[prompts])
    from foretoken.bench.load import Load
    from foretoken.bench.run import Plan

    workload = build_workload(prompts, input_tokens, output_tokens, max_tokens, endpoint == "chat",
                         temperature, ignore_eos)  # fmt: skip
    named = [name.strip() for text in as_class or () for name in text.split(",") if name.strip()]
    classes = budgets_by_class(sla or [], named)
    count = requests or (0 if seconds else DEFAULT_REQUESTS)
    load = Load(
        count, seconds, rates[0] if rates else 0.0, arrivals, concurrency or DEFAULT_CONCURRENCY
    )
    plan = Plan(
        addresses, load, workload, classes, model, api_key, tuple(named),
        rounds or (COMPARED_ROUNDS if len(addresses) > 1 else 1), warm_up, timeout, seed,
    )  # fmt: skip
    _run(plan, rates or [0.0], json, plot)


def _run(plan: "Plan", rates: Sequence[float], json: Path | None, plot: Path | None) -> None:
    import uvloop
    from rich.console import Console

    from foretoken.bench.report import as_json, tables, write_json
    from foretoken.bench.sweep import sweep_json, sweep_tables
    from services.runtime.process_limits import raise_open_file_limit

    raise_open_file_limit()
    with _progress() as on_progress:
        results, stopped = uvloop.run(_run_until_interrupt(plan, rates, on_progress))
    console = Console(highlight=False)
    console.width = max(console.width, MIN_WIDTH)
    swept = len(rates) > 1
    if swept:
        console.print(sweep_tables(results))
    for result in () if swept else results:
        for table in tables(result.outcomes, result.plan):
            console.print(table)
    if json and results:
        last = results[-1]
        write_json(json, sweep_json(results) if swept else as_json(last.outcomes, last.plan))
    if plot and results:
        from foretoken.bench.plot import draw

        draw(plot, results[-1].outcomes)
    if stopped:
        raise typer.Exit(INTERRUPTED)


async def _run_until_interrupt(
    plan: "Plan", rates: Sequence[float], on_progress: "OnProgress"
) -> "tuple[list[RateResult], bool]":
    """Returns the results, partial after Ctrl-C, and whether Ctrl-C was pressed."""
    import asyncio
    import signal

    from foretoken.bench.sweep import sweep

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await sweep(plan, rates, stop, on_progress), stop.is_set()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    """Shows a progress bar while the block runs."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from foretoken.bench.drive import LoadProgress
    from foretoken.bench.load import Load
    from foretoken.running.console.bar import ProgressBar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with ProgressBar("finding the served model", *columns) as bar:

        def update(what: str, load: Load, progress: LoadProgress) -> None:
            failed = f", {progress.failed} failed" if progress.failed else ""
            total = f" of {load.max_requests}" if load.max_requests else ""
            in_flight = progress.sent - progress.ended
            text = f"{what}: {progress.ended}{total} done, {in_flight} in flight{failed}"
            bar.show(text, progress.ended, load.max_requests, what)

        yield update
