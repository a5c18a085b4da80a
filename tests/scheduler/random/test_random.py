"""The scheduler under random events: invariants after every step."""

from math import inf

from hypothesis import settings
from hypothesis.stateful import invariant

from services.scheduler.core.failures.consistency import find_breach
from services.scheduler.core.phases import RequestPhase
from services.scheduler.observe.story import Kind
from tests.examples import examples
from tests.scheduler.random.random_events import SHARED, RandomEvents

COMES = {Kind.PLACED, Kind.RESUMED, Kind.MOVED, Kind.ADOPTED}
GOES = {Kind.PAUSED, Kind.EVICTED, Kind.LOST}


class SchedulerMachine(RandomEvents):
    """Invariants after every step."""

    @invariant()
    def every_request_is_live_or_has_ended_once(self) -> None:
        assert set(self.state.jobs) == self.live
        assert all(count == 1 for count in self.ended.values())

    @invariant()
    def board_and_ledger_agree(self) -> None:
        assert find_breach(self.state.ledger) == ""

    @invariant()
    def only_forecasts_of_live_requests_are_kept(self) -> None:
        keys = [key for name, key in self.forecasts.items() if name in self.live]
        distinct = sum(key == "" for key in keys) + (SHARED in keys)
        assert len(self.state.ledger.board.forecasts) == distinct + 1  # and the unknown forecast

    @invariant()
    def workers_run_requests_that_scheduler_lists(self) -> None:
        """Except for orphans, and for requests that are cancelled with the next round's plan."""
        assert {n for n, w in self.workers.items() if w.link} == set(self.state.workers)
        for name, worker in self.state.workers.items():
            orphans = {n for n, held in worker.orphans.items() if held.running}
            believed = set(worker.running) | orphans
            there = self.workers[name].running
            assert believed <= there
            assert there - believed <= set(worker.draft.cancel)

    @invariant()
    def every_live_request_has_story_with_current_phase(self) -> None:
        phase, recorder = self.state.ledger.phase, self.recorder
        assert recorder.store.kept_count <= 8 + 8 // 4
        assert set(recorder.store.ids("")) >= set(self.state.jobs)
        assert len(recorder.store.live) == len(self.state.jobs)
        for name, job in self.state.jobs.items():
            story = recorder.story(name, self.state)
            assert story and story.live and story.lines[0].kind in (Kind.RECEIVED, Kind.ARRIVED)
            assert [line.at_s for line in story.lines] == sorted(line.at_s for line in story.lines)
            moves = [line for line in story.lines if line.kind in COMES | GOES]
            runs = moves and moves[-1].kind in COMES and "is paused" not in moves[-1].text
            assert bool(runs) == (phase(job) is RequestPhase.RUNNING), story

    @invariant()
    def known_forecasts_are_sent_to_requests_that_include_them(self) -> None:
        ledger = self.state.ledger
        asking = {n for n, job in self.state.jobs.items() if job.request.include_forecast}
        assert set(ledger.with_forecast) == asking >= set(ledger.awaiting_promise)
        known = {name for name in asking if self.state.jobs[name].forecast}
        assert known == {name for name in asking if name in self.forecasts}
        assert known - set(ledger.awaiting_promise) <= self.forecast_sent

    @invariant()
    def bounds_hold(self) -> None:
        assert self.state.ledger.waiting <= 2 * 20 + 4 * 4
        for worker in self.state.workers.values():
            assert len(worker.running) <= worker.slots
            for job in worker.running.values():
                total = job.request.prompt_tokens + job.request.max_tokens
                assert job.request.worker_id or total <= worker.view.reach_tokens

    @invariant()
    def paused_request_waits_at_its_home(self) -> None:
        """A worker that holds KV of a request is its home."""
        ledger = self.state.ledger
        for name, worker in self.state.workers.items():
            ours = self.workers[name].paused & set(self.state.jobs)
            for paused in ours - set(worker.orphans) - set(worker.draft.cancel):
                job = self.state.jobs[paused]
                assert (ledger.home(job), ledger.phase(job)) == (name, RequestPhase.QUEUED)

    @invariant()
    def no_timer_is_overdue(self) -> None:
        assert self.state.next_deadline() > self.now

    @invariant()
    def round_is_due_only_while_none_is_pending(self) -> None:
        assert (self.state.rounds.candidates is not None) == (self.answer is not None)
        assert self.answer is None or self.state.round_due_s == inf


class ConservativeMachine(SchedulerMachine):
    """The worst case of all admitted requests always fits."""

    policy = "conservative"

    def __init__(self) -> None:
        super().__init__()
        self.adoptable: set[str] = set()

    def attach(self, worker: str, size: int, keeps: bool) -> None:
        if keeps:
            self.adoptable |= self.workers[worker].running | self.workers[worker].paused
        super().attach(worker, size, keeps)

    @invariant()
    def memory_is_never_overfilled(self) -> None:
        for worker in self.state.workers.values():
            if not set(worker.running) & self.adoptable:
                jobs = [job.request for job in worker.running.values()]
                worst = sum(-(-(r.prompt_tokens + r.max_tokens) // 16) * 16 for r in jobs)
                assert worst <= worker.view.kv_tokens


class AliseMachine(SchedulerMachine):
    policy = "alise"


class DeferMachine(SchedulerMachine):
    policy = "alise-defer"


class BatchMachine(SchedulerMachine):
    policy = "vs"


class SclsMachine(SchedulerMachine):
    policy = "scls"


class MagnusMachine(SchedulerMachine):
    policy = "magnus"


class ApartMachine(SchedulerMachine):
    apart = True


class AliseApartMachine(AliseMachine):
    apart = True


TestScheduler = SchedulerMachine.TestCase
TestConservative = ConservativeMachine.TestCase
TestAlise = AliseMachine.TestCase
TestDefer = DeferMachine.TestCase
TestBatch = BatchMachine.TestCase
TestScls = SclsMachine.TestCase
TestMagnus = MagnusMachine.TestCase
TestApart = ApartMachine.TestCase
TestAliseApart = AliseApartMachine.TestCase
TestScheduler.settings = TestConservative.settings = TestAlise.settings = settings(
    max_examples=examples(100), stateful_step_count=50, deadline=None
)
TestDefer.settings = TestBatch.settings = TestScheduler.settings
TestScls.settings = TestMagnus.settings = TestScheduler.settings
TestApart.settings = TestAliseApart.settings = TestScheduler.settings
