"""Converts finished requests to and from rows of the outcome log."""

from dataclasses import dataclass
from math import isfinite

from google.protobuf.message import DecodeError

from protos.generated import predictor_pb2
from services.core import FinishReason, Outcome
from services.forecast import MAX_FORECAST_TOKENS
from services.predictor.encoder.packing import is_current_version, unpack
from services.predictor.interface import Example, Features, Query
from services.predictor.serving.pending import PendingForecast
from services.runtime.codecs.common import decode_reason, encode_reason
from services.runtime.outcomelog import Row

KIND = "outcome"
# The same record with features, written when the prompt was read after the request ended. Lengths
# are learned from the first row, prompts from this one.
READ_LATE = "outcome-read-late"
VERSION = 1
MAX_NAME_CHARS = 256
TIME_MAX_S = 1e11  # the year 5138


@dataclass(frozen=True, slots=True)
class EncodedBy:
    """The encoder of the learned features: its name and the shape of its embeddings."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """A decoded row. `forecast_mean` is 0 when no model read the prompt. `key_name` and `reporter`,
    the process that reported it, are empty where they are not known. `finished_at_s`: Unix time."""

    example: Example
    writer: str
    forecast_mean: float
    finished_at_s: float
    key_name: str
    reporter: str

    @property
    def sources(self) -> set[str]:
        """The names by which it can be left out."""
        return {self.key_name, self.reporter} - {""}


def encode(
    outcome: Outcome,
    pending: PendingForecast | None,
    encoder: str,
    writer: str,
    finished_at_s: float,
    kind: str = KIND,
) -> Row:
    """Returns the log row; `pending` is the forecast made here, if any."""
    record = predictor_pb2.OutcomeRecord(
        request_id=outcome.request_id,
        model=outcome.model,
        application=outcome.application,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.output_tokens,
        max_tokens=outcome.max_tokens,
        reason=encode_reason(outcome.reason),
        finished_at_s=finished_at_s,
        writer=writer,
        reporter=outcome.reporter,
        key_name=outcome.key_name,
    )
    if pending and pending.packed:
        record.encoder, record.features = encoder, pending.packed
    if pending and pending.pair.by_model:
        record.foretold_mean = pending.pair.by_model.mean()
    if pending and pending.prompt:
        prompt = pending.prompt
        record.text.instruction, record.text.user_input = prompt.instruction, prompt.user_input
        record.text.answer_tokens.extend(prompt.answers)
    return Row(kind, VERSION, record.SerializeToString())


def decode(row: Row, encoded_by: EncodedBy | None) -> Record:
    """Decodes a row without features of other encoders or versions. Raises ValueError for a row
    that is not a valid record."""
    try:
        record = predictor_pb2.OutcomeRecord.FromString(row.payload)
    except DecodeError as error:
        raise ValueError("the payload is not an outcome record") from error
    if max(record.output_tokens, record.max_tokens) > MAX_FORECAST_TOKENS:
        raise ValueError("the outcome record exceeds the token limit")
    names = record.model, record.application, record.reporter, record.key_name
    if max(map(len, names)) > MAX_NAME_CHARS:
        raise ValueError("the outcome record has a name that is too long")
    mean = record.foretold_mean
    if not (isfinite(mean) and mean >= 0):
        raise ValueError("the outcome record has an invalid forecast")
    if not 0 <= record.finished_at_s < TIME_MAX_S:
        raise ValueError("the outcome record has an invalid time")
    query = Query(
        record.model,
        record.application,
        record.prompt_tokens,
        record.max_tokens,
        _features(record, encoded_by),
    )
    reason = decode_reason(record.reason) or FinishReason.ERROR
    return Record(
        Example(query, record.output_tokens, reason),
        record.writer,
        mean,
        record.finished_at_s,
        record.key_name,
        record.reporter,
    )


def _features(record: predictor_pb2.OutcomeRecord, by: EncodedBy | None) -> Features | None:
    if not is_current_version(record.features) or by is None or record.encoder != by.name:
        return None
    features = unpack(record.features)
    return features if features.instruction.shape == by.shape else None
