"""`GrammarFault`: why a constraint is refused."""


class GrammarFault(Exception):
    """The constraint cannot be enforced; the message says why."""
