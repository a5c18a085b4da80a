"""`tools` and `tool_choice` of a response. The fields of a function are those of its tool."""

from collections.abc import Sequence

from gateway.faces.http.dialect.renamed import naming_fields
from gateway.faces.http.dialect.tools import read_tool_use, read_tools
from gateway.types.tools import Tool, ToolUse
from services.runtime.errors import InvalidArgument

NAMES = {".function": "", ".allowed_tools": ""}


def read_response_tools(
    given: object, choice: object, parallel: bool
) -> tuple[Sequence[Tool], ToolUse | None]:
    """The tools, and the calls that an answer may or must have. Raises InvalidArgument."""
    if isinstance(given, list):
        for at, tool in enumerate(given):
            if not isinstance(tool, dict):
                raise InvalidArgument(f"tools[{at}]", "must be an object with type and name")
        given = [_convert(tool) for tool in given]
    with naming_fields(NAMES):
        tools = read_tools(given)
        return tools, read_tool_use(tools, _convert_choice(choice), parallel)


def _convert(tool: dict[str, object]) -> object:
    """The tool as a chat writes it."""
    return {"type": tool.get("type"), "function": tool}


def _convert_choice(choice: object) -> object:
    """The choice as a chat writes it."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return _convert(choice)
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [_convert(tool) if isinstance(tool, dict) else tool for tool in tools]
    return {**choice, "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
