"""Parses the arguments of `foretoken bench`: addresses, rates, workload, and SLA classes."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.client.address import resolve_server
from foretoken.commands.usage import UsageError, near

if TYPE_CHECKING:
    from foretoken.bench.measures import Budgets
    from foretoken.bench.run import Workload


def server_addresses(given: Sequence[str]) -> list[str]:
    """Returns `http…`, `grpc://…` or `unix:…` for each address. Raises ValueError."""
    if not given:
        raise UsageError("no server given: set --server, for example http://127.0.0.1:8000")
    return [str(resolve_server(text, prefer_http=True)) for text in given]


def parse_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        rates = [-1.0]
    if any(not 0 < rate < inf for rate in rates):
        raise UsageError(f"--rate takes requests per second, as 5 or 5,10,20; got {text!r}")
    return rates


def build_workload(
    file: Path | None, inputs: str, outputs: str, max_tokens: int, chat: bool,
    temperature: float, ignore_eos: bool | None,
) -> "Workload":  # fmt: skip
    from foretoken.bench.lengths import parse_lengths
    from foretoken.bench.prompts import from_file
    from foretoken.bench.run import Workload
    from models.words import WORDS

    return Workload(
        WORDS,
        from_file(file, max_tokens or None, chat) if file else None,
        parse_lengths(inputs, "--input-tokens") if inputs else None,
        parse_lengths(outputs, "--output-tokens") if outputs else None,
        max_tokens=max_tokens or None,
        chat=chat,
        temperature=temperature,
        ignore_eos=ignore_eos,
    )


def budgets_by_class(given: Sequence[str], named: Sequence[str]) -> "Mapping[str, Budgets]":
    """Returns the budgets by class: those given, else the gateway's. Raises UsageError."""
    from foretoken.bench.measures import Budgets
    from gateway.config import SLA_CLASSES
    from gateway.types.sla_classes import BUDGETS, SlaError, parse_header

    known = {name: Budgets(c.ttft_s, c.tpot_s, c.mtpot_s) for name, c in SLA_CLASSES.items()}
    classes = {}
    for text in given:
        name, colon, budgets = text.partition(":")
        try:
            other, parsed = parse_header(budgets)
        except SlaError as error:
            raise UsageError(f"--sla {text}: {error}") from None
        wrong = [key for key in parsed if key not in BUDGETS]
        if not (name and colon and parsed) or other or wrong or min(parsed.values()) <= 0:
            raise UsageError(
                f"--sla takes CLASS:BUDGET=SECONDS,… of {', '.join(BUDGETS)}; got {text!r}"
            )
        classes[name] = Budgets(**parsed)
    missing = [name for name in named if name not in classes and name not in known]
    if missing:
        raise UsageError(
            f"--as-class {missing[0]} has no budgets{near(missing[0], known)}; set them with "
            f"--sla {missing[0]}:ttft_s=…"
        )
    if named:
        return {name: classes.get(name, known.get(name, Budgets())) for name in named}
    return classes or {name: each for name, each in known.items() if each != Budgets()}
