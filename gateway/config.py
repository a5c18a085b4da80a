"""Settings of the gateway, each with its reason. Section `gateway` of `--set`."""

from collections.abc import Mapping
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from gateway.admission.keys import name_keys
from gateway.requests.sla import OTHER
from services.core import Sla
from services.runtime.main import ServedSettings

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
ANY_ORIGIN = "*"


def _split(value: object) -> object:
    """`a,b` as on a command line; a list is one already."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


Listed = Annotated[tuple[str, ...], BeforeValidator(_split)]


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
    secret: ClassVar[frozenset[str]] = frozenset(("api_keys",))

    model: str = "models/demo"  # folder (or hub name) with the tokenizer and config.json
    served_model_name: str = ""  # empty: the folder's name
    chat_template: str = ""  # file of a Jinja template of conversations; empty: the model's own
    # auto: how the model's generation_config.json says to sample, where a request does not say.
    generation_config: Literal["auto", "off"] = "auto"
    # Fields of an HTTP body that nobody knows: named in the log and in the answer, or a 400.
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free port
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 50051  # 0: any free port
    address: str = ""  # where gRPC listens; empty: host and grpc_port
    scheduler_address: str = "127.0.0.1:50052"
    gateway_id: str = ""  # empty: drawn at start

    sla_classes: dict[str, SlaClass] = SLA_CLASSES
    default_sla: str = "standard"
    default_deadline_s: Positive = inf  # for requests that bring none
    ui: bool = True  # the live page at /ui, and what it asks for

    # Who may ask. Without keys, everybody who reaches the ports. A key's name counts as the tenant
    # of requests that name neither a cache_salt nor a user: it has its share, but cached prefixes
    # are common to all. FORETOKEN_API_KEY(S) is a short name of the first.
    api_keys: Listed = Field(default=(), repr=False)  # as they are; named key- and 8 digits of hash
    api_key_file: str = ""  # lines name:sha256hex, `#` begins a comment; read again when it changes
    metrics_open: bool = True  # /metrics and /load want no key: a scraper seldom has one
    cors_origins: Listed = ()  # of pages elsewhere that may ask, as https://a.org; `*`: all

    max_sessions: Count = 4096  # live choices; one more is refused with 429
    max_queued: Count = 4096  # waiting at the scheduler, as its own max_queue; one more: 429
    max_arriving: Count = 2048  # waiting to be read: a burst of 2,000 is taken in within seconds
    # But tokens that keep coming hold one up no longer. At a load that just fills two cores, a
    # fiftieth of a second took so much of the loop for arrivals that the engine waited for plans.
    arriving_hold_s: Positive = 0.1
    arriving_burst_s: Positive = 0.005  # of reading between two looks: one long prompt, many short
    reading_threads: Count = 2  # that tokenize and render: one long text, and short ones beside it
    # Texts up to so many bytes are read on the event loop, which a thread holds up for longer where
    # cores are scarce: 1024 are some 0.2 ms. 0: none, whatever a chat template does.
    read_at_once_bytes: Annotated[int, Field(ge=0, le=65536)] = 0
    max_reading: Count = 2048  # requests that wait for one, as many as may arrive; one more: 429
    max_reading_bytes: Count = 256 * 2**20  # of their texts; but a first one always may wait
    verdicts_kept: Count = 4096  # of choices that ended, for `foretoken why`; some 2 MB
    max_choices: Count = 128  # prompts x n of one call, as at OpenAI
    max_body_bytes: Count = 8 * 2**20  # a 100,000-token prompt as JSON is under 2 MiB
    body_wait_s: Positive = 20.0  # nothing of a body comes for so long: 408
    max_body_s: Positive = 120.0  # all of it, 8 MiB at 70 kB/s; later: 408
    max_header_bytes: Count = 32 * 2**10  # four times what proxies send along; more: 431
    header_wait_s: Positive = 10.0  # from a connection, or a request's first byte, to its headers
    keep_alive_s: Count = 75  # between requests; above the 60 s of common proxies: they close first
    # Two for each session: idle ones are kept beside those with an answer. One more is told 503.
    max_connections: Count = 8192
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

    # Addresses of processes whose metrics `/metrics` tells beside its own; `foretoken serve` names
    # all that it starts.
    metrics_peers: tuple[str, ...] = ()
    # For all of them at once, half of what Prometheus gives a scrape; who is later is left out.
    metrics_wait_s: Positive = 5.0
    vllm_metrics: bool = False  # what vLLM counts too, once more under its names

    @model_validator(mode="before")
    @classmethod
    def _fill_address(cls, given: dict[str, Any]) -> dict[str, Any]:
        fields = cls.model_fields
        host = given.get("host", fields["host"].default)
        port = given.get("grpc_port", fields["grpc_port"].default)
        shown = f"[{host}]" if ":" in str(host) else host
        return given if given.get("address") else {**given, "address": f"{shown}:{port}"}

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        name_keys(keys)
        return keys

    @field_validator("api_key_file")
    @classmethod
    def _check_key_file(cls, path: str) -> str:
        if path and not Path(path).is_file():
            raise ValueError("there is no such file")
        return path

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            parts = urlsplit(origin)
            plain = f"{parts.scheme}://{parts.netloc}"
            if origin != ANY_ORIGIN and (origin != plain or not (parts.scheme and parts.netloc)):
                raise ValueError(f"{origin!r} is no origin; one is scheme://host[:port], or *")
        return origins

    @model_validator(mode="after")
    def _check_slas(self) -> Self:
        if OTHER in self.sla_classes:
            raise ValueError(f"sla_classes: {OTHER!r} are those with budgets of their own")
        if self.default_sla not in self.sla_classes:
            known = ", ".join(self.sla_classes)
            raise ValueError(f"default_sla names no class of sla_classes: {known}")
        return self

    @cached_property
    def model_name(self) -> str:
        """What clients call the model."""
        folder = Path(self.model)
        return self.served_model_name or (folder.resolve().name if folder.exists() else self.model)

    @property
    def metric_labels(self) -> Mapping[str, str]:
        return {"model_name": self.model_name}

    @property
    def slas(self) -> Mapping[str, Sla]:
        """The classes by name."""
        return {name: budgets.named(name) for name, budgets in self.sla_classes.items()}
