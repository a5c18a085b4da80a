"""Merging: the texts of several processes' metrics as one.

A *block* is a family's lines: HELP, TYPE and series, each with a line feed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

Blocks = Mapping[str, str]  # by family, in order


def split_blocks(text: str) -> Blocks:
    """The blocks of a text. That of a process of ours has them one after another; another one is
    put in order first. O(families), else O(lines)."""
    found: dict[str, str] = {}
    documentation = ""
    if not text.startswith("# HELP "):
        text = merge([text])
    for piece in text.removesuffix("\n").split("\n# ") if text else ():
        lines = piece.removeprefix("# ")
        kind, name, _ = lines.split(" ", 2)
        if kind == "HELP":
            documentation = f"# {lines}\n"
        else:
            found[name] = f"{documentation}# {lines}\n"
            documentation = ""
    return found


class Merger:
    """Merges the same processes over and over: a family is merged anew only where one of its blocks
    has changed."""

    def __init__(self, aliases: Mapping[str, str] | None = None):
        """Families in `aliases` are added by their aliases at the end, as by `with_aliases`."""
        self._aliases = aliases or {}
        self._families: dict[str, _Merged] = {}

    def merge(self, processes: Sequence[Blocks]) -> bytes:
        """The text, encoded, as it is sent. O(families + lines of changed families)."""
        names = dict.fromkeys(chain.from_iterable(processes))
        merged = {name: self._merge_family(name, processes) for name in names}
        self._families = merged
        texts = [each.text for each in merged.values()]
        return b"".join(texts + [each.copy for each in merged.values()])

    def _merge_family(self, name: str, processes: Sequence[Blocks]) -> "_Merged":
        blocks = [process[name] for process in processes if name in process]
        known = self._families.get(name)
        if known is not None and known.blocks == blocks:
            return known
        text = blocks[0] if len(blocks) == 1 else merge(blocks)
        has_copy = name in self._aliases or name.removesuffix("_total") in self._aliases
        copy = with_aliases(text, self._aliases)[len(text) :] if has_copy else ""
        return _Merged(blocks, text.encode(), copy.encode())


class _Merged:
    """A merged family; `copy` is the one by its alias."""

    __slots__ = ("blocks", "copy", "text")

    def __init__(self, blocks: list[str], text: bytes, copy: bytes):
        self.blocks, self.text, self.copy = blocks, text, copy


def merge(texts: Iterable[str]) -> str:
    """The texts of several processes as one: each family once, with the series of all processes.

    Keeps the first of duplicate series, and the first HELP and TYPE of a family. Drops empty lines.
    O(lines).
    """
    families: dict[str, _Family] = {}
    for text in texts:
        _add_families(text, families)
    return "".join(line for name, family in families.items() for line in family.lines(name))


def with_aliases(text: str, names: Mapping[str, str]) -> str:
    """The text, followed by copies of the families in `names` (name → alias).

    Names and aliases omit the suffixes `_total`, `_bucket`, `_sum` and `_count`, which are kept.
    The text must be an output of `merge`.
    """
    added, old, new = [], "", ""
    for line in text.split("\n"):
        if line.startswith("#"):
            mark, kind, family, rest = f"{line} ".split(" ", 3)
            old = family if family in names else family.removesuffix("_total")
            new = names.get(old, "")
            if new:
                added.append(f"{mark} {kind} {new}{family[len(old) :]} {rest[:-1]}\n")
        elif new and line:
            added.append(f"{new}{line[len(old) :]}\n")
    return text + "".join(added)


class _Family:
    """The lines of one family. `series`: values by name and labels."""

    __slots__ = ("help", "kind", "series")

    def __init__(self) -> None:
        self.help = self.kind = ""
        self.series: dict[str, str] = {}

    def lines(self, name: str) -> Iterator[str]:
        if self.help:
            yield f"{self.help}\n"
        yield f"{self.kind or f'# TYPE {name} untyped'}\n"
        for series, value in self.series.items():
            yield f"{series} {value}\n"


def _add_families(text: str, families: dict[str, _Family]) -> None:
    name, family = "", _Family()
    for line in text.split("\n"):
        if line.startswith(("# HELP ", "# TYPE ")):
            _, kind, name, *rest = line.split(" ", 3)
            if not (name and rest):  # malformed
                continue
            family = families.setdefault(name, _Family())
            if kind == "HELP":
                family.help = family.help or line
            else:
                family.kind = family.kind or line
        elif line and line[0] != "#":
            series, _, value = line.rpartition(" ")
            if not (name and series.startswith(name)):  # a series without a declared family
                name = series.partition("{")[0]
                family = families.setdefault(name, _Family()) if name else _Family()
            family.series.setdefault(series, value)
