"""A reader of answers that are content only."""

from collections.abc import Sequence

from gateway.types.answer_parts import AnswerPart, Content


class PlainReader:
    """An AnswerReader without reasoning and calls."""

    def feed(self, text: str) -> Sequence[AnswerPart]:
        return (Content(text),) if text else ()

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        return ()
