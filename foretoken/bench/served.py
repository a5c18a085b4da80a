"""Opens a server and finds its model before the load begins; each mistake is one sentence."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from foretoken.bench.client import Server, error_text
from foretoken.client.address import API_KEY_VARIABLE

if TYPE_CHECKING:
    from foretoken.bench.grpc_client import GrpcServer

AnyServer: TypeAlias = "Server | GrpcServer"
TIMEOUT_S = 15.0
DEMO, FORETOKEN = "demo", "foretoken"
SET_KEY = f"set --api-key or {API_KEY_VARIABLE}"


@dataclass(frozen=True)
class ServedModel:
    """A model by the name that requests use."""

    model: str
    owner: str = ""

    @property
    def is_demo(self) -> bool:
        """Whether this is the demo model. Its tasks are known."""
        return self.owner == FORETOKEN and self.model == DEMO


def open_server(address: str, api_key: str) -> AnyServer:
    """Returns the client of a gRPC address (`grpc://…`, `unix:…`) or of any other, over HTTP."""
    if address.startswith(("grpc://", "unix:")):
        from foretoken.bench.grpc_client import GrpcServer

        return GrpcServer(address, api_key)
    return Server(address, api_key)


async def find_model(server: AnyServer, model: str = "") -> ServedModel:
    """Returns the model of that name, or the first one.

    Raises ValueError if the server is unreachable, is not OpenAI-compatible, rejects the API key or
    does not serve the model.
    """
    where = server.address
    if isinstance(server, Server):
        owners = await _models_over_http(server, model)
    else:
        owners = await _models_over_grpc(server)
    if not owners:
        raise ValueError(f"{where} serves no model")
    if model and model not in owners:
        raise ValueError(f"{where} does not serve {model!r}; it serves {', '.join(owners)}")
    name = model or next(iter(owners))
    return ServedModel(name, owners[name])


async def _models_over_grpc(server: "GrpcServer") -> dict[str, str]:
    from foretoken.client.errors import ForetokenError, Unauthenticated

    try:
        return dict.fromkeys(await server.models(), FORETOKEN)
    except Unauthenticated as error:
        raise ValueError(f"{server.address} rejects the API key ({error}); {SET_KEY}") from None
    except ForetokenError as error:
        raise ValueError(str(error)) from None


async def _models_over_http(server: Server, model: str) -> dict[str, str]:
    """Returns the owner of each model; a server without a list may still serve `model`."""
    status, body = await server.fetch("GET", "/v1/models", TIMEOUT_S)
    where = server.address
    if status in (401, 403):
        raise ValueError(f"{where} rejects the API key ({status}: {error_text(body)}); {SET_KEY}")
    if status == 404 and model:
        return {model: ""}
    if status != 200:
        raise ValueError(
            f"{where} is not an OpenAI-compatible server: GET {where.base}/v1/models returns "
            f"{status}"
        )
    try:
        models = json.loads(body)["data"]
        return {str(card["id"]): str(card.get("owned_by") or "") for card in models}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
