"""The formats of structural tags, as XGrammar names them (`xgrammar.structural_tag`). Pure.

A format, field or value that cannot be enforced is a fault that names its place.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.grammars.faults import GrammarFault

MAX_COUNT = 10_000  # characters of a text, or repetitions
NO_EFFECT: Sequence[object] = (None, False, [], "json")
PREFIX = "Value error, "  # of pydantic's messages


def _refuse(value: object) -> object:
    if value not in NO_EFFECT:
        raise ValueError("is not supported; leave it out")
    return value


Refused = Annotated[object, AfterValidator(_refuse)]  # unless it has no effect
Words = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Token = str | int  # the text of a special token, or its id


class _Format(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ConstString(_Format):
    type: Literal["const_string"]
    value: str


class JsonSchema(_Format):
    type: Literal["json_schema"]
    json_schema: bool | dict[str, object]
    max_whitespace_cnt: Count | None = None
    style: Refused = None
    any_order: Refused = None
    excludes: Refused = None


class AnyText(_Format):
    type: Literal["any_text"]
    excludes: list[Words] = []
    max_chars: Count | None = None
    max_tokens: Refused = None


class SpecialToken(_Format):
    type: Literal["token"]
    token: Token


class GrammarText(_Format):
    type: Literal["grammar"]
    grammar: Words


class Pattern(_Format):
    type: Literal["regex"]
    pattern: str


class Sequential(_Format):
    type: Literal["sequence"]
    elements: Annotated[list["Format"], Field(min_length=1)]


class Or(_Format):
    type: Literal["or"]
    elements: Annotated[list["Format"], Field(min_length=1)]


class Tag(_Format):
    type: Literal["tag"] = "tag"
    begin: str | SpecialToken
    content: "Format"
    end: str | Annotated[list[str], Field(min_length=1)] | SpecialToken


Tags = Annotated[list[Tag], Field(min_length=1)]


class TriggeredTags(_Format):
    type: Literal["triggered_tags"]
    triggers: Annotated[list[Words], Field(min_length=1)]
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[Words] = []


class TokenTriggeredTags(_Format):
    type: Literal["token_triggered_tags"]
    trigger_tokens: Annotated[list[Token], Field(min_length=1)]
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    exclude_tokens: Refused = None


class SeparatedTags(_Format):
    type: Literal["tags_with_separator"]
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Optional(_Format):
    type: Literal["optional"]
    content: "Format"


class Plus(_Format):
    type: Literal["plus"]
    content: "Format"


class Star(_Format):
    type: Literal["star"]
    content: "Format"


class Repeated(_Format):
    type: Literal["repeat"]
    min: Count
    max: Annotated[int, Field(ge=-1, le=MAX_COUNT)]  # -1: no limit
    content: "Format"


class Dispatched(_Format):
    type: Literal["dispatch"]
    rules: Annotated[list[tuple[Words, "Format"]], Field(min_length=1)]
    loop: bool = True
    excludes: list[Words] = []


class TokenDispatched(_Format):
    type: Literal["token_dispatch"]
    rules: Annotated[list[tuple[Token, "Format"]], Field(min_length=1)]
    loop: bool = True
    exclude_tokens: Refused = None


Format = Annotated[
    ConstString
    | JsonSchema
    | AnyText
    | SpecialToken
    | GrammarText
    | Pattern
    | Sequential
    | Or
    | Tag
    | TriggeredTags
    | TokenTriggeredTags
    | SeparatedTags
    | Optional
    | Plus
    | Star
    | Repeated
    | Dispatched
    | TokenDispatched,
    Field(discriminator="type"),
]
TYPES = frozenset(
    get_args(each.model_fields["type"].annotation)[0] for each in get_args(get_args(Format)[0])
)


def read_format(text: str) -> Format:
    """A format from JSON. Raises GrammarFault."""
    try:
        format: Format = TypeAdapter(Format).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise GrammarFault(_explain(first["loc"], first["msg"])) from None
    return format


def _explain(loc: tuple[int | str, ...], message: str) -> str:
    """The place, without the types that pydantic names before the fields of a format."""
    places = [
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for before, part in zip(("content", *loc), loc, strict=False)
        if not (part in TYPES and (before == "content" or isinstance(before, int)))
    ]
    message = message.removeprefix(PREFIX)
    return f"{''.join(places).lstrip('.') or 'type'}: {message[:1].lower()}{message[1:]}"
