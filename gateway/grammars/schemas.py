"""JSON schemas as llguidance enforces them exactly. Pure.

llguidance ignores nothing that it does not implement, but a few keywords allow more than JSON
Schema does. They are written differently here, or are a fault.
"""

from collections.abc import Mapping

from gateway.grammars.ecma import translate_pattern
from gateway.grammars.faults import GrammarFault
from gateway.grammars.places import walk_schema

Schema = dict[str, object]

# RFC 3339, without leap seconds and year 0: llguidance allows 30 February, and a leap second at any
# minute.
DATE = (
    r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])"
    r"|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
)
TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
FORMATS: Mapping[str, str] = {
    "date": f"^(?:{DATE})$",
    "time": f"^{TIME}$",
    "date-time": f"^(?:{DATE})[Tt]{TIME}$",
}
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# Without `\u`: a name could be spelled as one that the schema has, and escape its subschema.
PLAIN_ESCAPES = 'nrtbf\\"'


def write_exactly(schema: Schema) -> None:
    """Changes a schema so that llguidance enforces it. Raises GrammarFault with the place of what
    it cannot. O(schema)."""
    for pointer, inner in walk_schema(schema):
        try:
            _change(inner)
        except GrammarFault as fault:
            raise GrammarFault(f"cannot be enforced: {fault} (at {pointer})") from None


def allows_other_names(schema: Schema) -> bool:
    """Whether an object may have names that the schema does not have, beside some that it has."""
    return any(
        ("properties" in inner or "patternProperties" in inner or "required" in inner)
        and inner.get("additionalProperties") is not False
        for _, inner in walk_schema(schema)
    )


def _change(schema: Schema) -> None:
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]  # it has no effect
    for keyword in COUNTS:
        if isinstance(count := schema.get(keyword), float) and count.is_integer():
            schema[keyword] = int(count)
    _check_least_properties(schema)
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = translate_pattern(pattern)
    if isinstance(patterns := schema.get("patternProperties"), dict):
        translated = {translate_pattern(str(each)): inner for each, inner in patterns.items()}
        if len(translated) < len(patterns):
            raise GrammarFault("two patterns of patternProperties are the same")
        schema["patternProperties"] = translated
    format = schema.get("format")
    if isinstance(format, str) and format in FORMATS:
        del schema["format"]
        both = schema.get("allOf", [])
        schema["allOf"] = [*(both if isinstance(both, list) else ()), {"pattern": FORMATS[format]}]


def _check_least_properties(schema: Schema) -> None:
    """Raises GrammarFault if one other name, drawn twice, could count as two properties."""
    least, required = schema.get("minProperties"), schema.get("required", ())
    named = len(set(required)) if isinstance(required, list) else 0
    if not isinstance(least, int | float) or least <= named + 1:
        return
    if schema.get("additionalProperties") is not False or schema.get("patternProperties"):
        raise GrammarFault(
            "minProperties may exceed the required properties by at most 1, unless "
            "additionalProperties is false"
        )
