"""Settings of the gateway, each with its reason. Section `gateway` of `--set`."""

from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.core import Sla
from services.runtime.main import ServedSettings

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class SlaClass(BaseModel):
    """Budgets of a class a request can name; one that is left out does not count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: Positive = inf
    tpot_s: Positive = inf
    mtpot_s: Positive = inf

    def named(self, name: str) -> Sla:
        return Sla(name, self.ttft_s, self.tpot_s, self.mtpot_s)


SLA_CLASSES = {
    "interactive": SlaClass(ttft_s=1.0, tpot_s=0.05, mtpot_s=0.5),  # somebody reads along
    "standard": SlaClass(ttft_s=5.0, tpot_s=0.1, mtpot_s=1.5),  # a person who can wait
    "batch": SlaClass(),  # nobody waits
}


class GatewayConfig(ServedSettings):
    """Where it listens, whom it calls, what it refuses."""

    section: ClassVar[str] = "gateway"

    model: str = "models/demo"  # folder (or hub name) with the tokenizer and config.json
    served_model_name: str = ""  # empty: the folder's name
    # auto: how the model's generation_config.json says to sample, where a request does not say.
    generation_config: Literal["auto", "off"] = "auto"
    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free port
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 50051  # 0: any free port
    address: str = ""  # where gRPC listens; empty: host and grpc_port
    scheduler_address: str = "127.0.0.1:50052"
    gateway_id: str = ""  # empty: drawn at start

    sla_classes: dict[str, SlaClass] = SLA_CLASSES
    default_sla: str = "standard"
    default_deadline_s: Positive = inf  # for requests that bring none

    max_sessions: Count = 4096  # live choices; one more is refused with 429
    max_queued: Count = 4096  # waiting at the scheduler, as its own max_queue; one more: 429
    max_arriving: Count = 2048  # waiting to be read: a burst of 2,000 is taken in within seconds
    arriving_hold_s: Positive = 0.02  # but tokens that keep coming hold one up no longer
    arriving_burst_s: Positive = 0.005  # of reading between two looks: one long prompt, many short
    verdicts_kept: Count = 4096  # of choices that ended, for `foretoken why`; some 2 MB
    max_choices: Count = 128  # prompts x n of one call, as at OpenAI
    max_body_bytes: Count = 8 * 2**20  # a 100,000-token prompt as JSON is under 2 MiB
    max_stop_chars: Count = 512  # of one stop string; what may be held back of an answer
    max_text_bytes: Count = 8192  # of each part of a prompt that a predictor sees
    max_messages_per_s: Positive = 1000.0  # to all clients together, each some 0.1 ms of work
    max_pause_s: Positive = 0.1  # but text that is there waits no longer for its client
    client_stall_s: Positive = 60.0  # a client that takes nothing for so long is let go

    scheduler_wait_s: Positive = 10.0  # lost for longer: requests fail with UNAVAILABLE
    finish_wait_s: Positive = 2.0  # tokens are due and their worker's stream brings none at all
    late_wait_s: Positive = 60.0  # tokens are due, others' come: a worker holds back no more
    retry_share: Annotated[float, Field(ge=0)] = 0.2  # repeated work a request of the last 10 s
    retry_floor_per_s: Annotated[float, Field(ge=0)] = 10.0  # beside it: one worker's requests
    connect_backoff_s: Positive = 0.05  # doubles to the next
    max_connect_backoff_s: Positive = 1.0

    @model_validator(mode="before")
    @classmethod
    def _fill_address(cls, given: dict[str, Any]) -> dict[str, Any]:
        fields = cls.model_fields
        host = given.get("host", fields["host"].default)
        port = given.get("grpc_port", fields["grpc_port"].default)
        shown = f"[{host}]" if ":" in str(host) else host
        return given if given.get("address") else {**given, "address": f"{shown}:{port}"}

    @model_validator(mode="after")
    def _check_default_sla(self) -> Self:
        if self.default_sla not in self.sla_classes:
            known = ", ".join(self.sla_classes)
            raise ValueError(f"default_sla names no class of sla_classes: {known}")
        return self

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        folder = Path(self.model)
        return self.served_model_name or (folder.resolve().name if folder.exists() else self.model)
