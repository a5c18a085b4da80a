"""Admit by the worst case (TGI's and FastGen's way; papers/000 §2)."""

import numpy as np

from services.batcher.admission import accumulate, decide, longest_fit
from services.batcher.group import Decision, GroupView, Params


def conservative(view: GroupView, params: Params, rng: np.random.Generator) -> Decision:
    """Admit while Σ (prompt + max_tokens) fits in `overcommit` · capacity.

    At overcommit 1 nothing is ever evicted; the paper also tries 1.25 and 1.5. The peak it names
    is that sum. O(queue).
    """
    needs = accumulate(
        view.running.prompt + view.running.max_tokens, view.queued.prompt + view.queued.max_tokens
    )
    limit = params["overcommit"] * view.kv_tokens
    return decide(view, longest_fit(needs, limit, view.room), needs.__getitem__, limit)
