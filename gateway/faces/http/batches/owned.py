"""The batches of the caller's key: those of `/v1/batches`, or those of Messages. Blocking."""

from gateway.admission.caller import current_caller
from gateway.faces.http.batches.records import BatchRecord
from gateway.faces.http.batches.store import BatchStore


def list_own_batches(store: BatchStore, of_messages: bool) -> list[BatchRecord]:
    return [each for each in store.list_batches() if _is_own(each, of_messages)]


def find_own_batch(store: BatchStore, batch_id: str, of_messages: bool) -> BatchRecord | None:
    batch = store.find_batch(batch_id)
    return batch if batch is not None and _is_own(batch, of_messages) else None


def _is_own(batch: BatchRecord, of_messages: bool) -> bool:
    return batch.owner == current_caller().key and batch.is_of_messages == of_messages
