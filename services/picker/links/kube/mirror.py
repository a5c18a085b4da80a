"""Mirror: a copy of a collection of Kubernetes' API, kept current."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Generic, TypeVar

from services.picker.core.inference_pool import Object, ObjectError
from services.picker.links.kube.api import ApiError, Collection, KubeApi
from services.runtime.network.backoff import Backoff

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSES = Backoff(0.2, 10.0)
MAX_OBJECTS = 16_384  # of one collection


class Mirror(Generic[T]):
    """What `read` makes of each object, by its name; objects without a value (None) are left out.

    While the API is away, or refuses, the last values stay. The loss and the return are logged once
    each.
    """

    def __init__(
        self,
        api: KubeApi,
        what: str,
        collection: Collection,
        read: Callable[[Object], T | None],
        changed: Callable[[], None],
    ):
        """`what` names the collection in the log. `changed` is called when `values` may have
        changed, first when all are known. `read` raises ObjectError for an unusable object."""
        self.values: dict[str, T] = {}
        self.known = False  # all of them
        self._api, self._what, self._collection = api, what, collection
        self._read, self._changed = read, changed
        self._version = ""  # empty: list first
        self._problem, self._failures = "", 0

    async def run(self) -> None:
        """Follows the collection until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
                self._failures = 0
            except ApiError as error:
                # Versions are kept for minutes: a watch that starts at an older one lists first.
                if error.status == HTTPStatus.GONE:
                    self._version = ""
                elif self._failures:  # a connection that breaks off once is no outage
                    self._report(str(error))
                self._failures += 1
            except ObjectError as error:
                self._version = ""
                self._report(str(error))
                self._failures += 1
            await asyncio.sleep(PAUSES.after_s(self._failures))

    async def _list(self) -> None:
        found: dict[str, T] = {}
        version = await self._api.list(self._collection, lambda item: self._keep(found, item))
        self.values, self._version, self.known = found, version, True
        self._changed()

    async def _watch(self) -> None:
        async with self._api.watch(self._collection, self._version) as events:
            self._report("")
            async for event in events:
                if event.kind != "BOOKMARK":
                    self._keep(self.values, event.item, gone=event.kind == "DELETED")
                self._version, self._failures = event.version, 0
                self._changed()

    def _keep(self, values: dict[str, T], item: Object, gone: bool = False) -> None:
        try:
            name = item["metadata"]["name"]
            value = None if gone else self._read(item)
            known = name in values
        except (KeyError, TypeError, AttributeError):
            raise ObjectError("an object does not have the fields of its schema") from None
        if value is None:
            values.pop(name, None)
            return
        if not known and len(values) >= MAX_OBJECTS:
            raise ObjectError(f"there are over {MAX_OBJECTS}")
        values[name] = value

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            said = f"{problem}; the earlier ones stay" if problem else "read again"
            log.warning("Kubernetes' API (%s): %s", self._what, said)
        self._problem = problem
