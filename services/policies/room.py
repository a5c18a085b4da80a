"""Whether a worker has room for the batch size of a preset."""

from services.policies.form.batch_cuts import MAX_BATCH_SIZE
from services.policies.preset import FORMS_BY_ARRANGEMENT, Preset


def describe_shortage(preset: Preset, kv_tokens: int, context_tokens: int, max_tokens: int) -> str:
    """A sentence that says how many requests fit at once if it is fewer than the preset's batch
    size; empty otherwise and for presets without one. A request counts with its context and the
    tokens of its slice, or `max_tokens` without slices."""
    form = FORMS_BY_ARRANGEMENT[preset.arrangement][preset.form]
    size = int(preset.params.get("batch_size", MAX_BATCH_SIZE))
    ahead = min(int(preset.params.get("slice_tokens", max_tokens)), max_tokens)
    fit = kv_tokens // (context_tokens + ahead)
    if not form.reserves or fit >= size or size == MAX_BATCH_SIZE:
        return ""
    return (
        f"{preset.name}: {kv_tokens:,} KV tokens hold {fit} requests of {context_tokens:,} + "
        f"{ahead:,} tokens, fewer than its batch size of {size}, so it is measured below its "
        f"design: give it {size * (context_tokens + ahead):,} KV tokens, or a lower max_tokens"
    )
