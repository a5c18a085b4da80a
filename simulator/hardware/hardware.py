"""Hardware: the step times, memory and engine limits of one worker, read from a TOML file."""

from dataclasses import dataclass, replace

from services.core import WorkerView
from services.costs import CostModel
from services.worker.requests.types.limits import Limits

MAX_BLOCKS = 2**23  # of a pool, 400 MiB in `BlockPool`; 134 million tokens in blocks of 16
INT8_SHARE = 0.63  # of a 16-bit cache's bytes, with ranges, at 16 tokens per block
EOS = 1  # the token with which simulated answers end; all others are 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """One worker: a model on a device or on several with tensor parallelism.

    `cost` predicts a packed engine step. `kv_tokens` and `host_tokens` are KV capacities on the
    device and in host memory. `about` says what the worker is, `source` what its numbers were
    fitted to or derived from. `usd_per_hour` is the price of the worker, 0 if unknown. An engine
    without paged KV `attends_padding` of static batches: a decode step reads its KV, masked. It
    shares no prefixes.
    """

    name: str
    cost: CostModel
    kv_tokens: int
    host_tokens: int = 0
    block_tokens: int = 16
    max_running: int = 256
    max_batch_tokens: int = 2_048
    max_context_tokens: int = 2**20
    report_every_steps: int = 16
    attends_padding: bool = False
    usd_per_hour: float = 0.0
    source: str = ""
    about: str = ""

    def with_int8_at_rest(self) -> "Hardware":
        """The same with KV in INT8 in host memory, as with `worker.swap_dtype=int8`: fewer bytes a
        token on the link and in memory, and the device reads and writes each token in both
        directions at the speed of attention. Unchanged if the file charges quantization already."""
        cost = self.cost
        if cost.quantize_token_s or not self.host_tokens:
            return self
        smaller = replace(
            cost,
            offload_token_s=cost.offload_token_s * INT8_SHARE,
            upload_token_s=cost.upload_token_s * INT8_SHARE,
            quantize_token_s=2 * (1 + INT8_SHARE) * cost.context_token_s,
        )
        return replace(self, cost=smaller, host_tokens=int(self.host_tokens / INT8_SHARE))

    def view(self, worker_id: str, model: str) -> WorkerView:
        """The worker as it describes itself to the scheduler."""
        return WorkerView(
            worker_id,
            worker_id,
            model,
            self.kv_tokens // self.block_tokens * self.block_tokens,
            self.block_tokens,
            self.max_running,
            self.max_context_tokens,
            host_tokens=self.host_tokens,
            max_batch_tokens=self.max_batch_tokens,
            report_every_steps=self.report_every_steps,
        )

    def limits(self, prefix_sharing: bool) -> Limits:
        """The limits of the worker's state."""
        return Limits(
            self.kv_tokens // self.block_tokens,
            self.block_tokens,
            self.max_running,
            self.max_batch_tokens,
            self.max_context_tokens,
            self.report_every_steps,
            frozenset({EOS}),
            self.host_tokens // self.block_tokens,
            prefix_sharing=prefix_sharing and not self.attends_padding,
        )


def check_blocks(name: str, tokens: int, block_tokens: int) -> None:
    """Raises ValueError for a KV capacity, called `name`, of more than MAX_BLOCKS blocks."""
    if tokens // block_tokens > MAX_BLOCKS:
        raise ValueError(
            f"{name} must be at most {MAX_BLOCKS * block_tokens:,} ({MAX_BLOCKS:,} blocks of "
            f"{block_tokens} tokens), got {tokens:,}"
        )
