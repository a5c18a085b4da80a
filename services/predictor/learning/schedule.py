"""When a predictor's models are refitted, and how it reads prompts."""

from dataclasses import dataclass

FIRST_CHECK_S = 5.0  # before the first fit, so that the first model comes early
NO_ENCODER = "none"


@dataclass(frozen=True)
class ReadingMode:
    """How prompts are read and learned from.

    encoder: name of the sentence encoder, or NO_ENCODER.
    at_once: prompts are read before the answer; otherwise in the background.
    examples, interval_s: size of the training set and time between refits.
    on_executor: refits run on the executor; otherwise in a separate process.
    """

    encoder: str
    at_once: bool
    examples: int
    interval_s: float
    on_executor: bool


# Fitting the word model to 2,000 examples takes 0.05 s; starting a process would take 2 s.
WORDS = ReadingMode(NO_ENCODER, at_once=True, examples=4_000, interval_s=5.0, on_executor=True)


@dataclass(frozen=True, slots=True)
class RefitSchedule:
    """When to refit; config.py gives the reasons."""

    interval_s: float
    examples_min: int
    new_min: int
    new_share: float
    seed: int

    def is_due(self, pending: int, last_examples: int) -> bool:
        """Whether there are enough examples since the last fit, which had `last_examples`."""
        return pending >= max(self.new_min, self.new_share * last_examples)

    def check_interval_s(self, has_fitted: bool) -> float:
        """Time between two checks whether a fit is due."""
        return self.interval_s if has_fitted else min(self.interval_s, FIRST_CHECK_S)
