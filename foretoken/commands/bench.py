"""`foretoken bench`: load any OpenAI-compatible server, and say how it did."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.client.address import API_KEY_VARIABLE
from foretoken.commands.usage import UsageError, near

if TYPE_CHECKING:
    from foretoken.bench.measures import Budgets
    from foretoken.bench.run import Asking, Outcome, Plan, Tell

DEFAULT_REQUESTS, DEFAULT_CONCURRENCY = 200, 8
COMPARED_ROUNDS = 3
LOAD, ASKED, JUDGED, TOLD = "Load", "What is asked", "What is judged", "What is told"
ENDPOINTS = ("chat", "completions")
WIDTH = 120  # what a table needs; a narrower terminal wraps it
STOPPED = 130  # the status of what Ctrl-C ended


def bench(
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL...", help="http://host:port of a server; several: compared."),
    ] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="More servers, loaded in turns with the same requests.",
            rich_help_panel=LOAD,
            show_default="none",
        ),
    ] = None,
    requests: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Requests a round.",
            rich_help_panel=LOAD,
            show_default="200, or as --seconds last",
        ),
    ] = 0,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0,
            help="Send for so long; 0: until --requests are sent.",
            rich_help_panel=LOAD,
        ),
    ] = 0.0,
    rate: Annotated[
        float,
        typer.Option(
            metavar="R",
            min=0,
            help="Open loop: requests a second, whatever becomes of them.",
            rich_help_panel=LOAD,
            show_default="none: a closed loop",
        ),
    ] = 0.0,
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="HOW", help="Of an open loop: poisson or constant.", rich_help_panel=LOAD
        ),
    ] = "poisson",
    concurrency: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Closed loop: requests at once.",
            rich_help_panel=LOAD,
            show_default="8",
        ),
    ] = 0,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Loads of each server.",
            rich_help_panel=LOAD,
            show_default="1; 3 where servers are compared",
        ),
    ] = 0,
    warm_up: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Requests before it counts.", rich_help_panel=LOAD),
    ] = 8,
    timeout: Annotated[
        float,
        typer.Option(
            metavar="S", min=0.001, help="Seconds an answer may take.", rich_help_panel=LOAD
        ),
    ] = 300.0,
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Of prompts and arrivals: the same load again.", rich_help_panel=LOAD
        ),
    ] = 0,
    model: Annotated[
        str,
        typer.Option(
            help="As the server calls it.",
            rich_help_panel=ASKED,
            show_default="the first that /v1/models lists",
        ),
    ] = "",
    endpoint: Annotated[
        str,
        typer.Option(metavar="NAME", help="chat or completions.", rich_help_panel=ASKED),
    ] = "chat",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=ASKED,
            help="JSON lines with prompt or messages, and max_tokens if you like.",
            show_default="random words, or the demo model's tasks",
        ),
    ] = None,
    input_tokens: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            rich_help_panel=ASKED,
            show_default="128",
            help="Of random words: 128, 64-512, or lognormal:MEDIAN,SIGMA.",
        ),
    ] = "",
    output_tokens: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            rich_help_panel=ASKED,
            show_default="64",
            help="Their answers' length, spelled likewise.",
        ),
    ] = "",
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="TOKENS",
            min=0,
            help="Of answers to a file's or the demo's prompts; 0: open.",
            rich_help_panel=ASKED,
        ),
    ] = 0,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=ASKED)
    ] = 0.0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--heed-eos",
            help="Answers go on to their max_tokens.",
            rich_help_panel=ASKED,
            show_default="ignored for random words",
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            metavar="KEY",
            help="Where the server wants one.",
            rich_help_panel=ASKED,
            show_default="none",
        ),
    ] = "",
    sla: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS:BUDGETS",
            rich_help_panel=JUDGED,
            help="Goodput by it, as interactive:ttft_s=1,tpot_s=0.05,mtpot_s=0.5; repeatable.",
            show_default="the gateway's classes",
        ),
    ] = None,
    as_class: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS",
            rich_help_panel=JUDGED,
            show_default="none",
            help="Requests name it to a foretoken server and are judged by it; several: in turn.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write all figures and requests there.",
            rich_help_panel=TOLD,
            show_default="none",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw TTFT, TPOT and the course of the load there, as .png.",
            rich_help_panel=TOLD,
            show_default="none",
        ),
    ] = None,
) -> None:
    """Load an OpenAI-compatible server and tell its latencies, throughput and goodput.

    Ctrl-C ends it early and tells what there is by then.
    """
    where = [*(urls or []), *(compare or [])]
    if not where:
        raise UsageError("which server? give its address, like http://127.0.0.1:8000")
    if rate and concurrency:
        raise UsageError("--rate makes an open loop and --concurrency a closed one: give one")
    if endpoint not in ENDPOINTS:
        raise UsageError(f"--endpoint takes {' or '.join(ENDPOINTS)}{near(endpoint, ENDPOINTS)}")
    if prompts and (input_tokens or output_tokens):
        raise UsageError(
            "--prompts brings its own lengths: leave --input-tokens and --output-tokens out"
        )
    _require_folders(json, plot)
    from foretoken.bench.load import Load
    from foretoken.bench.run import Plan

    asking = _asking(prompts, input_tokens, output_tokens, max_tokens, endpoint == "chat",
                     temperature, ignore_eos)  # fmt: skip
    classes = _classes(sla or [], as_class or [])
    count = requests or (0 if seconds else DEFAULT_REQUESTS)
    load = Load(count, seconds, rate, arrivals, concurrency or DEFAULT_CONCURRENCY)
    plan = Plan(
        where, load, asking, classes, model, api_key, tuple(as_class or ()),
        rounds or (COMPARED_ROUNDS if len(where) > 1 else 1), warm_up, timeout, seed,
    )  # fmt: skip
    _run(plan, json, plot)


def _run(plan: "Plan", json: Path | None, plot: Path | None) -> None:
    import uvloop
    from rich.console import Console

    from foretoken.bench.files import write_json
    from foretoken.bench.report import as_json, tables
    from services.runtime.open_files import allow_open_files

    allow_open_files()
    with _progress() as tell:
        outcomes, stopped = uvloop.run(_heeding_ctrl_c(plan, tell))
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    for table in tables(outcomes, plan):
        console.print(table)
    if json:
        write_json(json, as_json(outcomes, plan))
    if plot:
        from foretoken.bench.plot import draw

        draw(plot, outcomes)
    if stopped:
        raise typer.Exit(STOPPED)


async def _heeding_ctrl_c(plan: "Plan", tell: "Tell") -> "tuple[list[Outcome], bool]":
    import asyncio
    import signal

    from foretoken.bench.run import bench as run

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    try:
        return await run(plan, stop, tell), stop.is_set()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _asking(
    file: Path | None, inputs: str, outputs: str, max_tokens: int, chat: bool,
    temperature: float, ignore_eos: bool | None,
) -> "Asking":  # fmt: skip
    from foretoken.bench.lengths import length_of
    from foretoken.bench.prompts import from_file
    from foretoken.bench.run import Asking
    from models.words import WORDS

    return Asking(
        WORDS,
        from_file(file, max_tokens or None, chat) if file else None,
        length_of(inputs, "--input-tokens") if inputs else None,
        length_of(outputs, "--output-tokens") if outputs else None,
        max_tokens=max_tokens or None,
        chat=chat,
        temperature=temperature,
        ignore_eos=ignore_eos,
    )


def _classes(given: Sequence[str], named: Sequence[str]) -> "Mapping[str, Budgets]":
    """Budgets by class: those given, else the gateway's that have any. Raises UsageError."""
    from foretoken.bench.measures import Budgets
    from gateway.config import SLA_CLASSES
    from gateway.requests.sla import BUDGETS, SlaError, parse_header

    known = {name: Budgets(c.ttft_s, c.tpot_s, c.mtpot_s) for name, c in SLA_CLASSES.items()}
    classes = {}
    for text in given:
        name, colon, budgets = text.partition(":")
        try:
            other, parsed = parse_header(budgets)
        except SlaError as error:
            raise UsageError(f"--sla {text}: {error}") from None
        wrong = [key for key in parsed if key not in BUDGETS]
        if not (name and colon and parsed) or other or wrong or min(parsed.values()) <= 0:
            raise UsageError(
                f"--sla takes CLASS:BUDGET=SECONDS,… of {', '.join(BUDGETS)}; got {text!r}"
            )
        classes[name] = Budgets(**parsed)
    missing = [name for name in named if name not in classes and name not in known]
    if missing:
        raise UsageError(
            f"--as-class {missing[0]} has no budgets: give --sla {missing[0]}:ttft_s=…"
        )
    if named:
        return {name: classes.get(name, known.get(name, Budgets())) for name in named}
    return classes or {name: each for name, each in known.items() if each != Budgets()}


def _require_folders(*paths: Path | None) -> None:
    """Found out before the work, not after it."""
    for path in paths:
        if path and not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: there is no folder {path.parent}")


@contextmanager
def _progress() -> "Iterator[Tell]":
    """A bar on a terminal's stderr, gone when done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from foretoken.bench.drive import Progress as Far
    from foretoken.bench.load import Load

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("asking what is served", total=None)
        current = ""

        def tell(what: str, load: Load, far: Far) -> None:
            nonlocal current
            if what != current:
                current = what
                bar.reset(task)
            failed = f", {far.failed} failed" if far.failed else ""
            of = f" of {load.most}" if load.most else ""
            said = f"{what}: {far.ended}{of}, {far.sent - far.ended} under way{failed}"
            bar.update(task, description=said, completed=far.ended, total=load.most or None)

        yield tell
