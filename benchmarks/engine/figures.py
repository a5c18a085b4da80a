"""Measured figures by key, tables, and targets.

A key is a path: figure, dtype, model, streams, context; `prefill_tok_s`, `decode_tok_s` and
`cold_start_s` have the system after the figure.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.engine.cases import LONE, SYSTEMS, Case, Model, RunPlan
from benchmarks.harness.report import figure, show

Key = tuple[str, ...]
GRPC_REACH = 0.9  # of the engine, at the largest number of streams
PREFILL_REACH = 1.0  # of vLLM's
COLD_START_S = 6.0
PARTS = ("prefill_tok_s", "decode_tok_s")


class Measurements:
    """Repeats of every measurement."""

    def __init__(self) -> None:
        self.values: dict[Key, list[float]] = defaultdict(list)

    def add(self, path: Key, value: float) -> None:
        self.values[path].append(value)

    def median(self, path: Key) -> float | None:
        """None if it was not measured."""
        return median(self.values[path]) if path in self.values else None

    def medians(self) -> dict[str, Any]:
        return nested({path: median(values) for path, values in self.values.items()})

    def repeats(self) -> dict[str, Any]:
        return nested(self.values)


def nested(flat: Mapping[Key, object]) -> dict[str, Any]:
    """One dictionary per level of the paths."""
    root: dict[str, Any] = {}
    for path, value in flat.items():
        at = root
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = value
    return root


def path_of(what: Key, dtype: str, model: Model, case: Case) -> Key:
    return (*what, dtype, model.name, str(case.streams), str(case.context))


def kinds() -> list[Key]:
    """Rows of a table: whole answers by system, then the parts of the bare loops."""
    whole = [(f"{system}_tok_s",) for system in SYSTEMS]
    return [*whole, *((part, system) for part in PARTS for system in LONE)]


def tables(taken: Measurements, asked: RunPlan) -> None:
    for model in asked.models:
        for dtype in asked.dtypes:
            for context in asked.contexts:
                _table(taken, asked, model, dtype, context)


def _table(taken: Measurements, asked: RunPlan, model: Model, dtype: str, context: int) -> None:
    cases = [case for case in asked.cases(model) if case.context == context]
    if not cases:
        return
    rows = []
    for kind in kinds():
        found = [taken.values.get(path_of(kind, dtype, model, case)) for case in cases]
        if any(found):
            rows.append([" ".join(kind), *(figure(f) if f else "–" for f in found)])
    prompt, output = cases[0].prompt_tokens, cases[0].output_tokens
    show(
        f"{model.name}, {dtype}, context {context} ({prompt} + {output} tokens): tokens/s by "
        "streams, median (lowest–highest)",
        ["", *(str(case.streams) for case in cases)],
        rows,
        width=150,
    )


def reaches(taken: Measurements, asked: RunPlan) -> list[str]:
    """One line per target, with the ratio and the target; none for figures that were not
    measured."""
    lines: list[str] = []
    for model in asked.models:
        for dtype in asked.dtypes:
            for context in asked.contexts:
                cases = [case for case in asked.cases(model) if case.context == context]
                lines += _of_cases(taken, cases, model, dtype)
            start_s = taken.median(("cold_start_s", "foretoken", dtype, model.name))
            if start_s is not None:
                missed = ", missed" if start_s > COLD_START_S else ""
                lines.append(
                    f"{model.name} {dtype}: cold start {start_s:.1f} s "
                    f"(reach {COLD_START_S:g}{missed})"
                )
    return lines


def _of_cases(taken: Measurements, cases: Sequence[Case], model: Model, dtype: str) -> list[str]:
    compared: list[tuple[str, Key, Key, float, Sequence[Case]]] = [
        ("engine/vLLM", ("engine_tok_s",), ("vllm_tok_s",), model.reach, cases),
        ("prefill engine/vLLM", ("prefill_tok_s", "engine"), ("prefill_tok_s", "vllm"),
         PREFILL_REACH, cases),
        ("HTTP/vLLM's HTTP", ("http_tok_s",), ("vllm_http_tok_s",), model.reach, cases),
        ("gRPC/engine", ("grpc_tok_s",), ("engine_tok_s",), GRPC_REACH, cases[-1:]),
    ]  # fmt: skip
    lines = []
    for words, ours, theirs, reach, of in compared:
        for case in of:
            own = taken.median(path_of(ours, dtype, model, case))
            other = taken.median(path_of(theirs, dtype, model, case))
            if own is None or other is None:
                continue
            missed = ", missed" if own / other < reach else ""
            lines.append(
                f"{model.name} {dtype}, context {case.context}: {words} at {case.streams} streams: "
                f"{own / other:.2f} (reach {reach:g}{missed})"
            )
    return lines


def decode_tok_s(case: Case, whole_tok_s: float, prefill_tok_s: float) -> float | None:
    """Tokens after the first divided by the time that they add to the prefill; None if noise leaves
    no time, or without a second token."""
    whole_s = case.streams * case.output_tokens / whole_tok_s
    prefill_s = case.streams * case.prompt_tokens / prefill_tok_s
    later = case.streams * (case.output_tokens - 1)
    return later / (whole_s - prefill_s) if later and whole_s > prefill_s else None
