"""The parameters of a function, where each argument is written apart from the others. Pure."""

import keyword
import unicodedata
from collections.abc import Callable, Iterator, Mapping

Schema = Mapping[str, object]
MAX_REFS = 16  # from a reference to the next
DEFINITIONS = ("$defs", "definitions")
# Keywords of a schema that only describe it.
NOTES = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
# Keywords that relate arguments to each other, or values to several schemas.
RELATIONS = frozenset(
    ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$dynamicRef", "patternProperties",
     "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas",
     "dependencies", "unevaluatedProperties")
)  # fmt: skip


def find_parameter(parameters: Schema, key: str) -> object:
    """The schema of an argument; any value if there is none."""
    properties = parameters.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return {} if found is None else found


def resolve(schema: object, parameters: Schema) -> object:
    """The schema that a reference into the definitions of `parameters` means."""
    for _ in range(MAX_REFS):
        ref = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(ref, str):
            break
        kind, _, name = ref.removeprefix("#/").partition("/")
        definitions = parameters.get(kind) if kind in DEFINITIONS else None
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(definitions, Mapping) or name not in definitions:
            break
        schema = definitions[name]
    return schema


def is_text(schema: object, parameters: Schema) -> bool:
    """Whether all values that a schema allows are strings, which are written as they are."""
    schema = resolve(schema, parameters)
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return bool(schema["type"] == "string")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return isinstance(values, list) and bool(values) and all(isinstance(v, str) for v in values)


def list_parameters(parameters: Schema) -> Iterator[tuple[str, object, bool]]:
    """The key, schema and whether it is required, of each argument in the order in which a grammar
    demands them."""
    properties = parameters.get("properties")
    known: Schema = properties if isinstance(properties, Mapping) else {}
    required = parameters.get("required")
    needed = required if isinstance(required, list) else []
    for key, schema in known.items():
        yield key, schema, key in needed
    others = parameters.get("additionalProperties", {})
    for key in dict.fromkeys(needed):
        if key not in known:
            yield key, others, True


def allows_any(parameters: Schema) -> bool:
    """Whether the arguments have no known keys."""
    return not any(True for _ in list_parameters(parameters)) and (
        parameters.get("additionalProperties", True) is not False
    )


def relax(parameters: Schema) -> Schema:
    """The same keys, all of them optional, with any values of the same writing."""
    properties = {
        key: {"type": "string"} if is_text(schema, parameters) else {}
        for key, schema, _ in list_parameters(parameters)
    }
    return {"properties": properties} if properties else {}


def find_fault(parameters: Schema, can_be_key: Callable[[str], bool], text: bool) -> str:
    """Why a grammar cannot demand these parameters where each argument is written apart; empty if
    it can. `text`: strings are written as they are."""
    apart = "where the model writes each argument apart"
    for each in ("$ref", "enum", "const", *RELATIONS):
        if each in parameters:
            return f"{each} cannot be enforced {apart}"
    for key, schema, _ in list_parameters(parameters):
        if not can_be_key(key):
            return f"the name {key[:80]!r} cannot be written {apart}; rename it"
        found = resolve(schema, parameters)
        if text and is_text(schema, parameters) and isinstance(found, Mapping):
            beside = schema if isinstance(schema, Mapping) and found is not schema else {}
            known = RELATIONS | beside.keys() - NOTES - {"$ref"}
            if each := next((each for each in (*found, *beside) if each in known), ""):
                return f"{each} of {key[:80]} cannot be enforced {apart}"
    schemas = [schema for _, schema, _ in list_parameters(parameters)]
    for schema in (*schemas, *(parameters.get(each) for each in DEFINITIONS)):
        if ref := _find_foreign_ref(schema):
            return f"$ref {ref[:80]!r} must refer to $defs {apart}"
    return ""


def _find_foreign_ref(schema: object) -> str:
    """A reference to something other than a definition; empty if there is none."""
    starts = tuple(f"#/{each}/" for each in DEFINITIONS)
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case Mapping() as found:
                ref = found.get("$ref")
                if isinstance(ref, str) and not ref.startswith(starts):
                    return ref
                waiting += found.values()
            case list() as items:
                waiting += items
    return ""


def is_python_key(key: str) -> bool:
    """Whether Python reads the key of an argument as it is."""
    plain = unicodedata.normalize("NFKC", key) == key
    return plain and key.isidentifier() and not keyword.iskeyword(key)
