"""The pool: health, metrics of others, progress, prefixes and failures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.forecast import certain, from_lengths
from services.picker.core.endpoints import Reading
from services.picker.core.picking import Cause, Refusal
from services.picker.core.pool import MAX_GONE, Arrival, Limits, Placement, Pool
from services.picker.core.prefixes import CachedPrefixes
from services.picker.core.server_state import STEPS, Health
from services.runtime.prefix import prompt_hashes

IDLE = Reading(kv_tokens=100_000)


def pool_of(*addresses: str, now: float = 0.0, **limits) -> Pool:
    pool = Pool(Limits(**limits))
    pool.set_endpoints(addresses, now)
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
    pool.set_endpoints(["a"], 0.0)
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


def test_one_slow_answer_does_not_keep_requests_away():
    pool = pool_of("a", "b")
    for number, address, took_s in ((1, "a", 3.0), (2, "b", 1.0)):
        place(pool, number, 0.0, subset=frozenset({address}))
        pool.on_tokens(number, 1, 0.02)
        pool.on_tokens(number, 50, 0.02 + took_s)
        pool.end(number, 50, 0, 0.02 + took_s)
    slow, fast = (server.steps.line(STEPS).base for server in pool.servers.values())
    assert slow == pytest.approx(3 * fast)
    for address in pool.servers:
        pool.on_reading(address, IDLE, 3.1, 3.1)
    placed = [place(pool, number, 3.2).addresses[0] for number in range(3, 19)]
    assert min(placed.count("a"), placed.count("b")) >= 3


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


def test_prompts_of_silent_requests_are_prefilled_after_their_usual_time():
    """40 prompts of 4,000 tokens take about 16 s on each of two servers at 0.1 ms a token."""
    pool = pool_of("a", "b", now=0.0)
    unbounded = Reading(running=20)
    for number in range(40):
        place(pool, number, 0.0, prompt_bytes=16_000, streams=number % 2 == 0)
    urgent = arrival(100, ttft_s=1.0, priority=-1)
    for now, ahead, refused in ((0.1, 80_000, True), (4.0, 44_000, True), (9.0, 0, False)):
        for address in pool.servers:
            pool.on_reading(address, unbounded, now, now)
            assert pool.servers[address].ahead_tokens() == ahead
        assert isinstance(pool.place(urgent, now), Refusal) is refused


def test_time_per_token_of_an_answer_that_is_not_streamed_leaves_out_its_own_prefill():
    pool = pool_of("a")
    for number in range(20):
        now = 10.0 * number
        place(pool, number, now, prompt_bytes=16_000, streams=False)
        pool.on_reading("a", IDLE, now + 2.0, now + 2.0)
        place(pool, 100 + number, now + 2.0, tokens=200, streams=False, prompt_bytes=0)
        for name in (number, 100 + number):
            pool.end(name, 200, 0, now + 4.02)
    # of (4.02 - 0.42) s and (2.02 - 0.02) s for 200 tokens each
    assert pool.servers["a"].steps.line(STEPS).at(1.75) == pytest.approx(0.014, rel=0.05)


def test_speeds_of_others_are_computed_once_per_scrape_interval():
    pool = pool_of("a", "b", scrape_interval_s=1.0)
    before = pool._lines(0.5)
    place(pool, 1, 0.5)
    pool.on_tokens(1, 1, 0.6)
    assert pool._lines(0.9) is before
    assert pool._lines(1.1) != before


def test_requests_of_others_count_when_two_readings_show_them():
    pool = pool_of("a", "b")
    busy = Reading(running=30, waiting=2, kv_usage=0.05, kv_tokens=100_000)
    pool.on_reading("a", busy, 0.1, 0.1)
    assert len(pool.servers["a"].load(*pool._lines(0.2), 0.0, True).held) == 0
    pool.on_reading("a", busy, 0.2, 0.2)
    there = pool.servers["a"].load(*pool._lines(0.2), 0.0, True)
    assert (len(there.held), there.waiting) == (32, 2)
    assert sum(there.held) == pytest.approx(5_000)
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
    hashes = prompt_hashes(b"x" * 64_000, 256, 256, "m")
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
    pool.end(1, 100, 0, 1.0)
    assert len(pool) == 0 and not pool.servers[other].flights


def test_prefixes_and_load_follow_a_request_to_another_endpoint():
    pool = pool_of("a", "b")
    hashes = prompt_hashes(b"x" * 64_000, 256, 256, "m")
    here = frozenset({"a"})
    for number, now in ((1, 0.0), (2, 1.0)):  # two of them are at a for 2 s
        place(pool, number, now, prompt_bytes=64_000, hashes=hashes, subset=here)
    pool.on_served_by(2, "b", 3.0)
    moved = pool.servers["b"].flights[2]
    assert pool.servers["b"].prefixes.count_leading(hashes) == len(hashes) == 249
    assert (moved.new_tokens, moved.ahead_tokens) == (16_000, 16_000)
    assert pool.servers["a"]._area == pytest.approx(1 + 2 * 2)
    pool.on_tokens(2, 1, 4.0)
    pool.on_served_by(2, "a", 4.0)
    assert pool.servers["a"].ahead_tokens() == 16_000  # of the first request alone


def test_usage_teaches_bytes_per_token():
    pool = pool_of("a")
    for number in range(200):
        place(pool, number, 0.0, prompt_bytes=600)
        pool.end(number, 10, 100, 0.0)
    assert pool.bytes_per_token == pytest.approx(6.0, rel=0.01)


@pytest.mark.parametrize(("prompt_bytes", "expected"), [(10, 1.0), (2**23, 8.0)])
def test_bytes_per_token_are_bounded(prompt_bytes: int, expected: float):
    pool = pool_of("a")
    for number in range(200):
        place(pool, number, 0.0, prompt_bytes=prompt_bytes)
        pool.end(number, 10, 100, 0.0)
    assert pool.bytes_per_token == pytest.approx(expected, rel=0.01)


def test_an_endpoint_that_leaves_keeps_its_requests_until_they_end():
    pool = pool_of("a")
    place(pool, 1, 0.0)
    pool.set_endpoints(["b"], 0.0)
    pool.on_tokens(1, 5, 0.1)
    assert len(pool) == 1
    pool.end(1, 5, 0, 0.2)
    assert len(pool) == 0


@pytest.mark.parametrize(
    ("away_s", "busy", "known"), [(2, False, True), (61, False, False), (61, True, True)]
)
def test_an_endpoint_that_returns_soon_or_has_requests_is_known(
    away_s: float, busy: bool, known: bool
):
    pool = pool_of("a", "b")
    before = pool.servers["a"]
    place(pool, 1, 0.0, subset=frozenset({"a"}))
    if not busy:
        pool.end(1, 100, 0, 0.5)
    pool.set_endpoints(["b"], 1.0)
    assert list(pool.health(1.0)) == ["b"]
    pool.set_endpoints(["a", "b"], 1.0 + away_s)
    assert (pool.servers["a"] is before) is known
    assert len(pool.servers["a"].flights) == busy


def test_endpoints_that_left_are_bounded():
    pool = pool_of("a")
    first = pool.servers["a"]
    for number in range(MAX_GONE + 1):
        pool.set_endpoints([str(number)], 1.0)
    pool.set_endpoints(["a", "0"], 1.0)
    assert pool.servers["a"] is not first and len(pool._gone) <= MAX_GONE


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
            self.pool.end(ended, number, 0, self.now)

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
    whole = prompt_hashes(text, 16, 256, "m")
    assert len(whole) == 3  # without the block of the last byte
    assert prompt_hashes(text[:600], 16, 256, "m") == whole[:2]
    assert prompt_hashes(text, 1, 256, "m") == whole[:1]
    assert not set(prompt_hashes(b"?" + text[1:], 16, 256, "m")) & set(whole)
    assert not set(prompt_hashes(text, 16, 256, "other")) & set(whole)
