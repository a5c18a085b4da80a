"""Recording: workloads from logs of servers, and traces written from workloads.

Four forms are read, distinguished by their first line:

  event log      of foretoken's scheduler (`--set scheduler.event_log=FILE`): arrivals and true
                 lengths of every request that finished
  request log    JSON lines of an OpenAI server or proxy, one finished request a line: a time
                 (`arrival_s`, `created`, `timestamp` or `time`; seconds or ISO 8601) and a `usage`
                 with prompt_tokens and completion_tokens, at the top or under `response`
  benchmark      the JSON of `vllm bench serve --save-result --save-detailed`: start_times,
                 input_lens and output_lens
  Mooncake trace JSON lines with timestamp in milliseconds, input_length, output_length and
                 hash_ids, the numbers of the prompt's blocks (Qin et al., FAST 2025)
"""

import csv
import gzip
import io
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from services.core import FinishReason
from services.scheduler.core import events as ev
from services.scheduler.observe.event_log import MARK, read
from simulator.rows import writing
from simulator.workload.trace import ARRIVAL, HASH_IDS, INPUT, KIND, OUTPUT, PROMPT
from simulator.workload.workload import Workload

TIME_KEYS = (ARRIVAL, "created", "timestamp", "time")
BENCHMARK_KEYS = ("start_times", "input_lens", "output_lens")
MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
FORMS = (
    "foretoken's event log, JSON lines with a time and a usage, vLLM's benchmark JSON, or a "
    "Mooncake trace"
)


class Row(NamedTuple):
    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_recording(path: Path) -> Workload:
    """Reads the finished requests of a log, by arrival. Raises ValueError that names file and line
    for a log of another form or without a finished request."""
    try:
        first = _first_line(path)
        if MARK in first:
            rows = list(_event_log_rows(path))
        elif set(BENCHMARK_KEYS) <= first.keys():
            rows = list(_benchmark_rows(path, first))
        elif set(MOONCAKE_KEYS) <= first.keys():
            rows = list(_mooncake_rows(path))
        else:
            rows = list(_request_log_rows(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    if not rows:
        raise ValueError(f"{path} has no finished request")
    rows.sort()
    arrival_s, inputs, outputs, hash_ids = zip(*rows, strict=True)
    return Workload(
        path.name.split(".")[0],
        np.array(arrival_s) - arrival_s[0],
        np.array(inputs),
        np.array(outputs),
        hash_ids=hash_ids if any(hash_ids) else (),
    )


def write_trace(path: Path, workload: Workload) -> None:
    """Writes a trace for `read_trace`, compressed if the name ends in .gz. Raises ValueError for a
    file that cannot be written."""
    with writing(path), _create(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        hash_ids = [" ".join(map(str, ids)) for ids in workload.hash_ids]
        extra = {KIND: workload.kinds, PROMPT: workload.prompts, HASH_IDS: hash_ids}
        extra = {name: column for name, column in extra.items() if column}
        writer.writerow([ARRIVAL, INPUT, OUTPUT, *extra])
        arrivals = (f"{arrival_s:.6f}" for arrival_s in workload.arrival_s.tolist())
        columns = (workload.input_tokens.tolist(), workload.output_tokens.tolist())
        writer.writerows(zip(arrivals, *columns, *extra.values(), strict=True))


def _create(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return gzip.open(path, "wt", newline="")
    return path.open("w", newline="")


def _first_line(path: Path) -> Mapping[str, object]:
    with path.open("rb") as file:
        line = file.readline()
    value = _parse(line)
    if value is None:
        value = _parse(path.read_bytes())  # a document over several lines
    if value is None:
        raise ValueError(f"{path} is not a readable log: it must be {FORMS}")
    return value


def _parse(text: bytes) -> Mapping[str, object] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _event_log_rows(path: Path) -> Iterator[Row]:
    """Arrivals are on the scheduler's clock. A request that was submitted again after a fault
    arrives once, with its whole answer."""
    live: dict[str, tuple[float, int]] = {}
    for step in read(path):
        match step.event:
            case ev.Submitted(request=request):
                live.setdefault(request.request_id, (request.arrival_s, request.prompt_tokens))
            case _:
                pass
        for action in step.actions:
            match action:
                case ev.Learn(outcome=outcome) if outcome.reason in (
                    FinishReason.STOP,
                    FinishReason.LENGTH,
                ):
                    arrival = live.pop(outcome.request_id, None)
                    if arrival and outcome.output_tokens:
                        yield Row(*arrival, outcome.output_tokens)
                case _:
                    pass


def _json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the objects of a file and the place of each."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where, entry = f"{path}, line {number}", _parse(line)
            if entry is None:
                raise ValueError(f"{where} is not a JSON object")
            yield where, entry


def _request_log_rows(path: Path) -> Iterator[Row]:
    rows = (_request_row(entry, where) for where, entry in _json_lines(path))
    yield from (row for row in rows if row)


def _request_row(entry: Mapping[str, object], where: str) -> Row | None:
    """Returns the row of an entry; None for a request without output, such as one that failed."""
    response = entry.get("response")
    sources = (entry, response) if isinstance(response, dict) else (entry,)
    usage = next((s["usage"] for s in sources if isinstance(s.get("usage"), dict)), None)
    if not isinstance(usage, dict):
        return None
    time = next((s[key] for s in sources for key in TIME_KEYS if key in s), None)
    if time is None:
        raise ValueError(f"{where} has no time; it must have {' or '.join(TIME_KEYS)}")
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if not (isinstance(prompt, int) and isinstance(output, int) and prompt >= 1):
        raise ValueError(
            f"{where}: usage must have prompt_tokens and completion_tokens, got {usage}"
        )
    return Row(_seconds(time, where), prompt, output) if output >= 1 else None


def _mooncake_rows(path: Path) -> Iterator[Row]:
    for where, entry in _json_lines(path):
        time, prompt, output = (entry.get(key) for key in MOONCAKE_KEYS)
        ids = entry.get("hash_ids", [])
        if not (isinstance(time, int | float) and isfinite(time)):
            raise ValueError(f"{where}: timestamp must be a number of milliseconds, got {time!r}")
        if not (isinstance(prompt, int) and isinstance(output, int) and prompt >= 1):
            raise ValueError(
                f"{where}: input_length and output_length must be whole numbers, got {prompt!r} "
                f"and {output!r}"
            )
        if not (isinstance(ids, list) and all(isinstance(each, int) for each in ids)):
            raise ValueError(f"{where}: hash_ids must be a list of whole numbers")
        if output >= 1:
            yield Row(time / 1e3, prompt, output, tuple(ids))


def _seconds(time: object, where: str) -> float:
    """Returns a time in seconds; an ISO 8601 time without a zone is in UTC, so that no machine's
    clock change moves it."""
    if isinstance(time, int | float) and isfinite(time):
        return float(time)
    try:
        parsed = datetime.fromisoformat(str(time))
    except ValueError:
        raise ValueError(f"{where}: {time!r} is not a time in seconds or ISO 8601") from None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def _benchmark_rows(path: Path, document: Mapping[str, object]) -> Iterator[Row]:
    columns = [document[key] for key in BENCHMARK_KEYS]
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < len(columns) or len({len(column) for column in lists}) > 1:
        raise ValueError(f"{path}: {', '.join(BENCHMARK_KEYS)} must be lists of one length")
    for number, (time, prompt, output) in enumerate(zip(*lists, strict=True)):
        where = f"{path}, request {number}"
        if not (isinstance(prompt, int) and isinstance(output, int)):
            raise ValueError(
                f"{where}: input_lens and output_lens must be whole numbers, got {prompt!r} and "
                f"{output!r}"
            )
        if prompt >= 1 and output >= 1:  # a failed request has no output
            yield Row(_seconds(time, where), prompt, output)
