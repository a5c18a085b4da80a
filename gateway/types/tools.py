"""The tools that a client offers to the model, and which of them an answer may or must call."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Tool:
    """A function that the model may ask the client to call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)  # a JSON schema; empty: any
    strict: bool = False  # the arguments follow `parameters` exactly

    @cached_property
    def shown(self) -> Mapping[str, object]:
        """The tool as chat templates read it."""
        function: dict[str, object] = {"name": self.name, "description": self.description}
        if self.parameters:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the tool in a prompt, about."""
        return len(json.dumps(self.shown))


Tools = Mapping[str, Tool]  # by name


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request, and the rules for their calls."""

    tools: Sequence[Tool] = ()
    required: bool = False  # the answer consists of at least one call
    parallel: bool = True  # the answer may have more than one call
