"""`foretoken bench`: load OpenAI-compatible servers and report latency, throughput and goodput."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.bench_arguments import (
    budgets_by_class,
    build_workload,
    http_addresses,
    parse_rates,
)
from foretoken.commands.options import ApiKeyOption
from foretoken.commands.usage import UsageError, near, require_folders

if TYPE_CHECKING:
    from foretoken.bench.run import OnProgress, Plan
    from foretoken.bench.sweep import RateResult

DEFAULT_REQUESTS, DEFAULT_CONCURRENCY = 200, 8
COMPARED_ROUNDS = 3
LOAD, REQUESTS, GOODPUT, OUTPUT = "Load", "Requests", "Goodput", "Output"
ENDPOINTS = ("chat", "completions")
MIN_WIDTH = 120  # columns that a table needs
INTERRUPTED = 130  # exit status after Ctrl-C


def bench(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", help="Servers, as --server."),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            "--compare",
            metavar="ADDRESS",
            help="http://host:port or host:port; several are loaded in turns and compared.",
            rich_help_panel=LOAD,
            show_default="required",
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Requests per round.",
            rich_help_panel=LOAD,
            show_default="200, unless --seconds is set",
        ),
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0,
            help="Duration of a round; 0: until --requests are sent.",
            rich_help_panel=LOAD,
        ),
    ] = 0.0,
    rate: Annotated[
        str,
        typer.Option(
            metavar="R,R,…",
            help="Open loop: requests per second. Several rates are swept, lowest first.",
            rich_help_panel=LOAD,
            show_default="a closed loop",
        ),
    ] = "",
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Arrivals of an open loop: poisson or constant.",
            rich_help_panel=LOAD,
        ),
    ] = "poisson",
    concurrency: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Closed loop: requests in flight.",
            rich_help_panel=LOAD,
            show_default="8",
        ),
    ] = 0,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Rounds per server.",
            rich_help_panel=LOAD,
            show_default="1; 3 to compare servers",
        ),
    ] = 0,
    warm_up: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Requests before the measurement.", rich_help_panel=LOAD
        ),
    ] = 8,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="S", min=0.001, help="Timeout of an answer, in seconds.", rich_help_panel=LOAD
        ),
    ] = 300.0,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Seed of prompts and arrivals, to repeat a load.", rich_help_panel=LOAD
        ),
    ] = 0,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Model name.",
            rich_help_panel=REQUESTS,
            show_default="the first that /v1/models lists",
        ),
    ] = "",
    endpoint: Annotated[
        str,
        typer.Option(metavar="NAME", help="chat or completions.", rich_help_panel=REQUESTS),
    ] = "chat",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=REQUESTS,
            help="JSON lines with `prompt` or `messages`, and optionally `max_tokens`.",
            show_default="random words; for the demo model, its tasks",
        ),
    ] = None,
    input_tokens: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            rich_help_panel=REQUESTS,
            show_default="128",
            help="Prompt length: 128, 64-512, or lognormal:MEDIAN,SIGMA.",
        ),
    ] = "",
    output_tokens: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            rich_help_panel=REQUESTS,
            show_default="64",
            help="Answer length, in the same form.",
        ),
    ] = "",
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            min=0,
            help="Limit of answers to --prompts or the demo model's tasks; 0: none.",
            rich_help_panel=REQUESTS,
        ),
    ] = 0,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=REQUESTS)
    ] = 0.0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Whether answers run to max_tokens.",
            rich_help_panel=REQUESTS,
            show_default="ignore for random words",
        ),
    ] = None,
    api_key: ApiKeyOption = "",
    sla: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS:BUDGETS",
            rich_help_panel=GOODPUT,
            help="Budgets for goodput: interactive:ttft_s=1,tpot_s=0.05,mtpot_s=0.5; repeatable.",
            show_default="the gateway's classes",
        ),
    ] = None,
    as_class: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS,…",
            rich_help_panel=GOODPUT,
            show_default="none",
            help="SLA class that requests name and are judged by; several in turn.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write all figures and requests as JSON.",
            rich_help_panel=OUTPUT,
            show_default="none",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plot TTFT, TPOT and the course of the load (.png, .svg).",
            rich_help_panel=OUTPUT,
            show_default="none",
        ),
    ] = None,
) -> None:
    """Load OpenAI-compatible servers and report latency, throughput and goodput.

    Ctrl-C ends the load early and reports what was measured.
    """
    addresses = http_addresses([*(urls or []), *(server or [])])
    rates = parse_rates(rate)
    if rates and concurrency:
        raise UsageError("--rate selects an open loop and --concurrency a closed loop: set one")
    if endpoint not in ENDPOINTS:
        raise UsageError(f"--endpoint takes {' or '.join(ENDPOINTS)}{near(endpoint, ENDPOINTS)}")
    if prompts and (input_tokens or output_tokens):
        raise UsageError("--prompts sets the lengths: remove --input-tokens and --output-tokens")
    require_folders(json, plot)
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

    from foretoken.bench.files import write_json
    from foretoken.bench.report import as_json, tables
    from foretoken.bench.sweep import sweep_json, sweep_tables
    from services.runtime.open_files import raise_open_file_limit

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
    """Return the results, partial after Ctrl-C, and whether Ctrl-C was pressed."""
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
    """Show a progress bar on stderr while the block runs, if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from foretoken.bench.drive import Progress as LoadProgress
    from foretoken.bench.load import Load

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("finding the served model", total=None)
        current = ""

        def update(what: str, load: Load, progress: LoadProgress) -> None:
            nonlocal current
            if what != current:
                current = what
                bar.reset(task)
            failed = f", {progress.failed} failed" if progress.failed else ""
            total = f" of {load.max_requests}" if load.max_requests else ""
            in_flight = progress.sent - progress.ended
            text = f"{what}: {progress.ended}{total} done, {in_flight} in flight{failed}"
            bar.update(
                task,
                description=text,
                completed=progress.ended,
                total=load.max_requests or None,
            )

        yield update
