"""CPU time of the front end, and the limit of gateway processes.

    python -m benchmarks.frontend [--peer-python PYTHON] [--against FOLDER] [--parts load,limit]
        [--policy NAME] [--streams 64,128,256] [--gateways 0,1,2] [--rounds N] [--json FILE]
        [--quick]

Part `load`: the demo model in float32 serves chats over HTTP with server-sent events, 25 requests
per second with answers of 67 tokens on average of fixed lengths (`benchmarks.frontend.load`).
Servers run beside each other and get the load one after the other, in reverse order in every other
round; each has answered a warm-up before. Systems: `serve`, with a gateway process and a scheduler
process; `embedded`, with both in one (`--gateways 0`); and vLLM for the CPU, if `--peer-python`
names a Python that has it (see `benchmarks.overload`). With `--against FOLDER`, `base` is
`foretoken serve` of another checkout of the project.

Figures per role (process) of a system: CPU microseconds per token and per request, all of the time
divided by the one and by the other, with what the process does while idle. `front end` sums what is
not engine or predictor: gateway, scheduler and supervisor, or vLLM's API server. `event loop` is
the main thread of the gateway's process, which is part of it; its other threads are gRPC's and the
tokenizer's. `tokens/event` is the number of tokens of a server-sent event with text: a server that
combines more of them writes less often. `ttft_ms` is the median time to the first text.

Part `limit`: `foretoken serve --emulate` with an engine of 10 ms a step, whatever its batch,
so that each stream gets 100 tokens per second, and answers of 512 tokens, one after the other on
each of `--streams` connections, for each number of `--gateways`. `tok_s` are tokens per second;
`gateway_cpu` and `scheduler_cpu` are in cores, of all gateways together (with 0 gateways, of the
process that has both); `us_per_token` and `us_per_event` divide the CPU time of both;
`added_p50_ms` and `added_p99_ms` are the quantiles over all tokens of the time between the end of
the engine's step and the arrival at the client, relative to the earliest such time of the same
answer, so that a constant delay does not count, and a step that the engine began late does.
`engine_busy` near 1 says that the engine kept its pace. The client runs in this process, and on a
machine with two cores it shares one with the engine and the predictor. `--policy` sets the
scheduler's policy for this part: fcfs unless given, because rounds of other policies are measured
by `benchmarks.policy`.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.frontend.limit import emulated_system, measure_streams
from benchmarks.frontend.load import fixed_load, send
from benchmarks.harness.cpu import FRONT_END, LOOP, read_cpu, spent
from benchmarks.harness.report import Measurements, alternating, parser, show, write
from benchmarks.harness.system import System, foretoken_system, settings, vllm_server
from services.policies.preset import presets

RATE = 25.0  # requests per second
KV_TOKENS = 65_536
TIMEOUT_S = 60.0
# The role of a system's first process.
FRONTS = {"serve": "supervisor", "embedded": "serve", "base": "serve", "vllm": "API server"}
PARTS = ("load", "limit")
LIMIT = (
    "tok_s",
    "tokens_per_event",
    "gateway_cpu",
    "scheduler_cpu",
    "us_per_token",
    "us_per_event",
)
LATENCY = ("added_p50_ms", "added_p99_ms", "worker_cpu", "client_cpu", "engine_busy")


async def measure_load(system: System, name: str, count: int, seed: int) -> dict[str, float]:
    """Figures of one load on a running system; keys of CPU times are roles."""
    load = fixed_load(count, RATE, seed)
    before = read_cpu(system.pid, FRONTS[name])
    received = await send(system.http, load, TIMEOUT_S)
    used = spent(before, read_cpu(system.pid, FRONTS[name]))
    figures = {
        "tokens": float(received.tokens),
        "requests": float(received.requests),
        "tokens_per_event": received.tokens / received.events,
        "ttft_ms": sorted(received.ttft_s)[len(received.ttft_s) // 2] * 1e3,
    }
    for role, seconds in used.items():
        figures[f"{role}: µs/token"] = seconds / received.tokens * 1e6
        figures[f"{role}: µs/request"] = seconds / received.requests * 1e6
    return figures


async def measure_loads(
    systems: dict[str, System], rounds: int, count: int, measured: Measurements
) -> None:
    """Adds the figures of all rounds by system and name."""
    for system in systems.values():
        await send(system.http, fixed_load(max(8, count // 5), RATE, seed=1), TIMEOUT_S)
    for number, names in alternating(list(systems), rounds):
        for name in names:
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            figures = await measure_load(systems[name], name, count, 10 + number)
            for figure, value in figures.items():
                measured.add(("load", name, figure), value)


async def measure_limits(
    systems: dict[str, System], streams: Sequence[int], rounds: int, seconds: float,
    measured: Measurements,
) -> None:  # fmt: skip
    """Adds the figures of all rounds by system, number of streams and name."""
    for number, names in alternating(list(systems), rounds):
        for name in names:
            for count in streams:
                print(f"round {number + 1}: {name}, {count}", file=sys.stderr, flush=True)
                figures = await measure_streams(systems[name], count, seconds)
                for figure, value in figures.items():
                    measured.add(("limit", name, str(count), figure), value)


def start_load_systems(options: Namespace, stack: ExitStack) -> dict[str, System]:
    """Starts the systems of part `load`; they stop with the stack."""
    arguments = ("--kv-tokens", str(KV_TOKENS), "--dtype", "float32", *settings("log.path="))
    start = stack.enter_context
    systems = {
        "serve": start(foretoken_system("--gateways", "1", *arguments)),
        "embedded": start(foretoken_system("--gateways", "0", *arguments)),
    }
    if options.against:
        systems["base"] = start(foretoken_system(*arguments, checkout=options.against))
    if options.peer_python:
        systems["vllm"] = start(vllm_server(options.peer_python, KV_TOKENS))
    return systems


def measure(options: Namespace) -> Measurements:
    measured = Measurements()
    if "load" in options.parts:
        count, rounds = (25, 1) if options.quick else (514, options.rounds)
        with ExitStack() as stack:
            systems = start_load_systems(options, stack)
            uvloop.run(measure_loads(systems, rounds, count, measured))
    if "limit" in options.parts:
        seconds, rounds = (2.0, 1) if options.quick else (8.0, options.rounds)
        policy = f"scheduler.policy={options.policy}"
        with ExitStack() as stack:
            systems = {
                f"gateways {count}": stack.enter_context(emulated_system("", policy, count))
                for count in options.gateways
            }
            if options.against:
                base = emulated_system(options.against, policy)
                systems["base"] = stack.enter_context(base)
            uvloop.run(measure_limits(systems, options.streams, rounds, seconds, measured))
    return measured


def show_load(measured: Measurements) -> None:
    """A table per system: its roles, and the front end's event loop."""
    names = {key[1] for key in measured.values if key[0] == "load"}
    for name in sorted(names, key=list(FRONTS).index):
        keys = [key[2] for key in measured.values if key[:2] == ("load", name)]
        roles = [key.removesuffix(": µs/token") for key in keys if key.endswith(": µs/token")]
        rows = []
        for role in sorted(roles, key=lambda role: (role != FRONT_END, role != LOOP, role)):
            units = ("µs/token", "µs/request")
            rows.append((role, *(measured.figure("load", name, f"{role}: {u}") for u in units)))
        counts = [
            f"{measured.figure('load', name, each).median:,.4g} {text}"
            for each, text in (
                ("requests", "requests"),
                ("tokens", "tokens"),
                ("tokens_per_event", "tokens/event"),
                ("ttft_ms", "ms TTFT"),
            )
        ]
        title = f"{name}: {', '.join(counts)}; CPU: median (lowest–highest)"
        show(title, ("", "µs/token", "µs/request"), rows)


def show_limit(measured: Measurements) -> None:
    keys = dict.fromkeys(key[1:3] for key in measured.values if key[0] == "limit")
    for columns in (LIMIT, LATENCY):
        rows = [
            (*key, *(measured.figure("limit", *key, column) for column in columns)) for key in keys
        ]
        show("Gateway processes: median (lowest–highest)", ("", "streams", *columns), rows, 140)


def main() -> None:
    options = _options()
    measured = measure(options)
    if "load" in options.parts:
        show_load(measured)
    if "limit" in options.parts:
        show_limit(measured)
    extra = {"policy_of_limit": options.policy, "repeats": measured.repeats()}
    write(options.json, measured.medians() | extra)


def _options() -> Namespace:
    options = parser(__doc__)
    options.add_argument("--peer-python", default="", help="a Python with vLLM for the CPU")
    options.add_argument("--against", default="", help="folder of another checkout, as `base`")
    options.add_argument("--parts", default=",".join(PARTS), help="default: load,limit")
    options.add_argument("--policy", default="fcfs", help="of part limit; default: fcfs")
    options.add_argument("--streams", default="64,128,256", help="default: 64,128,256")
    options.add_argument("--gateways", default="0,1,2", help="of part limit; default: 0,1,2")
    options.add_argument("--rounds", type=int, default=5, help="default: 5")
    given = options.parse_args()
    given.parts = given.parts.split(",")
    if unknown := set(given.parts) - set(PARTS):
        raise SystemExit(f"--parts takes load and limit, got {', '.join(sorted(unknown))}")
    if given.policy not in presets():
        raise SystemExit(f"--policy takes one of {', '.join(presets())}, got {given.policy}")
    words = given.streams.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise SystemExit(f"--streams takes numbers above 0, got {given.streams}")
    given.streams = [int(word) for word in words]
    if not all(word.isdecimal() for word in given.gateways.split(",")):
        raise SystemExit(f"--gateways takes numbers, got {given.gateways}")
    given.gateways = [int(word) for word in given.gateways.split(",")]
    if given.rounds < 1:
        raise SystemExit(f"--rounds takes a number above 0, got {given.rounds}")
    if given.against and not Path(given.against, "foretoken").is_dir():
        raise SystemExit(f"--against takes a folder with the project, got {given.against}")
    if given.peer_python and not Path(given.peer_python).is_file():
        raise SystemExit(f"--peer-python takes a Python, got {given.peer_python}")
    return given


if __name__ == "__main__":
    main()
