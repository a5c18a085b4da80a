"""SLAs as options: `ttft=1s,tpot=50ms,mtpot=500ms`, or the name of a class of CLASSES; with `p=99`
for a share of requests."""

from dataclasses import dataclass

from services.core import Sla

FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "mtpot": "mtpot_s"}
# Past-Future Scheduler (Gong et al., ASPLOS 2025), §5: of 7B and 13B models, and of 70B.
CLASSES = {
    "past-future": Sla("past-future", ttft_s=10.0, mtpot_s=1.5),
    "past-future-70b": Sla("past-future-70b", ttft_s=15.0, mtpot_s=5.0),
}
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}  # seconds; ms before s, its last letter
PERCENTAGE = "p"
DEFAULT_SHARE = 0.99


@dataclass(frozen=True, slots=True)
class SlaTarget:
    """The share of all requests that must meet an SLA."""

    sla: Sla
    share: float


def parse_sla(text: str) -> Sla:
    """Returns the SLA of an option; one without budgets for an empty text. Raises ValueError naming
    the part that cannot be read."""
    parts = _split(text)
    if PERCENTAGE in parts:
        raise ValueError(
            f"sla: {PERCENTAGE}={parts[PERCENTAGE]} belongs to `foretoken plan`; leave it out, "
            "goodput is the share that meets the budgets"
        )
    return _read_sla(parts)


def parse_target(text: str) -> SlaTarget:
    """Returns the SLA and `p`, the percentage of requests that must meet it: 99 if it is not given.
    Raises ValueError naming the part that cannot be read, and for an SLA without budgets."""
    parts = _split(text)
    percentage = parts.pop(PERCENTAGE, None)
    share = DEFAULT_SHARE if percentage is None else _read_share(percentage)
    sla = _read_sla(parts)
    if not parts:
        raise ValueError("sla: give a budget, such as ttft=1s or tpot=50ms")
    return SlaTarget(sla, share)


def _split(text: str) -> dict[str, str]:
    """Returns the values of `name=value,…` by name; an empty one for a name alone."""
    parts: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name in parts:
            raise ValueError(f"sla: {name} is given twice")
        parts[name] = value
    return parts


def _read_sla(parts: dict[str, str]) -> Sla:
    """Returns the class that is the only part, else an SLA with the budgets."""
    for name, value in parts.items():
        if name in CLASSES:
            if value or len(parts) > 1:
                raise ValueError(f"sla: {name} sets all budgets; give it alone, without a value")
            return CLASSES[name]
        if name not in FIELDS:
            raise ValueError(
                f"sla: unknown budget {name!r}; known: {', '.join((*FIELDS, *CLASSES))}"
            )
    budgets = {FIELDS[name]: _read_seconds(name, value) for name, value in parts.items()}
    return Sla("given" if budgets else "none", **budgets)


def _read_seconds(name: str, text: str) -> float:
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        seconds = float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"sla: {f'{name}={text}'!r} is not a budget; use for example ttft=1s or tpot=50ms"
        )
    return seconds


def _read_share(text: str) -> float:
    """Returns a percentage as a share. A value of at most 1 is refused: it may mean a share."""
    try:
        percentage = float(text)
    except ValueError:
        percentage = 0.0
    if not 1 < percentage <= 100:
        raise ValueError(
            f"sla: {f'{PERCENTAGE}={text}'!r} is not a percentage above 1 and up to 100; use for "
            "example p=99"
        )
    return percentage / 100
