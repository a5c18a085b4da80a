"""Files and batches as values, in OpenAI's format plus their owner. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

WINDOW_S = 24 * 3600  # of a batch, the only one that OpenAI has
OWNER = "owner"  # the name of the API key; only on disk


class Purpose(StrEnum):
    INPUT = "batch"
    OUTPUT = "batch_output"


class Status(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset((Status.FAILED, Status.COMPLETED, Status.EXPIRED, Status.CANCELLED))


@dataclass(frozen=True, slots=True)
class FileRecord:
    id: str
    owner: str
    bytes: int
    created_at: int  # Unix time, like all times here
    filename: str
    purpose: Purpose

    def stored(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Self:
        """Raises TypeError, KeyError or ValueError for other fields than `stored` gives."""
        return cls(**{**fields, "purpose": Purpose(fields["purpose"])})

    def public(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields[OWNER]
        return {"object": "file", **fields, "status": "processed", "expires_at": None}


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch failed. `line`: its number in the file, from 1 on."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: Status = Status.VALIDATING
    # What the batch becomes once it is finalized.
    outcome: Status = Status.COMPLETED
    errors: Sequence[LineError] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    counts: Counts = field(default_factory=Counts)
    times: Mapping[str, int] = field(default_factory=dict)  # when each status began
    unanswered: int = 0  # lines that had no answer when the batch expired or was cancelled
    metadata: Mapping[str, str] | None = None

    @property
    def is_of_messages(self) -> bool:
        """Whether it is one of Anthropic's: its lines and answers stay in its folder, and are no
        files."""
        return not self.input_file_id

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def to(self, status: Status, now_s: float, **changes: Any) -> Self:
        """The record as it enters a status."""
        times = {**self.times, f"{status}_at": int(now_s)}
        return replace(self, status=status, times=times, **changes)

    def stored(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> Self:
        """Raises TypeError, KeyError or ValueError for other fields than `stored` gives."""
        return cls(
            **{
                **fields,
                "status": Status(fields["status"]),
                "outcome": Status(fields["outcome"]),
                "errors": [LineError(**each) for each in fields["errors"]],
                "counts": Counts(**fields["counts"]),
            }
        )

    def public(self, cancelling: bool = False) -> dict[str, Any]:
        """`cancelling`: a client has asked for it, and the batch has not ended."""
        status = Status.CANCELLING if cancelling and not self.ended else self.status
        names = [each for each in Status if each is not Status.VALIDATING]
        listed = {"object": "list", "data": [asdict(error) for error in self.errors]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": listed if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": asdict(self.counts),
            "metadata": self.metadata,
        }
