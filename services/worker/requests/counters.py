"""Counters of a worker's memory and static batches since its start."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counters only grow; they count KV tokens, or wasted tokens of static batches."""

    offloads: int = 0
    offloaded_tokens: int = 0
    uploads: int = 0
    uploaded_tokens: int = 0
    dropped: int = 0  # KV dropped, to be recomputed
    host_full: int = 0  # of those, because host memory was full
    prefix_asked_tokens: int = 0  # of prompts, and of recomputed contexts
    prefix_hit_tokens: int = 0  # of those, found in the prefix cache
    padding_tokens: int = 0  # padding prefilled in static batches
    padding_left_out_tokens: int = 0  # padding omitted, for lack of memory or after a failed step
    invalid_tokens: int = 0  # drawn after a member's end
    stray_rows: int = 0  # rows of a step ahead whose request had ended or gone
    evicted_offloaded: int = 0  # evicted for lack of memory with their KV in host memory
    evicted_dropped: int = 0  # evicted for lack of memory without KV
