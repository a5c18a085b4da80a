"""Admit by what is held now (vLLM's way; papers/000 §2): outputs are not foreseen at all."""

import numpy as np

from services.batcher.admission import accumulate, decide, longest_fit
from services.batcher.group import Decision, GroupView, Params


def aggressive(view: GroupView, params: Params, rng: np.random.Generator) -> Decision:
    """Admit while held tokens (prompt and generated) fit under `watermark` · capacity.

    `watermark` is a share of the capacity, 0.90 to 0.99 in the paper. The peak it names is what
    is held right after admission. O(queue).
    """
    needs = accumulate(view.running.held, view.queued.held)
    limit = params["watermark"] * view.kv_tokens
    return decide(view, longest_fit(needs, limit, view.room), needs.__getitem__, limit)
