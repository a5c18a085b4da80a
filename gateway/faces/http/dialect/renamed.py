"""Fields of one endpoint that are read as those of another."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.runtime.errors import InvalidArgument


@contextmanager
def naming_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the block name fields as the client knows them: each key within a name is replaced
    by its value."""
    try:
        yield
    except InvalidArgument as error:
        field = error.field
        for name, known in names.items():
            field = field.replace(name, known)
        raise InvalidArgument(field, error.message.removeprefix(f"{error.field}: ")) from None
