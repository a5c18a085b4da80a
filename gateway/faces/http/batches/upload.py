"""Reads an uploaded file from a form, bounded in size, time and number."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import BinaryIO

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from gateway.config import GatewayConfig
from gateway.faces.http.body import read_pieces
from services.runtime.errors import Code, InvalidArgument, ServiceError

FORM_BYTES = 64 * 2**10  # of the form around the file
MAX_FIELDS = 16
MAX_UPLOADS = 8  # at a time; each has a file in the temporary folder
RETRY_S = 1.0
MULTIPART = "multipart/form-data"
FIELDS = ("file", "purpose")
NO_EXPIRY = "is not supported: files are kept until they are deleted; remove it"


@dataclass(frozen=True)
class Upload:
    content: BinaryIO
    size: int
    filename: str
    purpose: str


class Uploads:
    """Receives uploads, a bounded number at a time."""

    def __init__(self, config: GatewayConfig):
        self._config = config
        self._open = 0

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[Upload]:
        """The upload, during the block. Raises ServiceError and ClientDisconnected."""
        if not request.headers.get("content-type", "").startswith(MULTIPART):
            raise InvalidArgument(
                "", f"send the file as {MULTIPART} with the fields file and purpose"
            )
        if self._open >= MAX_UPLOADS:
            message = f"{MAX_UPLOADS} files are being uploaded; retry later"
            raise ServiceError(Code.RESOURCE_EXHAUSTED, message, RETRY_S)
        self._open += 1
        try:
            parser = MultiPartParser(
                request.headers, self._pieces(request), max_files=1, max_fields=MAX_FIELDS
            )
            async with _closing(parser) as form:
                yield form
        finally:
            self._open -= 1

    async def _pieces(self, request: Request) -> AsyncGenerator[bytes]:
        """The pieces of the body. It may take as long for its size as other bodies."""
        config = self._config
        most = config.batch_file_bytes + FORM_BYTES
        rounds = max(1, -(-most // config.max_body_bytes))
        async for piece in read_pieces(request, config, most, config.max_body_s * rounds):
            yield piece
        yield b""


@asynccontextmanager
async def _closing(parser: MultiPartParser) -> AsyncIterator[Upload]:
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise InvalidArgument("", f"the form is not valid: {error.message}") from None
    except OSError as error:
        message = f"the upload cannot be stored now: {error.strerror}; retry later"
        raise ServiceError(Code.UNAVAILABLE, message, RETRY_S) from None
    try:
        for name in form:
            if name.startswith("expires_after"):
                raise InvalidArgument("expires_after", NO_EXPIRY)
            if name not in FIELDS:
                raise InvalidArgument(name[:80], f"is not one of the fields {' and '.join(FIELDS)}")
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise InvalidArgument("file", "is missing, or has no file name")
        if not isinstance(purpose, str):
            raise InvalidArgument("purpose", "is missing; it must be batch")
        yield Upload(file.file, file.size or 0, (file.filename or "")[:255], purpose)
    finally:
        await form.close()
