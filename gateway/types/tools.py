"""The tools that a client offers to the model, and which of them an answer may or must call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask the client to call."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)  # a JSON schema; empty: any
    strict: bool = False  # the arguments follow `parameters` exactly


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request, and the rules for their calls."""

    tools: Sequence[Tool] = ()
    required: bool = False  # the answer consists of at least one call
    parallel: bool = True  # the answer may have more than one call
