"""`python -m gateway.faces.http.dialect.page` writes README's table of fields from the code."""

import json
from collections.abc import Iterator
from pathlib import Path

from gateway.faces.http.dialect.fields import CHAT_FIELDS, COMPLETION_FIELDS, Fate, Known

PAGE = Path(__file__).parents[4] / "README.md"
BEGIN, END = "<!-- fields -->\n", "<!-- /fields -->\n"
ENDPOINTS = {"chat": CHAT_FIELDS, "completions": COMPLETION_FIELDS}
FOLDED = {
    Fate.IGNORED: "Ignored, as they do not change the answer",
    Fate.REFUSED: "Refused by name where their value would change the answer",
}


def table() -> str:
    """What is honoured, and folded beneath it what is not."""
    parts = list(_rows(Fate.HONOURED))
    for fate, summary in FOLDED.items():
        parts.append(f"\n<details><summary>{summary}</summary>\n\n")
        parts += _rows(fate)
        parts.append("\n</details>\n")
    return "".join(parts)


def written(page: str) -> str:
    """The page with the table as it is now; it stands between two comments."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def _rows(fate: Fate) -> Iterator[str]:
    yield "| Field | Of | |\n"
    yield "|---|---|---|\n"
    for name, where, known in _fields(fate):
        same = " or ".join(f"`{json.dumps(value)}`" for value in known.no_op)
        words = "; ".join(filter(None, (known.words, same and f"{same} is fine")))
        yield f"| `{name}` | {where} | {words} |\n"


def _fields(fate: Fate) -> Iterator[tuple[str, str, Known]]:
    """Each field, and of which endpoint it is; once for both where they treat it alike."""
    for endpoint, fields in ENDPOINTS.items():
        for name, known in fields.items():
            alike = [other for other, theirs in ENDPOINTS.items() if theirs.get(name) == known]
            if known.fate is fate and alike[0] == endpoint:
                yield name, "" if len(alike) == len(ENDPOINTS) else endpoint, known


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
