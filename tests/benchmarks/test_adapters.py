"""benchmarks.adapters: the record of a quick run."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.adapters import main


@pytest.mark.slow
def test_quick_run_writes_all_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    arguments = ["--quick", "--models", "demo", "--streams", "4", "--adapters", "3"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.adapters", *arguments, "--json", str(path)])
    main()
    measured = json.loads(path.read_text())["demo"]["fp32"]["4"]
    assert measured.keys() == {"base", "mixed", "same"}
    for figures in measured.values():
        assert figures["tok_s"] > 0 and figures["tok_cpu_s"] > 0
    assert measured["base"]["of_base"] == 1
