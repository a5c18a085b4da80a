"""AdapterSlots: which adapters have a slot, and for how long others wait."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from services.worker.requests.adapter_slots import AdapterSlots
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence

NAMES = "abcdef"


def requests(adapters: Iterable[str]) -> list[Sequence]:
    return [
        Sequence.start(Prompt(f"r{number}", (1,), 1, 9, adapter=adapter), 9)
        for number, adapter in enumerate(adapters)
    ]


def step(slots: AdapterSlots, adapters: Iterable[str]) -> str:
    """The adapters of the requests in a step, - for none."""
    slots.begin_step()
    return "".join(s.prompt.adapter or "-" for s in slots.narrow(requests(adapters)))


def test_unused_slot_longest_without_requests_is_taken_first() -> None:
    slots = AdapterSlots(2, turn_steps=9)
    assert step(slots, ["a", "", "b"]) == "a-b"
    assert slots.pop_placements() == [("a", 0), ("b", 1)]
    assert step(slots, ["b"]) == "b"
    assert step(slots, ["c", "b"]) == "cb"
    assert slots.pop_placements() == [("c", 0)]
    assert step(slots, ["c", "b", "a"]) == "cb"
    slots.forget("b")
    assert step(slots, ["c", "a"]) == "ca"
    assert slots.pop_placements() == [("a", 1)]


def test_adapters_take_turns_while_others_wait() -> None:
    slots = AdapterSlots(1, turn_steps=3)
    assert [step(slots, ["a", "", "a", "b"]) for _ in range(9)] == ["a-a"] * 3 + ["-b"] * 3 + [
        "a-a"
    ] * 3
    assert [step(slots, ["a"]) for _ in range(9)] == ["a"] * 9  # alone


def test_begin_step_announces_the_end_of_a_turn() -> None:
    slots = AdapterSlots(1, turn_steps=2)
    both = requests("ab")
    changes = []
    for _ in range(6):
        changes.append(slots.begin_step())
        if changes[-1] or len(changes) == 1:
            slots.narrow(both)
    assert changes == [False, False, True, False, True, False]


@given(
    count=st.integers(1, 3),
    turn_steps=st.integers(1, 4),
    others=st.lists(st.lists(st.sampled_from(("", *NAMES)), max_size=8), max_size=40),
    waits=st.sampled_from(NAMES),
)
def test_no_adapter_waits_longer_than_the_turns_before_it(
    count: int, turn_steps: int, others: list[list[str]], waits: str
) -> None:
    slots, contents, waited = AdapterSlots(count, turn_steps), dict[int, str](), 0
    for adapters in others:
        slots.begin_step()
        asked = requests([*adapters, waits])
        chosen = slots.narrow(asked)
        slots.check_integrity()
        contents |= {slot: name for name, slot in slots.pop_placements()}
        for request in chosen:
            name = request.prompt.adapter
            assert contents[request.adapter_slot] == name if name else request.adapter_slot < 0
        in_slots = set(contents.values())
        assert [s for s in asked if s.prompt.adapter in {"", *in_slots}] == chosen
        waited = 0 if waits in in_slots else waited + 1
        assert waited <= turn_steps * -(-len(NAMES) // count)
