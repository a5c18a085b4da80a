"""The pool: health, metrics of others, progress, prefixes and failures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.forecast import certain, from_lengths
from services.picker.core.endpoints import Reading
from services.picker.core.picking import Cause, Refusal
from services.picker.core.pool import Arrival, Limits, Placement, Pool
from services.picker.core.prefixes import CachedPrefixes, hash_text
from services.picker.core.server_state import Health

IDLE = Reading(kv_tokens=100_000)


def pool_of(*addresses: str, now: float = 0.0, **limits) -> Pool:
    pool = Pool(Limits(**limits))
    pool.set_endpoints(addresses)
    for address in addresses:
        pool.on_reading(address, IDLE, now, now)
    return pool


def arrival(number: int, tokens: int = 100, **fields) -> Arrival:
    return Arrival(number, certain(tokens), tokens, **{"prompt_bytes": 400, **fields})


def place(pool: Pool, number: int, now: float, **fields) -> Placement:
    placed = pool.place(arrival(number, **fields), now)
    assert isinstance(placed, Placement)
    return placed


def test_an_endpoint_is_used_once_it_has_answered_and_until_it_is_lost():
    pool = Pool(Limits(stale_s=1, lost_s=10))
    pool.set_endpoints(["a"])
    refusal = pool.place(arrival(1), 0.0)
    assert isinstance(refusal, Refusal) and refusal.cause is Cause.NO_ENDPOINT
    assert refusal.message == "no endpoint of 1 answers; a: no answer yet"
    pool.on_reading("a", IDLE, 0.0, 0.0)
    for now, health in ((0.5, Health.READY), (1.5, Health.STALE), (10.5, Health.LOST)):
        assert pool.health(now) == {"a": health}
    assert place(pool, 1, 9.0).addresses == ("a",)
    assert isinstance(pool.place(arrival(2), 10.5), Refusal)


def test_a_failed_endpoint_returns_with_an_answer_that_was_asked_for_later():
    pool = pool_of("a", "b")
    pool.on_failure("a", "connection refused", 1.0)
    assert place(pool, 1, 1.0).addresses == ("b",)
    pool.on_reading("a", IDLE, 0.9, 1.1)  # its metrics were on their way
    assert pool.health(1.1)["a"] is Health.LOST
    pool.on_reading("a", IDLE, 1.2, 1.3)
    assert set(place(pool, 2, 1.3).addresses) == {"a", "b"}


def test_stale_endpoints_come_last():
    pool = pool_of("a", "b")
    pool.on_reading("b", Reading(running=40, kv_tokens=100_000), 5.0, 5.0)
    pool.on_reading("b", Reading(running=40, kv_tokens=100_000), 5.1, 5.1)
    assert place(pool, 1, 5.2).addresses == ("b", "a")


def test_subset_limits_the_endpoints():
    pool = pool_of("a", "b", "c")
    assert place(pool, 1, 0.0, subset=frozenset({"b", "elsewhere"})).addresses == ("b",)
    refusal = pool.place(arrival(2, subset=frozenset({"elsewhere"})), 0.0)
    assert isinstance(refusal, Refusal) and refusal.cause is Cause.NO_ENDPOINT


def test_expected_tokens_decide_and_progress_lowers_them():
    pool = pool_of("a", "b")
    first = place(pool, 1, 0.0, tokens=900)
    other = place(pool, 2, 0.0, tokens=10)
    assert first.addresses[0] != other.addresses[0]
    assert place(pool, 3, 0.0, tokens=500).addresses[0] == other.addresses[0]
    pool.end(3, 0, 0, 0.0)
    pool.on_tokens(1, 899, 1.0)  # one token left, against ten
    assert place(pool, 4, 0.5, tokens=500).addresses[0] == first.addresses[0]


def test_forecast_is_conditioned_on_what_has_been_streamed():
    pool = pool_of("a")
    forecast = from_lengths([10, 1_000], 2_000, "test")
    pool.place(Arrival(1, forecast, 2_000), 0.0)
    flight = pool.servers["a"].flights[1]
    assert flight.remaining == pytest.approx(505)
    pool.on_tokens(1, 11, 1.0)  # not the short one
    assert flight.remaining == pytest.approx(989)
    pool.on_forecast(1, certain(500))
    assert flight.remaining == pytest.approx(489)


def test_answers_that_are_not_streamed_are_expected_to_make_progress():
    pool = pool_of("a")
    place(pool, 1, 0.0, tokens=1_000, streams=False)
    place(pool, 2, 0.0, tokens=1_000)
    pool.on_reading("a", IDLE, 5.0, 5.0)
    whole, streamed = pool.servers["a"].flights.values()
    assert whole.remaining < 900  # 5 s at about 20 ms per token
    assert streamed.remaining == 1_000


def test_requests_of_others_count_when_two_readings_show_them():
    pool = pool_of("a", "b")
    busy = Reading(running=30, waiting=2, kv_usage=0.05, kv_tokens=100_000)
    pool.on_reading("a", busy, 0.1, 0.1)
    assert len(pool.servers["a"].load(*pool._lines(), 0.0, True).held) == 0
    pool.on_reading("a", busy, 0.2, 0.2)
    there = pool.servers["a"].load(*pool._lines(), 0.0, True)
    assert (len(there.held), there.held.sum(), there.waiting) == (32, pytest.approx(5_000), 2)
    assert {place(pool, n, 0.2).addresses[0] for n in range(5)} == {"b"}


def test_measured_speeds_give_unequal_servers_unequal_shares():
    pool = pool_of("fast", "slow")
    for number in range(0, 40, 2):
        for address, seconds in (("fast", 1.0), ("slow", 3.0)):
            name = number + (address == "slow")
            started = 10.0 * number
            pool.on_reading(address, IDLE, started, started)
            place(pool, name, started, subset=frozenset({address}))
            pool.on_tokens(name, 1, started + 0.1)
            pool.on_tokens(name, 100, started + 0.1 + seconds)
            pool.end(name, 100, 0, started + 0.1 + seconds)
    now = 1_000.0
    for address in pool.servers:
        pool.on_reading(address, IDLE, now, now)
    chosen = [place(pool, 100 + n, now).addresses[0] for n in range(40)]
    assert chosen.count("fast") >= 2 * chosen.count("slow") > 0


def test_a_prompt_goes_where_its_prefix_is():
    pool = pool_of("a", "b")
    hashes = hash_text(b"x" * 64_000, 256, 256, "m")
    long = {"prompt_bytes": 64_000, "hashes": hashes}
    first = place(pool, 1, 0.0, **long)
    pool.end(1, 0, 0, 0.0)
    again = [place(pool, n, 0.0, **long) for n in (2, 3)]
    assert {each.addresses[0] for each in again} == {first.addresses[0]}
    assert again[0].cached_tokens == pytest.approx(249 * 256 / 4)
    assert again[0].expected.ttft_s < first.expected.ttft_s


def test_request_that_another_endpoint_has_served_counts_there():
    pool = pool_of("a", "b")
    placed = place(pool, 1, 0.0)
    other = next(each for each in pool.servers if each != placed.addresses[0])
    pool.on_served_by(1, other, 0.1)
    assert list(pool.servers[other].flights) == [1]
    pool.on_served_by(1, "elsewhere", 0.1)
    assert pool.end(1, 100, 0, 1.0) is not None
    assert len(pool) == 0 and not pool.servers[other].flights


def test_usage_teaches_bytes_per_token():
    pool = pool_of("a")
    for number in range(200):
        place(pool, number, 0.0, prompt_bytes=600)
        pool.end(number, 10, 100, 0.0)
    assert pool.bytes_per_token == pytest.approx(6.0, rel=0.01)


def test_an_endpoint_that_leaves_keeps_its_requests_until_they_end():
    pool = pool_of("a")
    place(pool, 1, 0.0)
    pool.set_endpoints(["b"])
    pool.on_tokens(1, 5, 0.1)
    assert len(pool) == 1 and pool.end(1, 5, 0, 0.2) is not None and len(pool) == 0


class Requests:
    """Events on a pool, and the numbers of requests that must be in flight."""

    def __init__(self) -> None:
        self.pool, self.alive, self.now, self.next = pool_of("a", "b"), list[int](), 0.0, 1

    def place(self, number: int) -> None:
        if isinstance(self.pool.place(arrival(self.next), self.now), Placement):
            self.alive.append(self.next)
        self.next += 1

    def end(self, number: int) -> None:
        if self.alive:
            ended = self.alive.pop(number % len(self.alive))
            assert self.pool.end(ended, number, 0, self.now) is not None

    def stream(self, number: int) -> None:
        for each in self.alive:
            self.pool.on_tokens(each, number, self.now)

    def fail(self, number: int) -> None:
        self.pool.on_failure("ab"[number % 2], "gone", self.now)

    def read(self, number: int) -> None:
        reading = Reading(number, number // 2, 0.3, 900)
        self.pool.on_reading("ab"[number % 2], reading, self.now, self.now)

    def move(self, number: int) -> None:
        for each in self.alive:
            self.pool.on_served_by(each, "ab"[number % 2], self.now)


EVENTS = (
    Requests.place,
    Requests.end,
    Requests.stream,
    Requests.fail,
    Requests.read,
    Requests.move,
)


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 30)), max_size=60))
def test_random_events_leave_no_request_behind(events):
    """Exactly the requests that were placed and have not ended are in flight."""
    requests = Requests()
    for event, number in events:
        requests.now += 0.05
        event(requests, number)
        servers = requests.pool.servers.values()
        assert sorted(n for server in servers for n in server.flights) == sorted(requests.alive)
        assert len(requests.pool) == len(requests.alive)
        for server in servers:
            assert all(flight.remaining >= 0 for flight in server.flights.values())


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), max_size=30))
def test_cached_prefixes_are_bounded_and_keep_the_latest(prompts):
    cache = CachedPrefixes(4)
    for prompt in prompts:
        chain = list(dict.fromkeys(prompt))
        cache.use(chain)
        assert len(cache) <= 4
        assert cache.count_leading(chain) == min(4, len(chain))


def test_hashes_depend_on_everything_before_and_on_the_salt():
    text = bytes(range(256)) * 4
    whole = hash_text(text, 16, 256, "m")
    assert len(whole) == 3  # without the block of the last byte
    assert hash_text(text[:600], 16, 256, "m") == whole[:2]
    assert hash_text(text, 1, 256, "m") == whole[:1]
    assert not set(hash_text(b"?" + text[1:], 16, 256, "m")) & set(whole)
    assert not set(hash_text(text, 16, 256, "other")) & set(whole)
