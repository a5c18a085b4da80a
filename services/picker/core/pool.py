"""The pool: all model servers, the requests in flight, and the placement of the next one. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from services.forecast import Forecast
from services.picker.core.endpoints import Reading
from services.picker.core.lines import Line, mean_line
from services.picker.core.picking import Ask, Cause, Estimate, Refusal, estimate, rank, shed
from services.picker.core.server_state import PREFILL, STEPS, Flight, Health, ServerState
from services.runtime.bounded_dict import BoundedDict

BYTES_PER_TOKEN = 4.0  # of a prompt, until answers state their usage
RATIO_STEP = 0.05  # weight of one answer in the running mean of bytes per token
MIN_RATIO, MAX_RATIO = 1.0, 8.0  # bytes per token of one answer
# Servers that have left are remembered for GONE_S, and while they have requests: a pod that is
# unready for one look at DNS returns with its caches. Each has up to `prefix_blocks_kept` hashes.
GONE_S, MAX_GONE = 60.0, 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of the pool, as config.py explains them."""

    stale_s: float = 1.0
    lost_s: float = 10.0
    max_wait_s: float = 0.0
    fallbacks: int = 2
    prefix_block_bytes: int = 256
    prefix_blocks_kept: int = 16_384
    scrape_interval_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to place; `number` is its name, never used twice. `prompt_tokens` 0: estimated by
    its bytes. `subset`: the only addresses that are allowed; None: all."""

    number: int
    forecast: Forecast
    max_tokens: int
    prompt_bytes: int = 0
    prompt_tokens: int = 0
    choices: int = 1
    streams: bool = True
    ttft_s: float = inf
    tpot_s: float = inf
    priority: int = 0
    hashes: Sequence[int] = ()
    subset: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A placed request: the endpoints for it, the best first, and what is expected at
    the first."""

    number: int
    addresses: tuple[str, ...]
    expected: Estimate
    cached_tokens: float


@dataclass(slots=True)
class Pool:
    """Requests are named by the numbers of their arrivals. Unknown numbers and addresses are
    ignored: a server may leave the pool while it serves."""

    limits: Limits = field(default_factory=Limits)
    servers: dict[str, ServerState] = field(default_factory=dict)
    bytes_per_token: float = BYTES_PER_TOKEN
    _flights: dict[int, ServerState] = field(default_factory=dict)
    _gone: BoundedDict[str, tuple[ServerState, float]] = field(
        default_factory=lambda: BoundedDict(MAX_GONE)
    )  # with the time at which it left
    _turn: int = 0
    _mean_lines: tuple[Line, Line] = (STEPS, PREFILL)
    _lines_until_s: float = -inf

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    # Servers

    def set_endpoints(self, addresses: Iterable[str], now: float) -> None:
        """Replaces the endpoints. One that stays, or returns soon, keeps what is known of it;
        requests in flight at one that goes are followed to their end."""
        for address, (server, left_s) in list(self._gone.items()):
            if not server.flights and now - left_s > GONE_S:
                del self._gone[address]
        before = self.servers
        self.servers = {
            address: before.get(address) or self._recall(address) for address in addresses
        }
        for address, server in before.items():
            if address not in self.servers:
                self._gone[address] = (server, now)

    def _recall(self, address: str) -> ServerState:
        if address in self._gone:
            return self._gone.pop(address)[0]
        return ServerState(address, self.limits.prefix_blocks_kept)

    def on_reading(self, address: str, reading: Reading, asked_s: float, now: float) -> None:
        if server := self.servers.get(address):
            server.on_reading(reading, asked_s, now)
            server.guess_progress(*self._lines(now), now)

    def on_failure(self, address: str, why: str, now: float) -> None:
        if server := self.servers.get(address):
            server.on_failure(why, now)

    def health(self, now: float) -> Mapping[str, Health]:
        return {address: self._health(server, now) for address, server in self.servers.items()}

    # Requests

    def place(self, arrival: Arrival, now: float) -> Placement | Refusal:
        """Places a request at a server. Servers with current metrics come before stale ones.
        O(servers · requests at each)."""
        servers = self._candidates(arrival.subset, now)
        if not servers:
            return self._no_endpoint(arrival.subset)
        prompt_tokens = arrival.prompt_tokens or arrival.prompt_bytes / self.bytes_per_token
        each = arrival.forecast.mean_remaining(0, arrival.max_tokens)
        ask = Ask(
            prompt_tokens,
            arrival.choices * each,
            arrival.ttft_s,
            arrival.tpot_s,
            arrival.priority,
        )
        lines = self._lines(now)
        blocks, size = arrival.hashes, arrival.prompt_bytes
        cached = {
            server.address: self._cached_tokens(server, blocks, size, prompt_tokens)
            for server in servers
        }
        estimates = [
            estimate(
                ask, server.load(*lines, cached[server.address], self._is_current(server, now))
            )
            for server in servers
        ]
        refusal = shed(ask, estimates, self.limits.max_wait_s)
        if refusal is not None:
            return refusal
        self._turn += 1
        ranked = rank(ask, estimates, self._turn)
        ranked.sort(key=lambda e: not self._is_current(self.servers[e.address], now))
        chosen = ranked[0]
        flight = Flight(
            arrival.number,
            arrival.forecast,
            arrival.max_tokens,
            arrival.choices,
            prompt_tokens,
            arrival.prompt_bytes,
            arrival.hashes,
            arrival.streams,
            chosen.wait_s > 0,
        )
        self._start(flight, self.servers[chosen.address], cached[chosen.address], now)
        addresses = tuple(e.address for e in ranked[: 1 + self.limits.fallbacks])
        return Placement(arrival.number, addresses, chosen, cached[chosen.address])

    def _start(self, flight: Flight, server: ServerState, cached: float, now: float) -> None:
        server.start(flight, cached, now)
        self._flights[flight.number] = server

    def on_served_by(self, number: int, address: str, now: float) -> None:
        """Another server than the first one has taken the request."""
        before, server = self._flights.get(number), self.servers.get(address)
        if before is None or server is None or server is before:
            return
        flight = before.flights[number]
        before.leave(flight, now)
        cached = self._cached_tokens(
            server, flight.hashes, flight.prompt_bytes, flight.prompt_tokens
        )
        self._start(flight, server, cached, now)

    def on_forecast(self, number: int, forecast: Forecast) -> None:
        """A better forecast of a request in flight."""
        if server := self._flights.get(number):
            flight = server.flights[number]
            flight.forecast = forecast
            flight.expect()

    def on_tokens(self, number: int, tokens: int, now: float) -> None:
        if server := self._flights.get(number):
            server.on_tokens(server.flights[number], tokens, now)

    def end(self, number: int, tokens: int, prompt_tokens: int, now: float) -> None:
        """The request has ended with `tokens` in all; 0 if it broke off. `prompt_tokens`: as its
        usage states them for `prompt_bytes`, else 0."""
        server = self._flights.pop(number, None)
        if server is None:
            return
        flight = server.flights[number]
        server.end(flight, tokens, now)
        if prompt_tokens and flight.prompt_bytes:
            ratio = min(MAX_RATIO, max(MIN_RATIO, flight.prompt_bytes / prompt_tokens))
            self.bytes_per_token += RATIO_STEP * (ratio - self.bytes_per_token)

    # Views

    def _candidates(self, subset: frozenset[str] | None, now: float) -> list[ServerState]:
        return [
            server
            for address, server in self.servers.items()
            if (subset is None or address in subset)
            and self._health(server, now) is not Health.LOST
        ]

    def _health(self, server: ServerState, now: float) -> Health:
        return server.health(now, self.limits.stale_s, self.limits.lost_s)

    def _is_current(self, server: ServerState, now: float) -> bool:
        return self._health(server, now) is Health.READY

    def _lines(self, now: float) -> tuple[Line, Line]:
        """Speeds for a server without samples: the mean of the others, computed once per scrape
        interval because every reading asks for them."""
        if now >= self._lines_until_s:
            self._lines_until_s = now + self.limits.scrape_interval_s
            servers = self.servers.values()
            steps = [s.steps.line(STEPS) for s in servers if s.steps]
            prefill = [s.prefill.line(PREFILL) for s in servers if s.prefill]
            self._mean_lines = mean_line(steps, STEPS), mean_line(prefill, PREFILL)
        return self._mean_lines

    def _cached_tokens(
        self, server: ServerState, hashes: Sequence[int], prompt_bytes: int, prompt_tokens: float
    ) -> float:
        cached = server.prefixes.count_leading(hashes) * self.limits.prefix_block_bytes
        return cached / prompt_bytes * prompt_tokens if cached else 0.0

    def _no_endpoint(self, subset: frozenset[str] | None) -> Refusal:
        named = [s for a, s in self.servers.items() if subset is None or a in subset]
        if not named:
            return Refusal(
                Cause.NO_ENDPOINT, "the pool has no endpoint that the request may use", 1.0
            )
        first = named[0]
        message = f"no endpoint of {len(named)} answers; {first.address}: {first.problem or 'late'}"
        return Refusal(Cause.NO_ENDPOINT, message, 1.0)
