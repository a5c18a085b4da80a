"""Names: label values that others choose, and few of them."""

OTHER = "other"
MOST_CHARS = 64


class Names:
    """The first so many that come keep their name; all that come later, and any that is long, are
    `other`: whatever is sent, there are no more series than that."""

    def __init__(self, most: int = 32):
        self._most = most
        self._known: set[str] = set()

    def of(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most or len(name) > MOST_CHARS:
            return OTHER
        self._known.add(name)
        return name
