"""The bodies of `/v1/embeddings`, `/v1/rerank` and `/score`, and their checks."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from services.runtime.errors import InvalidArgument

MAX_TEXTS = 2_048  # of one request, OpenAI's limit
TOKENS = (
    "token ids are those of another tokenizer; send text (in LangChain: "
    "check_embedding_ctx_length=False)"
)


class EmbeddingBody(BaseModel):
    """OpenAI's fields, and vLLM's for longer texts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    input: object = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    user: str = ""

    def texts(self) -> Sequence[str]:
        return read_texts("input", self.input)

    @property
    def cuts(self) -> bool:
        """Whether only the beginning of a long text is read. Raises InvalidArgument."""
        if self.truncate_prompt_tokens not in (None, -1):
            raise InvalidArgument(
                "truncate_prompt_tokens", "must be -1: as many as the model reads"
            )
        return self.truncate_prompt_tokens is not None


class RerankBody(BaseModel):
    """Jina's and Cohere's fields."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    query: object = None
    documents: object = None
    top_n: int | None = None
    return_documents: bool = True

    def texts(self) -> Sequence[str]:
        """The query, then the documents. Raises InvalidArgument."""
        if not isinstance(self.query, str) or not self.query:
            raise InvalidArgument("query", "must be a text")
        if not isinstance(self.documents, list):
            raise InvalidArgument("documents", "must be a list of texts")
        if self.top_n is not None and self.top_n < 1:
            raise InvalidArgument("top_n", f"at least 1, not {self.top_n}")
        plain = [each.get("text") if isinstance(each, dict) else each for each in self.documents]
        return [self.query, *read_texts("documents", plain)]


class ScoreBody(BaseModel):
    """vLLM's fields."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str = ""
    text_1: object = None
    text_2: object = None

    def texts(self) -> Sequence[str]:
        """The first text of each pair, then the second ones. Raises InvalidArgument."""
        first, second = read_texts("text_1", self.text_1), read_texts("text_2", self.text_2)
        if len(first) == 1:
            first = [*first] * len(second)
        if len(first) != len(second):
            raise InvalidArgument(
                "text_2", f"{len(second)} texts for {len(first)} of text_1; give one each, or one"
            )
        return [*first, *second]


def read_texts(field: str, given: object) -> Sequence[str]:
    """The texts of a field: one, or a list. Raises InvalidArgument."""
    texts = given if isinstance(given, list) else [given]
    if given is None or not texts:
        raise InvalidArgument(field, "is missing: give a text or a list of texts")
    if len(texts) > MAX_TEXTS:
        raise InvalidArgument(field, f"at most {MAX_TEXTS} texts, got {len(texts)}")
    for at, text in enumerate(texts):
        where = f"{field}[{at}]" if isinstance(given, list) else field
        if isinstance(text, int | list):
            raise InvalidArgument(where, TOKENS)
        if not isinstance(text, str):
            raise InvalidArgument(where, "must be a text")
        if not text:
            raise InvalidArgument(where, "must not be empty")
    return [str(text) for text in texts]
