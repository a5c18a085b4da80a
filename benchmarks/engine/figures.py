"""Tables and targets of the engine benchmark.

A key has the parts figure, dtype, model, streams, context. `prefill_tok_s`, `decode_tok_s` and
`cold_start_s` have the system after the figure.
"""

from collections.abc import Iterator

from benchmarks.engine.cases import BARE_LOOPS, SYSTEMS, Case, Model, RunPlan
from benchmarks.harness.report import Key, Measurements, figure, show

GRPC_TARGET = 0.9  # of the engine, at the largest number of streams
PREFILL_TARGET = 1.0  # of vLLM
COLD_START_TARGET_S = 6.0


def key_of(figure: Key, dtype: str, model: Model, case: Case) -> Key:
    return (*figure, dtype, model.name, str(case.streams), str(case.context))


# Rows of a table: whole answers by system, then the parts of the bare loops.
ROWS: list[Key] = [(f"{system}_tok_s",) for system in SYSTEMS]
ROWS += [(part, system) for part in ("prefill_tok_s", "decode_tok_s") for system in BARE_LOOPS]


def show_tables(measured: Measurements, plan: RunPlan) -> None:
    """Prints a table for each model, dtype and context."""
    for model, dtype, cases in _groups(plan):
        rows = []
        for row in ROWS:
            found = [measured.values.get(key_of(row, dtype, model, case)) for case in cases]
            if any(found):
                rows.append([" ".join(row), *(figure(f) if f else "–" for f in found)])
        first = cases[0]
        show(
            f"{model.name}, {dtype}, context {first.context} ({first.prompt_tokens} + "
            f"{first.output_tokens} tokens): tokens/s by streams, median (lowest–highest)",
            ["", *(str(case.streams) for case in cases)],
            rows,
            width=150,
        )


def targets(measured: Measurements, plan: RunPlan) -> list[str]:
    """Returns one line per measured target, with the ratio and the target."""
    lines = []
    for model, dtype, cases in _groups(plan):
        comparisons: list[tuple[str, Key, Key, float, list[Case]]] = [
            ("engine/vLLM", ("engine_tok_s",), ("vllm_tok_s",), model.target, cases),
            ("prefill engine/vLLM", ("prefill_tok_s", "engine"), ("prefill_tok_s", "vllm"),
             PREFILL_TARGET, cases),
            ("HTTP/vLLM's HTTP", ("http_tok_s",), ("vllm_http_tok_s",), model.target, cases),
            ("gRPC/engine", ("grpc_tok_s",), ("engine_tok_s",), GRPC_TARGET, cases[-1:]),
        ]  # fmt: skip
        for name, numerator, denominator, target, compared in comparisons:
            for case in compared:
                above = measured.median(key_of(numerator, dtype, model, case))
                below = measured.median(key_of(denominator, dtype, model, case))
                if above is not None and below is not None:
                    missed = ", missed" if above / below < target else ""
                    lines.append(
                        f"{model.name} {dtype}, context {case.context}: {name} at {case.streams} "
                        f"streams: {above / below:.2f} (target {target:g}{missed})"
                    )
    for model in plan.models:
        for dtype in plan.dtypes:
            start_s = measured.median(("cold_start_s", "foretoken", dtype, model.name))
            if start_s is not None:
                missed = ", missed" if start_s > COLD_START_TARGET_S else ""
                lines.append(
                    f"{model.name} {dtype}: cold start {start_s:.1f} s "
                    f"(target {COLD_START_TARGET_S:g}{missed})"
                )
    return lines


def _groups(plan: RunPlan) -> Iterator[tuple[Model, str, list[Case]]]:
    """Yields the measured cases of each model, dtype and context."""
    for model in plan.models:
        for dtype in plan.dtypes:
            for context in plan.contexts:
                if cases := [case for case in plan.cases(model) if case.context == context]:
                    yield model, dtype, cases


def decode_tok_s(case: Case, whole_tok_s: float, prefill_tok_s: float) -> float | None:
    """Returns the rate of the tokens after the first, over the time that they add to the prefill.
    Returns None when noise leaves no time, or without a second token."""
    whole_s = case.streams * case.output_tokens / whole_tok_s
    prefill_s = case.streams * case.prompt_tokens / prefill_tok_s
    later_tokens = case.streams * (case.output_tokens - 1)
    if not later_tokens or whole_s <= prefill_s:
        return None
    return later_tokens / (whole_s - prefill_s)
