"""Room for a further batch, of either API, in the folder. Blocking."""

from gateway.config import GatewayConfig
from gateway.faces.http.batches.store import RETRY_S, BatchStore
from services.runtime.errors import Code, ServiceError


def make_room(store: BatchStore, config: GatewayConfig) -> int:
    """Forgets the oldest ended batches beyond `batches_kept`. Returns the number of those that have
    not ended. Raises ServiceError if they are too many. O(batches)."""
    known = store.list_batches()
    unfinished = sum(not each.ended for each in known)
    if unfinished >= config.batches_kept:
        message = f"{unfinished} batches have not ended; retry later"
        raise ServiceError(Code.RESOURCE_EXHAUSTED, message, RETRY_S)
    ended = [each for each in known if each.ended]
    for oldest in ended[max(0, config.batches_kept - unfinished - 1) :]:
        store.remove_batch(oldest.id)
    return unfinished
