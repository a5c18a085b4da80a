"""benchmarks.serving --structured: the record of a quick run."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.serving import main
from benchmarks.structured import KNOWN, PLAIN, UNKNOWN


@pytest.mark.slow
def test_quick_run_writes_all_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["", "--structured", "--quick", "--json", str(path)])
    main()
    record = json.loads(path.read_text())
    for load in ("temperature 0", "temperature 1"):
        plain, known = (record["foretoken"][load][f"{kind}, tokens/s"] for kind in (PLAIN, KNOWN))
        assert record["shares"]["foretoken"][load] == known / plain > 0
    assert all(
        record["foretoken"]["idle"][f"{kind}, ttft_ms"] > 0 for kind in (PLAIN, KNOWN, UNKNOWN)
    )
