"""SLAs as options: `ttft=1s,tpot=50ms,mtpot=500ms`, or the name of a paper's."""

from services.core import Sla

FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "mtpot": "mtpot_s"}
# Past-Future Scheduler (Gong et al., ASPLOS 2025), §5: of 7B and 13B models, and of 70B.
CLASSES = {
    "past-future": Sla("past-future", ttft_s=10.0, mtpot_s=1.5),
    "past-future-70b": Sla("past-future-70b", ttft_s=15.0, mtpot_s=5.0),
}
UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0}


def parse_sla(text: str) -> Sla:
    """The SLA of an option; an empty text is one without budgets. Raises ValueError naming the part
    that cannot be read."""
    if text.strip() in CLASSES:
        return CLASSES[text.strip()]
    budgets: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in FIELDS:
            raise ValueError(
                f"sla: unknown budget {name!r}; known: {', '.join((*FIELDS, *CLASSES))}"
            )
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
