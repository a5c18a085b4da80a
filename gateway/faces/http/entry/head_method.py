"""HEAD requests on every path that supports GET."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMethod:
    """Runs a HEAD request as GET and drops the body. The headers keep the body's length."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)
