"""`python -m observability.grafana.build` writes each dashboard as JSON beside this file."""

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from observability.grafana import forecasts, memory, picker, scheduling, sla, workers
from observability.grafana.board import render

FOLDER = Path(__file__).parent
BOARDS = (
    sla.BOARD,
    scheduling.BOARD,
    memory.BOARD,
    forecasts.BOARD,
    workers.BOARD,
    picker.BOARD,
)


def files() -> dict[str, str]:
    """The content of each file by name."""
    encoder = JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False)
    return {f"{board.name.lower()}.json": encoder.encode(render(board)) + "\n" for board in BOARDS}


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
