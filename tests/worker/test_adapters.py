"""A real worker that loads LoRA adapters while it serves, between a recording scheduler and
gateway."""

from pathlib import Path
from typing import Any

import pytest

from services.core import FinishReason
from services.runtime.codecs.common import decode_reason
from tests.worker.adapter_files import random_weights, write_adapter
from tests.worker.worker_fixtures import prompt_tokens, reference
from tests.worker.worker_serving import Prompt, running, until


@pytest.mark.slow
async def test_worker_loads_and_unloads_adapters_while_it_serves(tmp_path: Path) -> None:
    reference("llama").save_pretrained(tmp_path / "model")
    one, two = (
        write_adapter(tmp_path / name, random_weights(reference("llama"), seed))
        for name, seed in (("one", 1), ("two", 2))
    )
    settings: dict[str, Any] = {"lora_modules": {"one": one}, "max_adapters": 2, "adapter_slots": 1}
    async with running(tmp_path / "model", **settings) as world:
        scheduler, gateway = world.scheduler, world.gateway()
        assert [(each.name, each.path) for each in scheduler.hellos[0].adapters] == [("one", one)]

        def ask(name: str, adapter: str) -> None:
            tokens = prompt_tokens(1, 20)
            prompt = Prompt(
                request_id=name, token_ids=tokens, prompt_tokens=20, max_tokens=8, adapter=adapter
            )
            prompt.sampling.temperature, prompt.sampling.ignore_eos = 0, True
            gateway.send_raw(prompt)
            scheduler.admit(name)

        ask("r0", "")
        ask("r1", "one")
        ask("r2", "two")
        await until(lambda: len(gateway.ended) == 3)
        refused = gateway.ended["r2"]
        assert decode_reason(refused.finish_reason) is FinishReason.ERROR and refused.refused
        assert refused.message == "the adapter 'two' is not loaded"

        scheduler.ask_adapters(1, one=one, two=two, three=str(tmp_path))
        await until(lambda: scheduler.adapters)
        states = scheduler.adapters[0]
        assert (states.seq, [each.name for each in states.held]) == (1, ["one", "two"])
        assert [each.name for each in states.errors] == ["three"]
        assert "has no adapter_config.json" in states.errors[0].message
        ask("r3", "two")
        await until(lambda: "r3" in gateway.ended)
        assert len({tuple(gateway.tokens[name]) for name in ("r0", "r1", "r3")}) == 3

        def value(name: str, **labels: str) -> float | None:
            return world.registry.get_sample_value(f"foretoken_worker_adapter{name}", labels)

        counts = {state: value("s", state=state) for state in ("held", "placed", "waiting")}
        assert counts == {"held": 2, "placed": 1, "waiting": 0}
        assert value("_copies_total") == 2 and (value("_copy_seconds_total") or 0) > 0
        assert [value("_requests_total", adapter=name) for name in ("one", "two")] == [1, 1]
        held_bytes, slot_bytes = (value("_bytes", memory=kind) for kind in ("host", "device"))
        assert held_bytes and slot_bytes == held_bytes / 2 * 16 / 4  # a slot has room for rank 16

        scheduler.ask_adapters(2, one=two)  # the same name, another folder
        await until(lambda: len(scheduler.adapters) == 2)
        assert [(each.name, each.path) for each in scheduler.adapters[1].held] == [("one", two)]
        ask("r4", "one")
        await until(lambda: "r4" in gateway.ended)
        assert gateway.tokens["r4"] == gateway.tokens["r3"]
