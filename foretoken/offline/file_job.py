"""A job with a file of requests, one on each line."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretoken.offline.background import BackgroundSystem
from foretoken.offline.files import AnswerFile, count_lines, read_requests
from foretoken.offline.job import Handlers, JobRunner, OfflineRequest
from gateway.faces.http.offline.requests import PreparedRequest
from services.runtime.errors import ServiceError

WINDOW = 4_096  # requests that are read ahead and ordered; about 10 MB


@dataclass(frozen=True)
class FileJob:
    """Answers of the lines of `file` are added to `answers`. `on_fault` receives a sentence for
    each refused line, `on_end` the lines that have ended and all lines."""

    file: Path
    answers: AnswerFile
    on_fault: Callable[[str], None]
    on_end: Callable[[int, int], None]

    def run(self, background: BackgroundSystem, in_flight: int, by_forecast: bool) -> None:
        """Returns when each line has an answer or a fault."""
        total, done = count_lines(self.file), len(self.answers.answered)

        def end() -> None:
            nonlocal done
            done += 1
            self.on_end(done, total)

        def on_fault(request: OfflineRequest, error: ServiceError) -> None:
            self.on_fault(f"{self.file}, {request.name}: {error.message}")
            self.answers.add_fault(request, error)
            end()

        def on_answer(request: OfflineRequest, body: dict[str, object]) -> None:
            self.answers.add_answer(request, body)
            end()

        runner = JobRunner.for_system(background.system, in_flight, by_forecast)
        requests = read_requests(self.file, self.answers.answered, on_fault)
        handlers = Handlers(PreparedRequest.encode, on_answer, on_fault, lambda _: None)
        with self.answers:
            background.run(runner.run(requests, WINDOW, handlers))
