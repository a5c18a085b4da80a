"""SLAs as options: `ttft=1s,tpot=50ms,mtpot=500ms`."""

from services.core import Sla

FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "mtpot": "mtpot_s"}
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}


def parse_sla(text: str) -> Sla:
    """The SLA of an option; an empty text is one without budgets. Raises ValueError naming the part
    that cannot be read."""
    budgets: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in FIELDS:
            raise ValueError(f"sla: unknown budget {name!r}; known: {', '.join(FIELDS)}")
        budgets[FIELDS[name]] = _seconds(part, value)
    return Sla("given" if budgets else "none", **budgets)


def _seconds(part: str, text: str) -> float:
    unit = next((unit for unit in ("ms", "min", "s") if text.endswith(unit)), "")
    try:
        seconds = float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"sla: {part!r} is not a budget; use for example ttft=1s or tpot=50ms")
    return seconds
