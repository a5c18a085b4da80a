"""How servers are told what an answer must follow. Pure.

A server's style is found by a request with a constraint that allows one answer only: a field that a
server ignores has no effect.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.worker.requests.types.prompt import SamplingParams, SourceText

Fields = dict[str, Any]
Ids = Sequence[int]

ONLY_ANSWER = "zqzq"  # that no model begins with
# What ends the reasoning of models, and the token that a tokenizer has if its model writes that. A
# server with a reasoning parser applies constraints behind it.
REASONING_ENDS = {
    "</think>": "</think>",
    "[/THINK]": "[/THINK]",
    "</seed:think>": "</seed:think>",
    "<|start|>assistant<|channel|>final<|message|>": "<|channel|>",
}
UNTOLD = (
    "a backend has no constraint for calls of tools: leave out tool_choice and strict, or use "
    "foretoken's own engine"
)
AT_ONCE = (
    "the backend applies a schema or grammar from the first token, and this answer begins with "
    "reasoning: start the backend with its own reasoning parser, turn reasoning off for the "
    "request, or use foretoken's own engine"
)
NO_STYLE = (
    "the backend cannot make answers follow a schema or grammar, or in no form that is known here "
    "(structured_outputs, guided_*, regex, grammar): leave it out, or use another backend"
)
NO_KIND = "the backend cannot make answers follow a {kind}; its fields are {style}"


class Style:
    """The fields of one kind of server, by kind of constraint. `probe` are those that allow
    ONLY_ANSWER."""

    def __init__(
        self, name: str, probe: Fields, encode: Mapping[str, Callable[[SourceText], Fields]]
    ):
        self.name, self.probe = name, probe
        self._encode = encode

    def can(self, kind: str) -> bool:
        return kind in self._encode

    def encode(self, source: SourceText) -> Fields:
        return self._encode[source.kind](source)


def _structured(name: str) -> Callable[[SourceText], Fields]:
    """vLLM's `structured_outputs`, which foretoken has, too."""

    def encode(source: SourceText) -> Fields:
        fields: Fields = {name: _VALUES[source.kind](source.text)}
        if source.whitespace == "":
            fields["disable_any_whitespace"] = True
        elif source.whitespace is not None:
            fields["whitespace_pattern"] = source.whitespace
        return {"structured_outputs": fields}

    return encode


def _field(name: str) -> Callable[[SourceText], Fields]:
    return lambda source: {name: _VALUES[source.kind](source.text)}


def _choice_regex(source: SourceText) -> Fields:
    return {"regex": f"({'|'.join(map(_escape, json.loads(source.text)))})"}


def _choice_gbnf(source: SourceText) -> Fields:
    choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(source.text))
    return {"grammar": f"root ::= {' | '.join(choices)}"}


def _escape(text: str) -> str:
    """As a regular expression of any dialect."""
    return re.sub(r"[.^$*+?{}\[\]\\|()/-]", lambda match: f"\\{match[0]}", text)


_VALUES: Mapping[str, Callable[[str], object]] = {
    "json_schema": json.loads,
    "choice": json.loads,
    "regex": str,
    "grammar": str,
    "structural_tag": str,
}
PROBE_GRAMMAR = f'root ::= "{ONLY_ANSWER}"'
# In the order in which they are tried.
STYLES = (
    Style(
        "structured_outputs",  # vLLM, foretoken
        {"structured_outputs": {"choice": [ONLY_ANSWER]}},
        {
            "json_schema": _structured("json"),
            "regex": _structured("regex"),
            "choice": _structured("choice"),
            "grammar": _structured("grammar"),
            "structural_tag": _structured("structural_tag"),
        },
    ),
    Style(
        "guided_*",  # older versions of vLLM
        {"guided_choice": [ONLY_ANSWER]},
        {
            "json_schema": _field("guided_json"),
            "regex": _field("guided_regex"),
            "choice": _field("guided_choice"),
            "grammar": _field("guided_grammar"),
        },
    ),
    Style(
        "json_schema, regex, ebnf",  # SGLang
        {"regex": ONLY_ANSWER},
        {
            "json_schema": lambda source: {"json_schema": source.text},
            "regex": _field("regex"),
            "choice": _choice_regex,
            "grammar": _field("ebnf"),
        },
    ),
    Style(
        "json_schema, grammar",  # llama.cpp
        {"grammar": PROBE_GRAMMAR},
        {
            "json_schema": _field("json_schema"),
            "choice": _choice_gbnf,
            "grammar": _field("grammar"),
        },
    ),
)
_NAMED = {style.name: style for style in STYLES}


def find_constraint_refusal(sampling: SamplingParams, style: str, reasoning_end: Ids) -> str:
    """Why a server of this style cannot enforce what an answer must follow; empty if it can, or if
    the answer is free. `reasoning_end`: the tokens behind which the server applies constraints;
    empty: it applies them from the first token."""
    if not sampling.grammar:
        return ""
    if sampling.source is None:
        return UNTOLD
    if not style:
        return NO_STYLE
    kind = sampling.source.kind
    if not _NAMED[style].can(kind):
        return NO_KIND.format(kind=kind.replace("_", " "), style=style)
    if sampling.source.behind_reasoning and not reasoning_end:
        return AT_ONCE
    return ""


def encode_constraint(sampling: SamplingParams, style: str) -> Fields:
    """The fields of what an answer must follow. Empty for a free answer."""
    return {} if sampling.source is None else _NAMED[style].encode(sampling.source)


def find_restart(tokens: Ids, prompt_tokens: int, sampling: SamplingParams, end: Ids) -> int:
    """How many of the tokens, prompt and output so far, a server is sent to begin an answer with a
    constraint anew: up to the end of the reasoning, where the answer has it and the constraint
    applies behind it, else the prompt. O(tokens)."""
    if end and sampling.source is not None and sampling.source.behind_reasoning:
        for behind in range(prompt_tokens + len(end), len(tokens) + 1):
            if list(tokens[behind - len(end) : behind]) == list(end):
                return behind
    return prompt_tokens
