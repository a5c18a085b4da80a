"""`python -m observability.grafana.build` writes each dashboard as JSON beside this file."""

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from observability.grafana import forecasts, memory, scheduling, sla, workers

FOLDER = Path(__file__).parent
MAKERS = {
    "sla": sla.dashboard,
    "scheduling": scheduling.dashboard,
    "memory": memory.dashboard,
    "forecasts": forecasts.dashboard,
    "workers": workers.dashboard,
}


def files() -> dict[str, str]:
    """The content of each file by name."""
    encoder = JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False)
    return {f"{name}.json": encoder.encode(make()) + "\n" for name, make in MAKERS.items()}


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
