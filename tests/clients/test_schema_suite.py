"""The JSON-Schema-Test-Suite: a schema is enforced, so that no invalid instance is an answer, or it
is refused with its place."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import pytest
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from gateway.grammars.faults import GrammarFault
from gateway.types.constraint import ConstraintKind
from tests.clients import environments
from tests.clients.conftest import installed
from tests.gateway.grammars.walks import accepts, compile_text, draw_answer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

DRAFTS = {  # with the value of $schema that the cases leave out
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
# Keywords that annotate: since draft 2019-09 they constrain nothing.
ANNOTATIONS = "optional/content.json"
# Files with valid instances that are no answers.
NARROWER = {
    "allOf.json": "properties come in the schema's order",
    "const.json": "a value is written as in the schema",
    "enum.json": "a value is written as in the schema",
    "type.json": "an integer is written without a fraction",
    "optional/float-overflow.json": "an integer is written without an exponent",
    "format.json": "a format constrains",
    "ref.json": "a format constrains",
    "optional/format/date-time.json": "no leap seconds",
    "optional/format/time.json": "no leap seconds",
    "optional/format/email.json": "no quoted names",
    "optional/format/ipv6.json": "no IPv4 notation",
}
# Faults of a value that JSON Schema allows, which name the value and no keyword.
WITHOUT_PLACE = (
    "Unsatisfiable schema",
    "Failed to generate regex for float range",
    'Unimplemented keys: ["$dynamicAnchor"]',  # of the metaschema, by reference
    "Unknown format: uri-reference",  # as before
)
MIN_ENFORCED = 190  # schemas of each draft
DRAWN_EVERY = 4  # enforced schemas of which answers are drawn


@dataclass(frozen=True)
class Case:
    file: str
    name: str
    schema: object
    instances: list[dict[str, object]]


def read_cases(draft: str) -> Iterator[Case]:
    folder = environments.schema_suite() / draft
    for path in sorted(folder.glob("**/*.json")):
        for case in json.loads(path.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft], **schema}
            yield Case(str(path.relative_to(folder)), case["description"], schema, case["tests"])


def draw(case: Case, grammar: str, random: Random) -> None:
    """Validates an answer by an independent validator."""
    answer = draw_answer(grammar, random, max_tokens=100)
    if answer is not None:
        validator_for(case.schema, Draft202012Validator)(case.schema).validate(json.loads(answer))


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_invalid_instance_of_an_enforced_schema_is_an_answer(draft: str) -> None:
    counts: Counter[str] = Counter()
    wrong: list[tuple[str, ...]] = []
    narrower, random = set(), Random(1)
    with installed(environments.SUITE):
        cases = [*read_cases(draft)]
    for case in cases:
        try:
            grammar = compile_text(ConstraintKind.JSON_SCHEMA, json.dumps(case.schema))
        except GrammarFault as fault:
            named = "(at #" in str(fault) or any(each in str(fault) for each in WITHOUT_PLACE)
            wrong += [] if named else [(case.file, case.name, str(fault))]
            continue
        counts["enforced"] += 1
        for each in case.instances:
            text = json.dumps(each["data"], ensure_ascii=False, separators=(",", ":"))
            accepted = accepts(grammar, text)
            if accepted and not each["valid"] and case.file != ANNOTATIONS:
                wrong.append((case.file, case.name, text))
            if each["valid"] and not accepted:
                narrower.add(case.file)
        if counts["enforced"] % DRAWN_EVERY == 0:
            draw(case, grammar, random)
    assert wrong == []
    assert narrower <= NARROWER.keys()
    assert counts["enforced"] >= MIN_ENFORCED
