"""Messages of the embedding process: a JSON object and bytes, behind the length of each."""

import json
import struct
from collections.abc import Mapping
from typing import Any

HEAD = struct.Struct(">II")


def encode_frame(header: Mapping[str, Any], payload: bytes = b"") -> bytes:
    body = json.dumps(header).encode()
    return HEAD.pack(len(body), len(payload)) + body + payload
