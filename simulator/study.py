"""A study: one workload under several presets, and under the values of a swept key."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from services.policies.preset import CHOICES, Preset, choose, require_known
from services.policies.room import describe_shortage
from services.predictor.interface import Features
from simulator.engine.forecaster import needs_encoder
from simulator.engine.observations import Observations
from simulator.engine.records import Records
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import simulate
from simulator.hardware.hardware import check_blocks
from simulator.parallel import run_parallel
from simulator.report.summary import Summary, summarize
from simulator.workload.prompt_features import encode_prompts
from simulator.workload.workload import MAX_RATE, MIN_RATE, Workload

PRESET = "preset."  # prefix of a preset's choices and numbers


@dataclass(frozen=True)
class Point:
    """One run of a study; `keys` are the swept key's value, if any."""

    keys: Mapping[str, float]
    settings: RunSettings
    workload: Workload


@dataclass(frozen=True)
class Finding:
    """The figures and records of one run of a study; `observations` if the run was observed."""

    keys: Mapping[str, float]
    summary: Summary
    records: Records
    observations: Observations | None = None


def _with_rate(point: Point, value: float) -> Point:
    if point.workload.clients:
        raise ValueError("clients are a closed loop, which has no rate; vary clients instead")
    return replace(point, workload=point.workload.at_rate(value))


def _with_clients(point: Point, value: float) -> Point:
    return replace(point, workload=replace(point.workload, clients=int(value)))


def _with_workers(point: Point, value: float) -> Point:
    hardware = (point.settings.hardware[0],) * int(value)
    return replace(point, settings=replace(point.settings, hardware=hardware))


def _with_kv_tokens(point: Point, value: float) -> Point:
    block = max(hardware.block_tokens for hardware in point.settings.hardware)
    if value < block:
        raise ValueError(f"kv_tokens must be at least a block of {block} tokens, got {value:g}")
    for each in point.settings.hardware:
        check_blocks("kv_tokens", int(value), each.block_tokens)
    hardware = tuple(replace(h, kv_tokens=int(value)) for h in point.settings.hardware)
    return replace(point, settings=replace(point.settings, hardware=hardware))


def _with_max_tokens(point: Point, value: float) -> Point:
    return replace(point, settings=replace(point.settings, max_tokens=int(value)))


KEYS: dict[str, Callable[[Point, float], Point]] = {
    "rate": _with_rate,
    "clients": _with_clients,
    "workers": _with_workers,
    "kv_tokens": _with_kv_tokens,
    "max_tokens": _with_max_tokens,
}
WHOLE = frozenset(KEYS) - {"rate"}
RANGES: dict[str, tuple[float, float]] = {
    "workers": (1, 1_024),
    "clients": (1, 2**20),
    "kv_tokens": (1, inf),  # each hardware has its own range
    "rate": (MIN_RATE, MAX_RATE),
    "max_tokens": (1, 2**31),
}


def check_values(key: str, values: Sequence[float]) -> None:
    """Raises ValueError for an unknown key and for a value that the key cannot have."""
    if not key.startswith(PRESET):
        require_known("sweep key", key, (*KEYS, f"{PRESET}NAME"))
    if key.removeprefix(PRESET) in CHOICES:
        raise ValueError(
            f"{key} is a choice, not a number: sweep a number of the preset, or compare presets"
        )
    for value in values if key in KEYS else ():
        if not 0 < value < inf:
            raise ValueError(f"{key} must be a positive number, got {value:g}")
        if key in WHOLE and value % 1:
            raise ValueError(f"{key} must be a whole number, got {value:g}")
        least, most = RANGES[key]
        if value < least:
            raise ValueError(f"{key} must be at least {least:g}, got {value:g}")
        if value > most:
            raise ValueError(f"{key} must be at most {most:,}, got {value:g}")


def vary(points: Iterable[Point], key: str, values: Sequence[float]) -> list[Point]:
    """Returns every point at every value of the key: one of KEYS, or `preset.NAME` for a number of
    the preset. Raises ValueError as `check_values` does, and for a key that the points do not
    have."""
    check_values(key, values)
    return [_at(point, key, value) for value in values for point in points]


def _at(point: Point, key: str, value: float) -> Point:
    keys = {**point.keys, key: value}
    if key in KEYS:
        return replace(KEYS[key](point, value), keys=keys)
    preset = point.settings.preset
    preset = with_numbers(preset, {key.removeprefix(PRESET): value})
    return replace(point, keys=keys, settings=replace(point.settings, preset=preset))


def with_numbers(preset: Preset, numbers: Mapping[str, float]) -> Preset:
    """The preset, whatever its origin, with these numbers in place of its own. Raises ValueError
    for a number that it does not have, and for one out of bounds."""
    return choose(preset.name, numbers, {preset.name: preset})


def run_points(
    points: Sequence[Point], processes: int, on_done: Callable[[int], None] = lambda _: None
) -> list[Finding]:
    """Runs all points in up to `processes` processes and returns their findings in order. `on_done`
    is called with the place of each point that ends. Prompts are read once for all points."""
    read = read_prompts(points)
    return run_parallel([partial(_run, point) for point in read], processes, on_done)


def read_prompts(points: Sequence[Point]) -> list[Point]:
    """Returns the points, with features of their prompts where the predictor uses an encoder."""
    features: dict[int, Sequence[Features]] = {}  # by the identity of a column of prompts

    def read(workload: Workload) -> Workload:
        key = id(workload.prompts)
        if workload.prompts and key not in features:
            features[key] = workload.features or encode_prompts(workload)
        return replace(workload, features=features.get(key, ()))

    def read_point(point: Point) -> Point:
        settings = point.settings
        if not needs_encoder(settings.predictor_name):
            return point
        training = settings.training and read(settings.training)
        settings = replace(settings, training=training)
        return replace(point, workload=read(point.workload), settings=settings)

    return [read_point(point) for point in points]


def describe_shortages(points: Sequence[Point]) -> list[str]:
    """Returns a sentence for each preset with a batch size that does not fit in a worker's memory,
    for prompts of mean length; each sentence once."""
    sentences: dict[str, None] = {}
    for point in points:
        settings = point.settings
        kv_tokens = min(hardware.kv_tokens for hardware in settings.hardware)
        prompt_tokens = round(float(point.workload.input_tokens.mean()))
        sentences[
            describe_shortage(settings.preset, kv_tokens, prompt_tokens, settings.max_tokens)
        ] = None
    return [sentence for sentence in sentences if sentence]


def _run(point: Point) -> Finding:
    result = simulate(point.settings, point.workload)
    return Finding(point.keys, summarize(result), result.records, result.observations)
