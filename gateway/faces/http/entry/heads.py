"""HEAD wherever GET is: the same headers, and nothing behind them."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """Asks the app as with GET, and keeps the body back; its length stays in the headers."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)
