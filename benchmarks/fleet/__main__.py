"""Cost of a scheduling round over a large fleet: snapshot, decision and plans.

    python -m benchmarks.fleet [--presets a,b,c] [--workers 1,8,64] [--size 4096+20000] [--turns N]
                               [--json FILE] [--quick]

The running requests are divided equally over workers of the same speed. Times are CPU times of this
process: the median over the rounds with the 99th percentile, and medians of the parts. `publish` is
what follows a round outside the state: stories, metrics and encoded messages. A median above 10 ms
is marked. The rounds are those of `benchmarks.policy`, in process: no streams, no other load.

The workers of a large fleet take turns. `round` is measured while REPORTS workers report before
each round: in a live fleet, workers report at different times. `all` are the rounds after a report
of every worker: the median of each, and of their sum until no worker is due.
"""

import time
from statistics import median

import numpy as np

from benchmarks.harness.report import parser, show, write
from benchmarks.harness.rounds import PARTS, RoundTimes, measure
from services.runtime.startup import rare_collections

SIZE, QUICK_SIZE = "4096+20000", "64+200"
FLEETS, QUICK_FLEETS = "1,8,64", "1,4"
PRESETS, QUICK_PRESETS = "foretoken,past-future,alise,fcfs", "foretoken"
TARGET_MS = 10.0
REPORTS = 4
WIDTH = 120  # of the table, in characters

Figures = dict[str, float]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--presets", help=f"names, separated by commas; default: {PRESETS}")
    options.add_argument("--workers", help=f"fleet sizes, separated by commas; default: {FLEETS}")
    options.add_argument("--size", help=f"running+queued requests; default: {SIZE}")
    options.add_argument("--turns", type=int, help="measured rounds of each; default: 60")
    args = options.parse_args()
    quick = args.quick
    presets = (args.presets or (QUICK_PRESETS if quick else PRESETS)).split(",")
    fleets = [
        int(each) for each in (args.workers or (QUICK_FLEETS if quick else FLEETS)).split(",")
    ]
    size = args.size or (QUICK_SIZE if quick else SIZE)
    running, queued = map(int, size.split("+"))
    turns = args.turns or (5 if quick else 60)
    began_s = time.perf_counter()
    with rare_collections():  # as in a served scheduler
        figures = {
            f"{preset}/{workers}": _measure(preset, running, queued, workers, turns)
            for preset in presets
            for workers in fleets
        }
    rows = [(*name.split("/"), *_cells(each)) for name, each in figures.items()]
    head = ("preset", "workers", "round", *PARTS, "publish", "report µs", "all: each", "sum")
    show(f"A round at {size}: ms, median/p99; ! is over {TARGET_MS:g} ms", head, rows, WIDTH)
    print(f"{len(figures)} fleets in {time.perf_counter() - began_s:.0f} s")
    write(args.json, {"fleets": figures, "size": size, "turns": turns})


def _measure(preset: str, running: int, queued: int, workers: int, turns: int) -> Figures:
    def run(reports: int) -> RoundTimes:
        return measure(preset, running, queued, turns, False, workers, reports)[1]

    times = run(min(REPORTS, workers))
    after_all = run(workers) if workers > REPORTS else times
    return {
        "round_ms": median(times.rounds_ms),
        "round_p99_ms": float(np.quantile(times.rounds_ms, 0.99)),
        **{f"{p}_ms": median(parts[at] for parts in times.parts_ms) for at, p in enumerate(PARTS)},
        "publish_ms": median(times.publish_ms),
        "report_us": median(times.report_us),
        "all_round_ms": median(after_all.rounds_ms),
        "all_pass_ms": median(after_all.passes_ms),
    }


def _cells(figures: Figures) -> list[str]:
    mark = "!" * (figures["round_ms"] > TARGET_MS)
    return [
        f"{figures['round_ms']:.2f}/{figures['round_p99_ms']:.2f}{mark}",
        *(f"{figures[f'{part}_ms']:.2f}" for part in (*PARTS, "publish")),
        f"{figures['report_us']:.2f}",
        f"{figures['all_round_ms']:.2f}",
        f"{figures['all_pass_ms']:.2f}",
    ]


if __name__ == "__main__":
    main()
