"""Formats of structural tags to the parts of an answer. Pure."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from gateway.grammars.faults import GrammarFault
from gateway.grammars.tags import formats
from gateway.grammars.tags.parts import (
    Choice,
    Dispatch,
    Grammar,
    Mark,
    Marks,
    Part,
    Regex,
    Repeat,
    Row,
    Schema,
    Text,
    is_open,
)

NO_END = "text without an end must be the last one, or be followed by a const_string, token or tag"
REPEATED = "text without an end cannot be repeated; give it an end with a tag"
NO_TRIGGER = "begin {begin!r} starts with none of the triggers"
FindToken = Callable[[formats.Token], int]  # the id of a special token; raises GrammarFault


class FormatReader:
    """Reads formats of one model, of which `find` knows the special tokens."""

    def __init__(self, find: FindToken):
        self._find = find

    def read(self, given: formats.Format) -> Part:
        """The part that a format is. Raises GrammarFault."""
        match given:
            case formats.ConstString(value=value):
                return _marks([value])
            case formats.SpecialToken(token=token):
                return Marks([self._find(token)])
            case formats.JsonSchema(json_schema=schema, max_whitespace_cnt=most):
                return Schema(schema, _whitespace(most))
            case formats.AnyText(excludes=excludes, max_chars=max_chars):
                return Text(excludes, max_chars)
            case formats.GrammarText(grammar=source):
                return Grammar(source)
            case formats.Pattern(pattern=pattern):
                return Regex(pattern)
            case _:
                return self._read_combined(given)

    def _read_combined(self, given: formats.Format) -> Part:
        match given:
            case formats.Sequential(elements=elements):
                return _row(map(self.read, elements))
            case formats.Or(elements=elements):
                return Choice([*map(self.read, elements)])
            case formats.Tag():
                return _row([_marks([self._begin(given)]), self._body(given)])
            case formats.Optional(content=content):
                return Choice([self.read(content), Row()])
            case formats.Plus(content=content):
                return _repeat(self.read(content), 1, None)
            case formats.Star(content=content):
                return _repeat(self.read(content), 0, None)
            case formats.Repeated(content=content, min=least, max=limit):
                return _repeat(self.read(content), least, None if limit < 0 else limit)
            case _:
                return self._read_tags(given)

    def _read_tags(self, given: formats.Format) -> Part:
        match given:
            case formats.SeparatedTags():
                return self._separate(given)
            case formats.TriggeredTags(triggers=triggers, excludes=excludes):
                return self._dispatch_tags(given, triggers, Text(excludes))
            case formats.TokenTriggeredTags(trigger_tokens=tokens):
                return self._dispatch_tags(given, [*map(self._find, tokens)], Text())
            case formats.Dispatched(rules=rules, excludes=excludes):
                parts = [(mark, self.read(content)) for mark, content in rules]
                return _dispatch(Text(excludes), parts, given.loop)
            case formats.TokenDispatched(rules=rules):
                found = [(self._find(token), self.read(content)) for token, content in rules]
                return _dispatch(Text(), found, given.loop)
        raise AssertionError(f"{type(given)} is read elsewhere")

    def _begin(self, tag: formats.Tag) -> Mark:
        begin = tag.begin
        return begin if isinstance(begin, str) else self._find(begin.token)

    def _body(self, tag: formats.Tag) -> Part:
        """The content and the end."""
        end = tag.end
        if isinstance(end, formats.SpecialToken):
            marks: Part = Marks([self._find(end.token)])
        else:
            marks = _marks([end] if isinstance(end, str) else end)
        return _row([self.read(tag.content), marks])

    def _separate(self, given: formats.SeparatedTags) -> Part:
        one = Choice([self.read(tag) for tag in given.tags])
        most = 0 if given.stop_after_first else None
        more = _repeat(_row([_marks([given.separator]), one]), 0, most)
        each = _row([one, more])
        return each if given.at_least_one else Choice([each, Row()])

    def _dispatch_tags(
        self,
        given: formats.TriggeredTags | formats.TokenTriggeredTags,
        triggers: Sequence[Mark],
        text: Text,
    ) -> Part:
        found: list[tuple[Mark, Part]] = []
        for tag in given.tags:
            begin = self._begin(tag)
            trigger = next((each for each in triggers if _starts(begin, each)), None)
            if trigger is None:
                raise GrammarFault(NO_TRIGGER.format(begin=str(begin)[:80]))
            rest = [_marks([begin[len(str(trigger)) :]])] if isinstance(begin, str) else []
            found.append((trigger, _row([*rest, self._body(tag)])))
        return _dispatch(text, found, not given.stop_after_first, given.at_least_one)


def _starts(begin: Mark, trigger: Mark) -> bool:
    if isinstance(begin, str) and isinstance(trigger, str):
        return begin.startswith(trigger)
    return begin == trigger


def _dispatch(
    text: Text, parts: Iterable[tuple[Mark, Part]], repeated: bool, needed: bool = False
) -> Part:
    """Parts of one mark are alternatives."""
    found: dict[Mark, list[Part]] = {}
    for mark, part in parts:
        _check_closed(part)
        found.setdefault(mark, []).append(part)
    return Dispatch(text, {mark: Choice(each) for mark, each in found.items()}, repeated, needed)


def _repeat(part: Part, least: int, most: int | None) -> Part:
    _check_closed(part)
    if most is not None and most < least:
        raise GrammarFault(f"repeat: max {most} must be at least min {least}")
    return Repeat(part, least, most) if most != 0 else Row()


def _check_closed(part: Part) -> None:
    if is_open(part):
        raise GrammarFault(REPEATED)


def _marks(texts: Sequence[Mark]) -> Part:
    """Nothing, if one of the texts is empty."""
    return Row() if "" in texts else Marks(texts)


def _row(parts: Iterable[Part]) -> Row:
    """A row of parts, some of which may be rows."""
    flat = [each for part in parts for each in (part.parts if isinstance(part, Row) else [part])]
    for part, following in pairwise(flat):
        if is_open(part) and not isinstance(following, Marks):
            raise GrammarFault(NO_END)
    return Row(flat)


def _whitespace(most: int | None) -> str | None:
    """As in `Constraint`, for at most so many characters in one place."""
    if most is None:
        return None
    return rf"[\x20\x0A\x0D\x09]{{1,{most}}}" if most else ""
