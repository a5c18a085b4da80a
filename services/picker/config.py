"""Settings of the endpoint picker, with their defaults and reasons."""

from pathlib import Path
from typing import Annotated, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from services.picker.core.endpoints import ADDRESS_RULE, is_address, is_port
from services.picker.core.inference_pool import API_RULE, is_api_url, split_pool
from services.runtime.main import ServedSettings

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PickerConfig(ServedSettings):
    """Section `picker`. Endpoints of all sources together are the pool."""

    section: ClassVar[str] = "picker"

    address: str = "127.0.0.1:9002"  # for Envoy; 9002 is the port that Gateway API's charts expect
    # Serve the proxy by TLS with the files of section `tls`; it needs no certificate of its own.
    tls: bool = False
    endpoints: tuple[str, ...] = ()  # IP:PORT of model servers
    # TOML or JSON with a list `endpoints` of IP:PORT; read again when it changes.
    endpoints_file: str = ""
    # HOST:PORT: all addresses of the name are endpoints, such as a headless Service of Kubernetes.
    dns: str = ""
    # NAMESPACE/NAME of an InferencePool of Kubernetes, or NAME in a pod of its namespace: the ready
    # pods that it selects are endpoints, and its InferenceObjectives are objectives.
    pool: str = ""
    # URL of Kubernetes' API; empty: that of the cluster which the process runs in, with the
    # credentials of its pod. `kubectl proxy` serves http://127.0.0.1:8001.
    kube_api: str = ""
    kube_token_file: str = ""  # a bearer token, read for each request
    kube_ca_file: str = ""  # certificates in PEM that prove the API; empty: the system's
    source_interval_s: Positive = 2.0  # between two looks at the file and at DNS
    max_endpoints: Count = 1_024  # of the pool; a name that resolves to more is cut there

    metrics_path: str = "/metrics"  # of the model servers, in Prometheus' text format
    scrape_interval_s: Annotated[float, Field(ge=0.02, le=5)] = 0.1
    # Metrics that are older say nothing about a queue: only what the picker has sent counts.
    stale_s: Positive = 1.0
    # An endpoint without an answer for so long is left out. An overloaded server answers late.
    lost_s: Positive = 10.0

    predictor_address: str = ""  # forecasts by prompt; empty: lengths of recent answers
    forecast_wait_s: Positive = 0.01  # then recent lengths forecast
    forecast_failures_max: Count = 5  # in a row; then no request waits for the predictor
    first_output_tokens: Count = 256  # expected of an answer before any has ended
    # Longest answer of a request that states no max_tokens.
    max_output_tokens: Annotated[int, Field(ge=1, le=2**24 - 1)] = 4_096

    # Priorities of the objectives that requests name in x-gateway-inference-objective; others have
    # priority 0. Those of `pool` take precedence. Requests of negative priority are shed when no
    # endpoint has room for them.
    objectives: dict[str, int] = Field(default_factory=dict)
    # The longest expected wait for room on a model server. Requests that would wait longer are
    # shed, whatever their priority. 0: none is shed for its wait.
    max_wait_s: NotNegative = 0.0
    max_in_flight: Count = 4_096  # requests without an end; more are shed
    fallbacks: Annotated[int, Field(ge=0, le=16)] = 2  # endpoints named after the first one

    # Bytes of a prompt that share a hash; 256 are about 64 tokens. Prefixes of whole blocks count.
    prefix_block_bytes: Annotated[int, Field(ge=16, le=65_536, multiple_of=4)] = 256
    prefix_blocks: Count = 256  # hashed of one prompt: its first 64 kB
    prefix_blocks_kept: Count = 16_384  # per endpoint; the oldest are forgotten
    # Whether the model servers keep the cached prefixes of API keys apart, as foretoken does. vLLM
    # shares them among all keys: set it to false before vLLM if clients have keys of their own.
    prefixes_by_key: bool = True

    max_body_bytes: Count = 8 * 2**20  # of a request; larger ones get 413
    max_reading_bytes: Count = 256 * 2**20  # of bodies that are being read together; more: 429
    max_answer_bytes: Count = 2**20  # of an answer, or of one event; nothing is learned beyond

    @field_validator("endpoints")
    @classmethod
    def _check_endpoints(cls, endpoints: tuple[str, ...]) -> tuple[str, ...]:
        wrong = next((each for each in endpoints if not is_address(each)), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} {ADDRESS_RULE}")
        return endpoints

    @field_validator("endpoints_file")
    @classmethod
    def _check_file(cls, path: str) -> str:
        if path and not Path(path).is_file():
            raise ValueError("the file does not exist; create it, or name another")
        return path

    @field_validator("dns")
    @classmethod
    def _check_dns(cls, name: str) -> str:
        host, _, port = name.rpartition(":")
        if name and not (host and is_port(port)):
            raise ValueError("must be HOST:PORT, with a port from 1 to 65535")
        return name

    @field_validator("pool")
    @classmethod
    def _check_pool(cls, pool: str) -> str:
        if pool:
            split_pool(pool)
        return pool

    @field_validator("kube_api")
    @classmethod
    def _check_api(cls, url: str) -> str:
        if url and not is_api_url(url):
            raise ValueError(API_RULE)
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.lost_s < self.stale_s:
            raise ValueError("lost_s must be at least stale_s")
        return self

    @property
    def for_clients(self) -> bool:
        return True  # of its proxy

    @property
    def tls_for_clients(self) -> bool:
        return self.tls
