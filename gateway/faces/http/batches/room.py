"""Room for a further batch, of either API, in the folder. Blocking."""

from gateway.config import GatewayConfig
from gateway.faces.http.batches.store import RETRY_S, BatchStore
from services.runtime.errors import Code, InvalidArgument, ServiceError


def make_room(store: BatchStore, config: GatewayConfig, files: int = 0) -> None:
    """Forgets the oldest ended batches beyond `batches_kept`. `files`: that the batch may write.
    Raises ServiceError if too many have not ended, or if its files have no room. O(batches)."""
    known = store.list_batches()
    unfinished = sum(not each.ended for each in known)
    if unfinished >= config.batches_kept:
        message = f"{unfinished} batches have not ended; retry later"
        raise ServiceError(Code.RESOURCE_EXHAUSTED, message, RETRY_S)
    if files and store.count_files() + files * (unfinished + 1) > config.batch_files:
        raise InvalidArgument(
            "input_file_id",
            f"at most {config.batch_files} files are stored, and the batch may write {files}; "
            "delete some before",
        )
    ended = [each for each in known if each.ended]
    for oldest in ended[max(0, config.batches_kept - unfinished - 1) :]:
        store.remove_batch(oldest.id)
