"""One model server as the picker knows it: requests in flight, metrics, speeds, prefixes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from services.forecast import Forecast
from services.picker.core.endpoints import Reading
from services.picker.core.lines import Line, LineFit
from services.picker.core.picking import Load
from services.picker.core.prefixes import CachedPrefixes

# Speeds before any request has ended: only their ratio matters while all servers have none.
STEPS, PREFILL = Line(0.02, 0.0005), Line(0.02, 0.0001)
STEP_SPREAD, PREFILL_SPREAD = 16.0, 256.0**2  # requests², tokens²: of LineFit
# A server is expected to be like the others until it has more samples than these: one slow answer,
# such as the first one, would keep requests away, and without requests there are no more samples.
LIKE_OTHERS_SAMPLES = 2.0
MIN_TOKENS = 2  # of an answer that says how long a token takes
FULL_WEIGHT_TOKENS = 64


class Health(StrEnum):
    """READY: its metrics are current. STALE: it is late with them. LOST: it does not answer."""

    READY = "ready"
    STALE = "stale"
    LOST = "lost"


@dataclass(slots=True)
class Flight:
    """A request between its placement and its end. `tokens` of its answer have passed, of all
    `choices`; `new_tokens` of its prompt are probably not cached at its server."""

    number: int
    forecast: Forecast
    max_tokens: int
    choices: int
    prompt_tokens: float
    prompt_bytes: int
    hashes: Sequence[int]  # of its prompt's blocks
    streams: bool  # its answer passes as it is made
    waits: bool  # for room or for others, as far as was known at its placement
    started_s: float = 0.0
    new_tokens: float = 0.0
    ahead_tokens: float = 0.0  # with its own: prompt tokens to prefill before its first token
    prefilled: bool = False  # seen by its first token, or by the time since it started
    area: float = 0.0  # of its server when it started, then when its first token came
    tokens: int = 0
    first_s: float = inf
    last_s: float = inf
    remaining: float = 0.0

    def __post_init__(self) -> None:
        self.expect()

    def expect(self) -> None:
        """Computes `remaining` anew."""
        each = self.forecast.mean_remaining(self.tokens // self.choices, self.max_tokens)
        self.remaining = self.choices * each


class ServerState:
    """All times are readings of the caller's clock, which never goes back."""

    def __init__(self, address: str, prefix_blocks: int):
        self.address = address
        self.flights: dict[int, Flight] = {}
        self.prefixes = CachedPrefixes(prefix_blocks)
        self.steps = LineFit(STEP_SPREAD)
        self.prefill = LineFit(PREFILL_SPREAD)
        self.problem = "no answer yet"  # why it is LOST
        self._reading = Reading()
        self._read_s = -inf
        self._failed_s = -inf
        # Requests and KV tokens of others, in the last two readings. The smaller one counts: a
        # request that ends while its server is being read is not another's.
        self._others, self._others_before = (0, 0.0), (0, 0.0)
        self._area, self._area_s = 0.0, 0.0  # ∫ requests dt

    # Metrics

    def on_reading(self, reading: Reading, asked_s: float, now: float) -> None:
        """Metrics that were asked for at `asked_s` have come."""
        if asked_s < self._failed_s:
            return
        self._advance(now)
        known = [f for f in self.flights.values() if f.started_s <= asked_s]
        held = sum(f.prompt_tokens + f.tokens for f in known)
        others = max(0, reading.running + reading.waiting - len(known))
        tokens = max(0.0, reading.kv_usage * reading.kv_tokens - held)
        self._others, self._others_before = (others, tokens), self._others
        self._reading, self._read_s, self.problem = reading, now, ""

    def on_failure(self, why: str, now: float) -> None:
        """It refuses connections, or gave an error: it is LOST until it is read again."""
        self._failed_s, self._read_s, self.problem = now, -inf, why

    def health(self, now: float, stale_s: float, lost_s: float) -> Health:
        age_s = now - self._read_s
        if age_s <= stale_s:
            return Health.READY
        return Health.STALE if age_s <= lost_s else Health.LOST

    # Requests

    def start(self, flight: Flight, cached_tokens: float, now: float) -> None:
        """It begins here, with so many tokens of its prompt probably cached."""
        self._advance(now)
        flight.started_s, flight.area, flight.prefilled = now, self._area, flight.tokens > 0
        flight.new_tokens = max(0.0, flight.prompt_tokens - cached_tokens)
        flight.ahead_tokens = self.ahead_tokens() + flight.new_tokens
        self.flights[flight.number] = flight
        self.prefixes.use(flight.hashes)

    def leave(self, flight: Flight, now: float) -> None:
        """It has ended, or is served elsewhere."""
        self._advance(now)
        del self.flights[flight.number]

    def on_tokens(self, flight: Flight, tokens: int, now: float) -> None:
        """`tokens` of its answer have passed in all."""
        if tokens <= flight.tokens:
            return
        if flight.first_s == inf:
            self._advance(now)
            flight.first_s, flight.area, flight.prefilled = now, self._area, True
            if not flight.waits:
                self.prefill.add(flight.ahead_tokens, now - flight.started_s)
        flight.tokens, flight.last_s = tokens, now
        flight.expect()

    def end(self, flight: Flight, tokens: int, now: float) -> None:
        """It has ended with `tokens` in all, or broke off with 0. Learns how long a token takes."""
        self.leave(flight, now)
        if tokens < MIN_TOKENS:
            return
        streamed = flight.tokens >= MIN_TOKENS and flight.last_s > flight.first_s
        since_s = flight.first_s if streamed else flight.started_s
        took_s = now - since_s
        if took_s <= 0:
            return
        beside = (self._area - flight.area) / took_s
        if not streamed:
            took_s = max(took_s / 2, took_s - self.prefill.line(PREFILL).at(flight.ahead_tokens))
        weight = min(1.0, tokens / FULL_WEIGHT_TOKENS)
        self.steps.add(beside, took_s / (tokens - streamed), weight)

    def guess_progress(self, steps: Line, prefill: Line, now: float) -> None:
        """Answers without tokens so far show no progress: expects their prefill to take its usual
        time, and those that are not streamed to have made tokens since. `steps` and `prefill` are
        for a server without samples."""
        silent = [flight for flight in self.flights.values() if not flight.tokens]
        if not silent:
            return
        step_s = self.steps.line(steps).at(len(self.flights))
        prefill = self.prefill.line(prefill)
        for flight in silent:
            since_s = now - flight.started_s - prefill.at(flight.ahead_tokens)
            flight.prefilled = flight.prefilled or since_s > 0
            if not flight.streams and since_s > 0 and step_s > 0:
                made = int(since_s / step_s)
                each = flight.forecast.mean_remaining(made, flight.max_tokens)
                flight.remaining = min(flight.remaining, flight.choices * each)

    # Placement

    def ahead_tokens(self) -> float:
        """Prompt tokens that are probably not prefilled."""
        return sum(f.new_tokens for f in self.flights.values() if not f.prefilled)

    def load(self, steps: Line, prefill: Line, cached_tokens: float, current: bool) -> Load:
        """`steps` and `prefill` are those of all servers. `current`: its metrics are."""
        flights = self.flights.values()
        count, tokens = min(self._others, self._others_before) if current else (0, 0.0)
        held = [f.prompt_tokens + f.tokens for f in flights]
        remaining = [f.remaining for f in flights]
        if count:
            held += [tokens / count] * count
            remaining += [sum(remaining) / len(remaining) if remaining else 0.0] * count
        kv_tokens = self._reading.kv_tokens
        return Load(
            self.address,
            held,
            remaining,
            self.steps.line(steps, LIKE_OTHERS_SAMPLES),
            self.prefill.line(prefill, LIKE_OTHERS_SAMPLES),
            self._reading.waiting if current else 0,
            self.ahead_tokens(),
            cached_tokens,
            kv_tokens or inf,
        )

    def _advance(self, now: float) -> None:
        count = len(self.flights) + min(self._others, self._others_before)[0]
        self._area += count * max(0.0, now - self._area_s)
        self._area_s = now
