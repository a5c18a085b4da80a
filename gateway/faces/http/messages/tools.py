"""`tools` and `tool_choice` of an Anthropic body."""

from collections.abc import Mapping, Sequence

from gateway.faces.http.dialect.renamed import naming_fields
from gateway.faces.http.dialect.tools import read_tool_use, read_tools
from gateway.types.tools import Tool, ToolUse
from services.runtime.errors import InvalidArgument

NAMES = {".function.parameters": ".input_schema", ".function": ""}
CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}
TOOL = "tool"


def read_message_tools(given: object, choice: object) -> tuple[Sequence[Tool], ToolUse | None]:
    """The tools, and the calls that an answer may or must have. Raises InvalidArgument."""
    if isinstance(given, list):
        given = [_convert(f"tools[{at}]", tool) for at, tool in enumerate(given)]
    with naming_fields(NAMES):
        tools = read_tools(given)
        return tools, read_tool_use(tools, *_convert_choice(choice))


def _convert(where: str, tool: object) -> object:
    """The tool as a function of a chat."""
    if not isinstance(tool, dict):
        raise InvalidArgument(where, "must be an object with name and input_schema")
    kind = tool.get("type") or "custom"
    if kind != "custom":
        sentence = f"only tools with an input_schema are supported, not {kind!r}"
        raise InvalidArgument(f"{where}.type", sentence)
    if tool.get("input_schema") is None:
        raise InvalidArgument(f"{where}.input_schema", "is missing")
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _convert_choice(choice: object) -> tuple[object, bool]:
    """The choice of a chat, and whether calls may be parallel."""
    if choice is None:
        return None, True
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str) or kind not in (*CHOICES, TOOL):
        known = ", ".join((*CHOICES, TOOL))
        raise InvalidArgument("tool_choice.type", f"must be one of {known}, not {kind!r}")
    parallel = not choice.get("disable_parallel_tool_use")
    if kind != TOOL:
        return CHOICES[kind], parallel
    return {"type": "function", "function": {"name": choice.get("name")}}, parallel
