"""Pure policy time of one planning round: 64 running and 1,000 queued requests, one worker.

    python -m benchmarks.policy [--json FILE] [--quick]

Three pressures: `full` (memory holds what runs and a few more), `steady` (about a hundred of the
queue fit) and `empty` (all of the queue fits, the policy's worst case).
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
from services.batcher.group import Columns, GroupView, Policy
from services.batcher.policies import POLICIES, resolve

from services.forecast import Forecast, ForecastTable, from_lengths

RUNNING, QUEUED = 64, 1_000
KV_TOKENS = {"full": 40_000, "steady": 100_000, "empty": 10_000_000}
APPLICATIONS = 8  # populations, each with its own forecast of 64 points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="20 rounds instead of 200")
    args = parser.parse_args()
    rounds = 20 if args.quick else 200
    figures = {
        f"{name}/{pressure}": _measure(name, policy, kv_tokens, rounds)
        for name, policy in POLICIES.items()
        for pressure, kv_tokens in KV_TOKENS.items()
    }
    print(f"{'policy/pressure':<24}{'admitted':>9}{'median ms':>11}{'p99 ms':>9}")
    for key, figure in figures.items():
        print(
            f"{key:<24}{figure['admitted']:>9.0f}{figure['median_ms']:>11.3f}"
            f"{figure['p99_ms']:>9.3f}"
        )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


def _measure(name: str, policy: Policy, kv_tokens: int, rounds: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    params = resolve(name, {})
    table = ForecastTable(_forecasts(rng))
    times_s, admitted = [], []
    for number in range(rounds):
        view = GroupView(
            kv_tokens, RUNNING + QUEUED, _rows(rng, RUNNING, 400), _rows(rng, QUEUED, 0), table
        )
        started_s = time.perf_counter()
        decision = policy(view, params, np.random.default_rng((number, 0)))
        times_s.append(time.perf_counter() - started_s)
        admitted.append(decision.admit)
    return {
        "admitted": float(np.median(admitted)),
        "median_ms": float(np.median(times_s) * 1e3),
        "p99_ms": float(np.quantile(times_s, 0.99) * 1e3),
    }


def _forecasts(rng: np.random.Generator) -> list[Forecast]:
    return [
        from_lengths(rng.lognormal(4 + i / 4, 0.8, 1_000).tolist(), 2_048, "history")
        for i in range(APPLICATIONS)
    ]


def _rows(rng: np.random.Generator, count: int, generated: int) -> Columns:
    return Columns(
        rng.integers(16, 512, count),
        rng.integers(0, generated + 1, count),
        rng.integers(512, 2_049, count),
        rng.integers(0, APPLICATIONS, count),
    )


if __name__ == "__main__":
    main()
