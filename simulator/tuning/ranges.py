"""The numbers of a preset that can be tuned, and the range in which each is searched."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, isfinite, log

from services.policies.parameters import Param
from services.policies.preset import Preset, require_known


@dataclass(frozen=True, slots=True)
class Range:
    """Values from `least` to `most`, by ratio if `logarithmic`; rounded if `whole`."""

    least: float
    most: float
    logarithmic: bool = False
    whole: bool = False

    def at(self, share: float) -> float:
        """The value at a share from 0 to 1 of the range."""
        if self.logarithmic:
            value = exp(log(self.least) + share * (log(self.most) - log(self.least)))
        else:
            value = self.least + share * (self.most - self.least)
        value = min(max(value, self.least), self.most)
        return float(round(value)) if self.whole else float(f"{value:.4g}")

    def share_of(self, value: float) -> float:
        """Where a value lies in the range, 0 to 1; a value outside counts as the nearest bound."""
        value = min(max(value, self.least), self.most)
        if self.most == self.least:
            return 0.0
        if self.logarithmic:
            return log(value / self.least) / log(self.most / self.least)
        return (value - self.least) / (self.most - self.least)


# What is searched without --keys KEY=LEAST:MOST. Numbers without a row here are searched between
# their declared bounds, where these are at most WIDEST apart. Declared bounds refuse mistakes; for
# most numbers they are too far apart to be searched.
WIDEST = 10.0
SEARCHED: Mapping[str, Range] = {
    "decay": Range(0.05, 5.0, logarithmic=True),
    "early_s": Range(0.02, 5.0, logarithmic=True),
    "hysteresis": Range(0.0, 2.0),
    "hysteresis_s": Range(0.0, 5.0),
    "z": Range(0.0, 3.0),
    "reserved": Range(0.0, 0.3),
    "eviction_share": Range(0.005, 0.5, logarithmic=True),
    "watermark": Range(0.7, 1.0),
    "zeta": Range(0.7, 1.0),
    "overcommit": Range(1.0, 3.0),
    "slice_tokens": Range(8, 256, logarithmic=True, whole=True),
    "batch_size": Range(1, 256, logarithmic=True, whole=True),
    "budget_tokens": Range(256, 16_384, logarithmic=True, whole=True),
    "draws": Range(0, 16, whole=True),
    "move_gain": Range(0.0, 8.0),
    "prefix_weight": Range(0.0, 4.0),
    "ageing_s": Range(1.0, 600.0, logarithmic=True),
    "base_s": Range(0.002, 0.2, logarithmic=True),
    "base_quantum_s": Range(0.003, 0.3, logarithmic=True),
    "growth": Range(1.25, 8.0, logarithmic=True),
    "queues": Range(2, 64, logarithmic=True, whole=True),
    "levels": Range(1, 32, logarithmic=True, whole=True),
    "threshold": Range(20, 2_000, logarithmic=True, whole=True),
    "quantum": Range(1, 100, logarithmic=True, whole=True),
    "guess_tokens": Range(0, 32, whole=True),
    "tail_weight": Range(0.0, 4.0),
    "tail_share": Range(0.01, 0.5, logarithmic=True),
    "wma_max": Range(5_000, 500_000, logarithmic=True),
    "interval_s": Range(0.1, 10.0, logarithmic=True),
}
# Only several workers give these an effect.
OF_SEVERAL_WORKERS = frozenset({"move_gain", "prefix_weight"})


def parse_ranges(text: str, preset: Preset, workers: int) -> dict[str, Range]:
    """The ranges of `KEY=LEAST:MOST,…`, a key alone with its default range; of an empty text, of
    all numbers of the preset that can have an effect with so many workers. Raises ValueError for an
    unknown key, a choice, a range outside the declared bounds, and a preset without numbers."""
    params = preset.known_params()
    numbers = {key: param for key, param in params.items() if not param.names}
    if not text:
        idle = OF_SEVERAL_WORKERS if workers == 1 else frozenset()
        known = {key: _default(key, numbers[key]) for key in numbers if key not in idle}
        found = {key: range_ for key, range_ in known.items() if range_}
    else:
        found = {}
        for part in (part.strip() for part in text.split(",")):
            key, equals, bounds = part.partition("=")
            require_known("key", key, numbers)
            if key in found:
                raise ValueError(f"keys: {key} is given twice; give each key once")
            found[key] = _parse(key, bounds, numbers[key]) if equals else _need(key, numbers[key])
    if not found:
        raise ValueError(f"the preset {preset.name} has no number to tune; choose another preset")
    return found


def _default(key: str, param: Param) -> Range | None:
    """The row of SEARCHED, else the declared bounds; None if those are too far apart."""
    range_ = SEARCHED.get(key)
    if range_ is None:
        return Range(param.least, param.most) if param.most - param.least <= WIDEST else None
    return Range(
        max(range_.least, param.least),
        min(range_.most, param.most),
        range_.logarithmic,
        range_.whole,
    )


def _need(key: str, param: Param) -> Range:
    if range_ := _default(key, param):
        return range_
    raise ValueError(f"keys: {key} has no range of its own; give one, {key}=LEAST:MOST")


def _parse(key: str, text: str, param: Param) -> Range:
    """A given range; whole and by ratio as the default one, where it can be."""
    try:
        least, most = (float(value) for value in text.split(":"))
    except ValueError:
        raise ValueError(
            f"keys: {f'{key}={text}'!r} is not a range; use {key}=LEAST:MOST, such as decay=0.2:1"
        ) from None
    if not (isfinite(least) and isfinite(most) and least < most):
        raise ValueError(f"keys: {key}={text}: LEAST must be less than MOST, both finite")
    if not param.least <= least < most <= param.most:
        bounds = f"[{param.least:g}, {param.most:g}]"
        raise ValueError(f"keys: {key} must lie in {bounds}, got {text}")
    default = SEARCHED.get(key, Range(least, most))
    if default.whole and (least % 1 or most % 1):
        raise ValueError(f"keys: {key} takes whole numbers, got {text}")
    return Range(least, most, default.logarithmic and least > 0, default.whole)
