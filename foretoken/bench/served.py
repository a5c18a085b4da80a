"""What a server serves, asked before it is loaded: mistakes are one line each."""

import json
from dataclasses import dataclass

from foretoken.bench.client import Server, said_by

ASK_S = 15.0
DEMO = "demo"


@dataclass(frozen=True)
class Served:
    """A model under the name that requests name it by."""

    model: str
    owner: str = ""

    @property
    def is_demo(self) -> bool:
        """Whether it is the model that ships with foretoken, whose tasks we know."""
        return self.owner == "foretoken" and self.model == DEMO


async def find_served(server: Server, model: str = "") -> Served:
    """The model of that name, or the first one. Raises ValueError, a sentence that says what to do:
    nobody there, no such server, a key that is missing or wrong, no such model."""
    status, body = await server.fetch("GET", "/v1/models", ASK_S)
    where = server.address
    if status in (401, 403):
        raise ValueError(
            f"{where} refuses the key ({status}: {said_by(body)}); give --api-key or "
            "FORETOKEN_API_KEY"
        )
    if status == 404 and model:
        return Served(model)  # a server that lists nothing may still serve it
    if status != 200:
        raise ValueError(
            f"{where} lists no models: GET {where.base}/v1/models answers {status}; is that an "
            "OpenAI-compatible server?"
        )
    cards = _cards(body)
    if not cards:
        raise ValueError(f"{where} serves no model")
    if model and model not in cards:
        raise ValueError(f"{where} serves no model {model!r}; it serves {', '.join(cards)}")
    name = model or next(iter(cards))
    return Served(name, cards[name])


def _cards(body: bytes) -> dict[str, str]:
    """Owners by model."""
    try:
        listed = json.loads(body)["data"]
        return {str(card["id"]): str(card.get("owned_by") or "") for card in listed}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
