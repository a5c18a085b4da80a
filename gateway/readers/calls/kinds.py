"""The kinds of formats in which models write tool calls. Pure."""

from dataclasses import dataclass

from gateway.readers.calls.ids import make_call_id
from gateway.readers.calls.json_reader import JsonCallReader, JsonCallSyntax
from gateway.readers.calls.parameters import find_fault, is_python_key
from gateway.readers.calls.python_reader import HEAD, PythonCallReader
from gateway.readers.calls.reader import CallRules, MakeId
from gateway.readers.calls.xml_reader import XmlCallReader, XmlCallSyntax
from gateway.readers.harmony import HarmonyReader
from gateway.readers.patterns import compile_pattern
from gateway.types.answer_parts import AnswerReader
from gateway.types.tools import Tool, ToolUse

XML_KEY = compile_pattern(r"""[^<>"'\s]{1,256}""")


@dataclass(frozen=True)
class WrittenArguments:
    """How a model is made to write arguments one by one."""

    before: str  # a value, with KEY for its key, and IS_TEXT for `true` or `false`
    after: str  # a value
    separator: str = ""  # between two arguments
    # A regular expression of what a text, which is written as it is, cannot be; empty: strings are
    # quoted.
    not_text: str = ""


@dataclass(frozen=True)
class WrittenChannels:
    """The messages beside calls in which a model writes its answers."""

    thoughts: tuple[str, ...]  # the beginnings of messages before the calls or the last message
    end: str  # of those messages
    final: str  # the beginning of the last message, if the answer has no call


@dataclass(frozen=True)
class WrittenCalls:
    """How a model is made to write calls, with arguments that follow a schema."""

    opening: str  # before the first call
    before: str  # before the arguments, with NAME for the function's name
    after: str  # after the arguments
    separator: str  # between two calls
    closing: str = ""  # after the last call
    trigger: str = ""  # the mark with which `opening`, or else `before`, begins
    arguments: WrittenArguments | None = None  # None: a JSON object
    # Of a format without need of marks: a pattern of texts that begin like a call, with NAMES for
    # the functions' names.
    bare: str = ""
    # Marks of `begins` that calls within constrained text do not have.
    unwritten: tuple[str, ...] = ()
    channels: WrittenChannels | None = None  # then an answer has one call at most


@dataclass(frozen=True)
class JsonCallFormat:
    """Calls with arguments that are a JSON object, read as they arrive."""

    syntaxes: tuple[JsonCallSyntax, ...]
    written: WrittenCalls
    begins: tuple[str, ...] = ()
    make_id: MakeId = make_call_id

    def open(self, rules: CallRules) -> AnswerReader:
        return JsonCallReader(rules, self.syntaxes)

    def find_fault(self, tool: Tool) -> str:
        return ""


@dataclass(frozen=True)
class XmlCallFormat:
    """Calls with an XML element for each argument, read as they arrive."""

    syntax: XmlCallSyntax
    written: WrittenCalls
    begins: tuple[str, ...] = ()
    make_id: MakeId = make_call_id

    def open(self, rules: CallRules) -> AnswerReader:
        return XmlCallReader(rules, (self.syntax,))

    def find_fault(self, tool: Tool) -> str:
        return find_fault(tool.parameters, _is_xml_key, text=True)


@dataclass(frozen=True)
class PythonCallFormat:
    """A list of calls in Python, read when it is complete."""

    written: WrittenCalls
    begins: tuple[str, ...] = ()
    after: str = ""  # a mark that may follow
    make_id: MakeId = make_call_id

    def open(self, rules: CallRules) -> AnswerReader:
        return PythonCallReader(rules, self.after)

    def find_fault(self, tool: Tool) -> str:
        if not all(map(is_python_key, tool.name.split("."))) or not HEAD.match(f"[{tool.name}("):
            return "its name cannot be written where the model calls functions in Python; rename it"
        return find_fault(tool.parameters, is_python_key, text=False)


@dataclass(frozen=True)
class ChannelCallFormat:
    """Calls in messages of their own, which a reader of whole answers reads."""

    written: WrittenCalls
    begins: tuple[str, ...] = ()
    make_id: MakeId = make_call_id

    def open(self, rules: CallRules) -> AnswerReader:
        return HarmonyReader(rules.tools, rules.parallel)

    def find_fault(self, tool: Tool) -> str:
        return ""


CallFormat = JsonCallFormat | XmlCallFormat | PythonCallFormat | ChannelCallFormat


def open_call_reader(call_format: CallFormat, use: ToolUse) -> AnswerReader:
    """A reader of one answer's calls of the offered tools."""
    tools = {tool.name: tool for tool in use.tools}
    bare = bool(call_format.written.bare)
    rules = CallRules(call_format.begins, bare, tools, use.parallel, call_format.make_id)
    return call_format.open(rules)


def _is_xml_key(key: str) -> bool:
    found = XML_KEY.match(key)
    return found is not None and found.end() == len(key)
