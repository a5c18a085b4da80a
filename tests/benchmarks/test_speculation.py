"""benchmarks.speculation: the record of a quick run."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.speculation import main


@pytest.mark.slow
def test_quick_run_writes_all_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    arguments = ["--quick", "--tokens", "0,4", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks.speculation", *arguments])
    main()
    measured = json.loads(path.read_text())["demo"]["fp32"]
    for kind in ("copy", "random"):
        assert measured[kind]["1"].keys() == {"0", "4"}
        for figures in measured[kind]["1"].values():
            assert figures["tok_s"] > 0 and figures["tok_cpu_s"] > 0
            assert figures["different"] == 0
    accepted = {kind: measured[kind]["1"]["4"]["accepted"] for kind in ("copy", "random")}
    assert accepted["copy"] > 0.8 and accepted["random"] < 0.5
    assert measured["copy"]["1"]["0"]["accepted"] == 0
