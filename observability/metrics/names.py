"""A bounded set of label values that come from outside."""

OTHER = "other"
MOST_CHARS = 64


class BoundedLabels:
    """The first values keep their names; later ones, and long ones, become `other`, so that the
    number of series is bounded."""

    def __init__(self, most: int = 32):
        self._most = most
        self._known: set[str] = set()

    def label(self, name: str) -> str:
        if name in self._known:
            return name
        if len(self._known) >= self._most or len(name) > MOST_CHARS:
            return OTHER
        self._known.add(name)
        return name
