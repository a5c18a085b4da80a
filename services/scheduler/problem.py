"""A planning round put as values: the queue's head and the running, in columns."""

from collections.abc import Callable, Iterable, Mapping

from services.forecast import Forecast
from services.scheduler.contest import Contest
from services.scheduler.events import AskBatch, Columns, Group
from services.scheduler.jobs import Job, WorkerJobs
from services.scheduler.presets import Preset


def pose(
    round_number: int,
    preset: Preset,
    workers: Mapping[str, WorkerJobs],
    contests: Mapping[str, Contest],
) -> AskBatch:
    """The batcher's question for these contests. Forecasts that many requests share go once."""
    table: dict[object, int] = {}
    forecasts: list[Forecast] = []

    def row(job: Job) -> int:
        forecast = job.forecast
        shared = (forecast.shared_key, forecast.version, forecast.max_tokens)
        key = shared if forecast.shared_key else id(forecast)
        if key not in table:
            table[key] = len(forecasts)
            forecasts.append(forecast)
        return table[key]

    groups = tuple(
        Group(
            name,
            workers[name].view.kv_tokens,
            contest.most_running,
            _columns(contest.holders, row),
            _columns(contest.asking, row),
        )
        for name, contest in contests.items()
    )
    return AskBatch(round_number, preset.batcher, dict(preset.params), tuple(forecasts), groups)


def _columns(jobs: Iterable[Job], row: Callable[[Job], int]) -> Columns:
    rows = [
        (job.request.prompt_tokens, job.output_tokens, job.request.max_tokens, row(job))
        for job in jobs
    ]
    return Columns(*zip(*rows, strict=True)) if rows else Columns()
