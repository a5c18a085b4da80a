"""Find the served model before the load begins; each mistake is one sentence."""

import json
from dataclasses import dataclass

from foretoken.bench.client import Server, error_text

TIMEOUT_S = 15.0
DEMO = "demo"


@dataclass(frozen=True)
class ServedModel:
    """A model by the name that requests use."""

    model: str
    owner: str = ""

    @property
    def is_demo(self) -> bool:
        """Whether this is the demo model, whose tasks are known."""
        return self.owner == "foretoken" and self.model == DEMO


async def find_model(server: Server, model: str = "") -> ServedModel:
    """Return the model of that name, or the first one.

    Raises ValueError if the server is unreachable, is not OpenAI-compatible, rejects the API key or
    does not serve the model.
    """
    status, body = await server.fetch("GET", "/v1/models", TIMEOUT_S)
    where = server.address
    if status in (401, 403):
        raise ValueError(
            f"{where} rejects the API key ({status}: {error_text(body)}); set --api-key or "
            "FORETOKEN_API_KEY"
        )
    if status == 404 and model:
        return ServedModel(model)  # a server without a list may still serve it
    if status != 200:
        raise ValueError(
            f"{where} is not an OpenAI-compatible server: GET {where.base}/v1/models returns "
            f"{status}"
        )
    cards = _cards(body)
    if not cards:
        raise ValueError(f"{where} serves no model")
    if model and model not in cards:
        raise ValueError(f"{where} does not serve {model!r}; it serves {', '.join(cards)}")
    name = model or next(iter(cards))
    return ServedModel(name, cards[name])


def _cards(body: bytes) -> dict[str, str]:
    """Return the owner of each model."""
    try:
        models = json.loads(body)["data"]
        return {str(card["id"]): str(card.get("owned_by") or "") for card in models}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
