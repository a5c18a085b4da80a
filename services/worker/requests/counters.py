"""What a worker's memory and its static batches have done, counted since it started."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counts only grow; tokens are of KV, or computed for nobody in static batches."""

    offloads: int = 0
    offloaded_tokens: int = 0
    uploads: int = 0
    uploaded_tokens: int = 0
    dropped: int = 0  # KV let go, to be computed again
    host_full: int = 0  # of those, because host memory had no room
    prefix_asked_tokens: int = 0  # of prompts, or of what is computed again
    prefix_hit_tokens: int = 0  # of those, found in blocks computed before
    padding_tokens: int = 0  # prefilled for nobody
    padding_left_out_tokens: int = 0  # that memory had no room for, or that broke a step
    invalid_tokens: int = 0  # drawn after a member's end
    stray_rows: int = 0  # computed a step ahead, for who had ended or gone by then
    evicted_offloaded: int = 0  # requests that left for want of memory: their KV rests
    evicted_dropped: int = 0  # and those of which nothing is left
