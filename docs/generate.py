"""Generate the reference pages that are made from code: `python docs/generate.py`.

`docs/settings.md` lists every key of every service's `config.py`, with its default and the comment
beside it. `docs/presets.md` lists every preset with its choices, `docs/alerts.md` every alert with
its runbook. `make docs` fails when a committed page differs from what this script writes.
"""

import inspect
import io
import re
import tokenize
from ast import AnnAssign, ClassDef, Name, parse, unparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import dedent

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from foretoken.vllm.settings import VllmConfig
from gateway.config import GatewayConfig
from observability.prometheus.alerts import ALERTS
from services.batcher.config import BatcherConfig
from services.estimator.config import EstimatorConfig
from services.picker.config import PickerConfig
from services.policies.preset import Preset, presets
from services.predictor.config import PredictorConfig
from services.runtime.config import Settings
from services.runtime.network.identity import TlsConfig
from services.runtime.outcomelog.config import LogConfig
from services.runtime.telemetry.logs import LoggingConfig
from services.runtime.telemetry.tracing import TracingConfig
from services.scheduler.config import SchedulerConfig
from services.worker.backend.config import BackendConfig
from services.worker.config import WorkerConfig
from services.worker.emulation.config import EmulationConfig

DOCS = Path(__file__).parent
SECTIONS: tuple[type[Settings], ...] = (
    GatewayConfig,
    SchedulerConfig,
    PredictorConfig,
    EstimatorConfig,
    BatcherConfig,
    WorkerConfig,
    EmulationConfig,
    BackendConfig,
    PickerConfig,
    VllmConfig,
    LogConfig,
    TracingConfig,
    LoggingConfig,
    TlsConfig,
)
STAGES = (
    "predictor",
    "estimator",
    "arrangement",
    "batch_mode",
    "order",
    "form",
    "place",
    "slice",
    "interval",
    "victim",
    "residency",
)


@dataclass(frozen=True)
class Setting:
    """One row of the settings page."""

    key: str
    kind: str
    default: str
    note: str


def settings_page() -> str:
    """Return the Markdown page of all settings. Lists keys in the order of the source."""
    parts = [SETTINGS_HEAD]
    for section in SECTIONS:
        parts.append(
            f"\n## {section.section}\n\n| Key | Type | Default | Notes |\n|---|---|---|---|\n"
        )
        for each in _settings_of(section):
            note = each.note.replace("|", "\\|")
            kind = each.kind.replace("|", "\\|")
            parts.append(f"| `{each.key}` | `{kind}` | {each.default} | {note} |\n")
    return "".join(parts)


def _settings_of(section: type[Settings]) -> Iterator[Setting]:
    listed = set()
    for owner in section.__mro__:
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        for key, kind, note in _declared(owner):
            if key in section.model_fields and key not in listed:
                listed.add(key)
                yield Setting(key, kind, _default_of(section.model_fields[key]), note)


def _declared(owner: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """Yield key, type and comment of each field that the class itself declares."""
    source = dedent(inspect.getsource(owner))
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines = source.splitlines()
    body = parse(source).body[0]
    assert isinstance(body, ClassDef)
    for node in body.body:
        if not isinstance(node, AnnAssign) or not isinstance(node.target, Name):
            continue
        above: list[str] = []
        at = node.lineno - 1
        while at in comments and lines[at - 1].lstrip().startswith("#"):
            above.insert(0, comments[at])
            at -= 1
        beside = [
            comments[at]
            for at in range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if at in comments
        ]
        yield node.target.id, _type_name(unparse(node.annotation)), " ".join(above + beside)


def _type_name(annotation: str) -> str:
    """Drop pydantic's constraints: `Annotated[int, Field(ge=1)]` becomes `int`."""
    aliases = {
        "Positive": "float",
        "Count": "int",
        "Listed": "list",
        "KernelSet": "str",
        "DtypeName": "str",
    }
    if annotation.startswith("Annotated["):
        annotation = annotation.removeprefix("Annotated[").partition(",")[0]
    if annotation.startswith("Literal["):
        return annotation.removeprefix("Literal[").rstrip("]").replace("'", "").replace(", ", " | ")
    if annotation.startswith(("dict", "tuple")):
        return annotation.partition("[")[0]
    return aliases.get(annotation, annotation)


def _default_of(info: FieldInfo) -> str:
    if info.default_factory is not None:
        factory = info.default_factory
        return "`{}`" if factory is dict else "generated at start"
    value = info.default
    if isinstance(value, dict):
        return "see `config.py`"
    if value in ("", None, ()):
        return "empty"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    return f"`{value}`"


def presets_page() -> str:
    """Return the Markdown page of all presets."""
    parts = [PRESETS_HEAD]
    parts += [_preset_part(preset) for preset in presets().values()]
    return "".join(parts)


def _preset_part(preset: Preset) -> str:
    choices = " · ".join(f"{stage} `{getattr(preset, stage)}`" for stage in STAGES)
    numbers = ", ".join(f"`{name} = {value:g}`" for name, value in preset.params.items())
    lines = [f"\n## `{preset.name}`\n\n{preset.about}. Source: {preset.source}.\n\n{choices}\n"]
    if numbers:
        lines.append(f"\nNumbers: {numbers}\n")
    return "".join(lines)


def alerts_page() -> str:
    """Return the Markdown page of all alerts. Alerts in a row with one runbook share a section."""
    parts = [ALERTS_HEAD]
    for runbook, alerts in groupby(ALERTS, lambda alert: alert.runbook):
        listed = list(alerts)
        names = ", ".join(f"`{alert.name}`" for alert in listed)
        parts.append(f"\n## {names}\n\n| Alert | Severity | After | Meaning |\n|---|---|---|---|\n")
        for alert in listed:
            meaning = TEMPLATE.sub(_template_name, f"{alert.summary}. {alert.description}")
            parts.append(f"| `{alert.name}` | {alert.severity} | {alert.hold} | {meaning} |\n")
        parts.append(f"\n{runbook.strip()}\n")
    return "".join(parts)


def _template_name(found: re.Match[str]) -> str:
    """`{{ $labels.class }}` becomes *class*, `{{ $value | … }}` becomes *N*."""
    return f"*{found['label'] or 'N'}*"


TEMPLATE = re.compile(r"\{\{ \$(?:labels\.(?P<label>\w+)|value)[^}]*\}\}")

SETTINGS_HEAD = """# Settings

<!-- Generated by docs/generate.py from each service's config.py. Do not edit. -->

Set a key with `--set section.key=value`, or with the environment variable
`FORETOKEN_SECTION_KEY` in upper case. `--set` wins over the environment, and the environment wins
over the default. Lists and tables are written as JSON. An unknown key is an error that names the
nearest known key.

`--set preset.KEY=VALUE` replaces one choice or number of the preset; see [Presets](presets.md).
"""

PRESETS_HEAD = """# Presets

<!-- Generated by docs/generate.py from services/policies/presets.toml. Do not edit. -->

A preset is a row of choices, one for each stage of a scheduling decision, and the numbers that
these choices take. [Policies](policies.md) explains the stages and when to use which preset.
`foretoken presets NAME` prints one row with its alternatives and ranges.
"""


ALERTS_HEAD = """# Alerts

<!-- Generated by docs/generate.py from observability/prometheus/alerts.py. Do not edit. -->

An alert fires once its condition has been true for the time in column *After*. Severity `page`
needs action now, `ticket` within days. The lists say what to check, in order.
"""


PAGES = {"settings.md": settings_page, "presets.md": presets_page, "alerts.md": alerts_page}


def main() -> None:
    """Write all pages."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())


if __name__ == "__main__":
    main()
