"""`tools` and `tool_choice` of chat bodies, and tool calls in messages."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gateway.types.tools import Tool, ToolUse
from services.runtime.errors import InvalidArgument

Json = Mapping[str, object]
MAX_TOOLS = 512
MAX_TOOLS_BYTES = 2**20  # of all tools, as JSON
MAX_DEPTH = 100  # of a schema and of arguments, as chat templates write them
MAX_CALLS = 512  # of one message
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,256}")
NAME_RULE = "must be 1 to 256 letters, digits, or characters of '_.:-'"
CHOICES = "none, auto, required, a function or allowed_tools"


def read_tools(given: object) -> Sequence[Tool]:
    """The tools of a body. Raises InvalidArgument naming the place."""
    if given is None:
        return ()
    if not isinstance(given, list):
        raise InvalidArgument("tools", "must be a list of tools")
    if len(given) > MAX_TOOLS:
        raise InvalidArgument("tools", f"at most {MAX_TOOLS} tools, got {len(given)}")
    tools = [_read_tool(f"tools[{at}]", each) for at, each in enumerate(given)]
    names: set[str] = set()
    for at, tool in enumerate(tools):
        if tool.name in names:
            where = f"tools[{at}].function.name"
            raise InvalidArgument(where, f"another tool is named {tool.name!r}, too; rename one")
        names.add(tool.name)
    size = sum(tool.size_bytes for tool in tools)
    if size > MAX_TOOLS_BYTES:
        raise InvalidArgument("tools", f"at most {MAX_TOOLS_BYTES} bytes as JSON, got {size}")
    return tools


def read_tool_use(tools: Sequence[Tool], choice: object, parallel: bool) -> ToolUse | None:
    """The calls that an answer may or must have; None: none. Raises InvalidArgument."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice", "needs tools; add them or remove tool_choice")
        return None
    use = ToolUse(tools, parallel=parallel)
    if choice is None or isinstance(choice, str):
        named = "auto" if choice is None else choice
        if named not in MODES:
            raise InvalidArgument("tool_choice", f"must be {CHOICES}, not {named[:80]!r}")
        return MODES[named](use)
    if not isinstance(choice, dict):
        raise InvalidArgument("tool_choice", f"must be {CHOICES}")
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidArgument("tool_choice.type", f"must be {' or '.join(KINDS)}, not {kind!r}")
    return KINDS[kind](use, choice)


def _choose_function(use: ToolUse, choice: Json) -> ToolUse:
    """The one call of a function."""
    tool = _find_tool(use.tools, "tool_choice", choice)
    return ToolUse([tool], required=True, parallel=False)


def _choose_allowed(use: ToolUse, choice: Json) -> ToolUse | None:
    at = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise InvalidArgument(at, "must be an object with mode and tools")
    mode, listed = allowed.get("mode", "auto"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidArgument(f"{at}.mode", f"must be auto or required, not {mode!r}")
    if not isinstance(listed, list) or not listed:
        raise InvalidArgument(f"{at}.tools", "must be a list, at least of one tool")
    chosen: dict[str, Tool] = {}
    for place, each in enumerate(listed):
        tool = _find_tool(use.tools, f"{at}.tools[{place}]", each)
        chosen[tool.name] = tool
    return replace(use, tools=[*chosen.values()], required=mode == "required")


MODES: Mapping[str, Callable[[ToolUse], ToolUse | None]] = {
    "none": lambda _: None,
    "auto": lambda use: use,
    "required": lambda use: replace(use, required=True),
}
KINDS: Mapping[str, Callable[[ToolUse, Json], ToolUse | None]] = {
    "function": _choose_function,
    "allowed_tools": _choose_allowed,
}


def _find_tool(tools: Sequence[Tool], where: str, given: object) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidArgument(f"{where}.function.name", "is missing; it must name one of the tools")
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        known = ", ".join(tool.name for tool in tools[:20])
        raise InvalidArgument(
            f"{where}.function.name", f"{name[:80]!r} is not one of the tools: {known}"
        )
    return found


def _read_tool(where: str, given: object) -> Tool:
    if not isinstance(given, dict):
        raise InvalidArgument(where, "must be an object with type and function")
    kind = given.get("type", "function")
    if kind != "function":
        sentence = f"only tools of type 'function' are supported, not {kind!r}"
        raise InvalidArgument(f"{where}.type", sentence)
    at = f"{where}.function"
    function = given.get("function")
    if not isinstance(function, dict):
        raise InvalidArgument(at, "must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidArgument(f"{at}.name", NAME_RULE)
    description, strict = function.get("description") or "", function.get("strict") or False
    if not isinstance(description, str):
        raise InvalidArgument(f"{at}.description", "must be a string")
    if not isinstance(strict, bool):
        raise InvalidArgument(f"{at}.strict", "must be true or false")
    parameters = _read_parameters(f"{at}.parameters", function.get("parameters"))
    return Tool(name, description, parameters, strict)


def _read_parameters(where: str, given: object) -> Json:
    """A schema of an object; none: any arguments."""
    if given is None:
        return {}
    sentence = "must be a JSON schema of an object, such as {'type': 'object', 'properties': {}}"
    if not isinstance(given, dict):
        raise InvalidArgument(where, sentence)
    if _is_deeper(given, MAX_DEPTH):
        raise InvalidArgument(where, f"is nested too deeply; at most {MAX_DEPTH} levels")
    if given.get("type", "object") != "object":
        raise InvalidArgument(f"{where}.type", f"must be 'object', not {given['type']!r}")
    properties = given.get("properties", {})
    if not isinstance(properties, dict):
        raise InvalidArgument(f"{where}.properties", "must be an object")
    for name, value in properties.items():
        if not isinstance(value, dict | bool):
            raise InvalidArgument(f"{where}.properties.{name[:80]}", "must be a JSON schema")
    required = given.get("required", [])
    if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
        raise InvalidArgument(f"{where}.required", "must be a list of strings")
    return given


def _is_deeper(value: object, levels: int) -> bool:
    """Whether a value has more levels of objects and lists. O(size)."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in inner)


def read_calls(where: str, given: object) -> list[dict[str, object]]:
    """The calls of an assistant's message as chat templates read them: with arguments as an
    object. Raises InvalidArgument naming the place."""
    if not isinstance(given, list):
        raise InvalidArgument(where, "must be a list of calls")
    if len(given) > MAX_CALLS:
        raise InvalidArgument(where, f"at most {MAX_CALLS} calls, got {len(given)}")
    return [_read_call(f"{where}[{at}]", each) for at, each in enumerate(given)]


def _read_call(where: str, given: object) -> dict[str, object]:
    if not isinstance(given, dict) or not isinstance(given.get("function"), dict):
        raise InvalidArgument(where, "must be an object with id, type and function")
    if (kind := given.get("type", "function")) != "function":
        raise InvalidArgument(f"{where}.type", f"must be 'function', not {kind!r}")
    if not isinstance(given.get("id"), str) or not given["id"]:
        raise InvalidArgument(f"{where}.id", "is missing; it must be the id of the call")
    function = given["function"]
    name, arguments = function.get("name"), function.get("arguments") or "{}"
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidArgument(f"{where}.function.name", NAME_RULE)
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        decoded = None
    if _is_deeper(decoded, MAX_DEPTH):
        sentence = f"is nested too deeply; at most {MAX_DEPTH} levels"
        raise InvalidArgument(f"{where}.function.arguments", sentence)
    if not isinstance(decoded, dict):
        raise InvalidArgument(f"{where}.function.arguments", "must be a JSON object, as a string")
    shown = {"name": name, "arguments": decoded}
    return {"id": given["id"], "type": "function", "function": shown}
