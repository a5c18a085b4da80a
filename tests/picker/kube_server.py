"""KubeServer: lists and watches of Kubernetes' API over HTTP, for objects that tests set.

No package carries a kube-apiserver. This server has the parts that Kubernetes documents under "API
concepts": versions, pages with `continue`, label selectors, watches as lines of JSON in chunks,
bookmarks, ERROR events with 410 for compacted versions, and Status objects. `kubectl` reads it, too
(test_kube.py).
"""

import asyncio
import copy
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.reach import until

Object = dict[str, Any]

PODS = "/api/v1/namespaces/vllm/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/vllm/inferencepools"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/vllm/inferenceobjectives"
KINDS: Mapping[str, tuple[str, str]] = {
    PODS: ("v1", "Pod"),
    POOLS: ("inference.networking.k8s.io/v1", "InferencePool"),
    OBJECTIVES: ("inference.networking.x-k8s.io/v1alpha2", "InferenceObjective"),
}
POD_RESOURCE = {"name": "pods", "namespaced": True, "kind": "Pod", "verbs": ["list", "watch"]}
# What kubectl asks for first.
DISCOVERY: Mapping[str, Object] = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [POD_RESOURCE]},
}


@dataclass(frozen=True)
class Change:
    path: str
    version: int
    kind: str
    before: Object | None
    item: Object


class Refusal(Exception):
    """An answer that is a Status."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
        self.status = {"kind": "Status", "code": code, "status": "Failure", "message": message}


@dataclass
class KubeServer:
    """`tokens`: those that are accepted; None: all. `forbidden` paths get 403. `garbage` is sent
    instead of lists of its paths. `asked` counts the lists and watches by path."""

    tokens: set[str] | None = None
    forbidden: set[str] = field(default_factory=set)
    garbage: dict[str, bytes] = field(default_factory=dict)
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    port: int = 0
    _objects: dict[str, dict[str, Object]] = field(default_factory=lambda: {p: {} for p in KINDS})
    _changes: list[Change] = field(default_factory=list)
    _compacted: int = 0
    _version: int = 100
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _bookmarks: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    # What tests do

    def put(self, path: str, name: str, content: Object) -> None:
        """Creates or replaces an object."""
        before = self._objects[path].get(name)
        version, kind = KINDS[path]
        item = {"apiVersion": version, "kind": kind, **copy.deepcopy(content)}
        item.setdefault("metadata", {})["name"] = name
        self._change(path, "MODIFIED" if before else "ADDED", before, item)
        self._objects[path][name] = item

    def delete(self, path: str, name: str) -> None:
        before = self._objects[path].pop(name)
        self._change(path, "DELETED", before, copy.deepcopy(before))

    def compact(self) -> None:
        """Forgets all versions but the current one."""
        self._changes.clear()
        self._compacted = self._version

    def bookmark(self) -> None:
        """All open watches get a bookmark."""
        self._version += 1
        self._bookmarks = self._version
        self._notify()

    def cut(self) -> None:
        """Breaks all connections off."""
        for writer in self._open:
            writer.transport.abort()
        self._notify()  # watches that wait for a change end

    def _change(self, path: str, kind: str, before: Object | None, item: Object) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._changes.append(Change(path, self._version, kind, before, item))
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # HTTP

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """The URL. Called again, it has the same port."""
        server = await asyncio.start_server(self._handle, "127.0.0.1", self.port, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        finally:
            server.close()
            self.cut()
            await until(lambda: not self._open)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines if line)
                url = urlsplit(first.split(" ")[1])
                query = {key: values[0] for key, values in parse_qs(url.query).items()}
                try:
                    await self._answer(url.path, query, headers, writer)
                except Refusal as refusal:
                    _send(writer, refusal.code, refusal.status)
        self._open.discard(writer)
        writer.close()

    async def _answer(
        self, path: str, query: dict[str, str], headers: dict[str, str], writer: Any
    ) -> None:
        token = headers.get("authorization", "").removeprefix("bearer ")
        if self.tokens is not None and token not in self.tokens:
            raise Refusal(401, "Unauthorized")
        if path in DISCOVERY:
            return _send(writer, 200, DISCOVERY[path])
        if path in self.forbidden:
            raise Refusal(403, f'pods is forbidden: User "epp" cannot list path "{path}"')
        if path not in KINDS:
            raise Refusal(404, "the server could not find the requested resource")
        watches = query.get("watch") in ("true", "1")
        self.asked["watch" if watches else "list", path] += 1
        if watches:
            await self._watch(path, query, writer)
        elif path in self.garbage:
            _send_body(writer, 200, self.garbage[path])
        else:
            _send(writer, 200, self._list(path, query))
        return None

    def _list(self, path: str, query: dict[str, str]) -> Object:
        """Pages go by names; the token is the last one, and the version of the first page."""
        version, after = str(self._version), ""
        if "continue" in query:
            version, after = query["continue"].split(" ", 1)
            if int(version) < self._compacted:
                raise Refusal(410, "The provided continue parameter is too old")
        found = [
            item
            for name, item in sorted(self._objects[path].items())
            if name > after and _selected(item, query)
        ]
        limit = int(query.get("limit", 0)) or len(found)
        metadata = {"resourceVersion": version}
        if found[limit:]:
            metadata["continue"] = f"{version} {found[limit - 1]['metadata']['name']}"
        group, kind = KINDS[path]
        return {
            "kind": f"{kind}List",
            "apiVersion": group,
            "metadata": metadata,
            "items": found[:limit],
        }

    async def _watch(self, path: str, query: dict[str, str], writer: Any) -> None:
        version = int(query["resourceVersion"])
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if version < self._compacted:
            gone = Refusal(410, f"too old resource version: {version} ({self._compacted})")
            _send_chunk(writer, {"type": "ERROR", "object": gone.status})
            writer.write(b"0\r\n\r\n")
            return
        async with asyncio.timeout(float(query.get("timeoutSeconds", 600))):
            while not writer.transport.is_closing():
                changed = self._changed
                for change in list(self._changes):
                    if change.path == path and change.version > version:
                        for event in _events(change, query):
                            _send_chunk(writer, event)
                if self._bookmarks > version and query.get("allowWatchBookmarks") == "true":
                    group, kind = KINDS[path]
                    bookmark = {"metadata": {"resourceVersion": str(self._version)}}
                    item = {"kind": kind, "apiVersion": group, **bookmark}
                    _send_chunk(writer, {"type": "BOOKMARK", "object": item})
                version = self._version
                await writer.drain()
                await changed.wait()


def _events(change: Change, query: dict[str, str]) -> Iterator[Object]:
    """The event of a change for a selector: objects enter and leave by their labels, too."""
    now = change.kind != "DELETED" and _selected(change.item, query)
    then = change.before is not None and _selected(change.before, query)
    if now or then:
        kind = ("MODIFIED" if then else "ADDED") if now else "DELETED"
        yield {"type": kind, "object": change.item}


def _selected(item: Object, query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = [each.split("=", 1) for each in query.get("labelSelector", "").split(",") if each]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    fits = all(labels.get(key) == value for key, value in wanted)
    return fits and name in ("", item["metadata"]["name"])


def _send(writer: asyncio.StreamWriter, status: int, content: Object) -> None:
    _send_body(writer, status, json.dumps(content).encode())


def _send_body(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = f"HTTP/1.1 {status} S\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)


def _send_chunk(writer: asyncio.StreamWriter, event: Object) -> None:
    line = json.dumps(event).encode() + b"\n"
    writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
