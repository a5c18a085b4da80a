"""A product of some rows with a matrix tile in registers (see codegen/vectors.py)."""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.worker.kernels.cpu.codegen.vectors import FLOATS, LANES, Code, builds

Load = Callable[[Any], Any]
Store = Callable[[Any, Any], None]


def _multiplying(typing_context: Any, rows: Any, columns: Any, added: Any, x: Any, row: Any,
                 weight: Any, column: Any, out: Any) -> Any:  # fmt: skip
    """out[row : row + rows, column : column + columns] = x[row : row + rows] · weight[:, column :
    column + columns], and what was there where `added`; x [·, numbers] float32, weight [numbers,
    ·], out [·, ·]. Rounded once. Of whole lanes."""
    tall, wide = rows.literal_value, columns.literal_value

    def build(code: Code) -> None:
        _tile(code, tall, wide // LANES, code.load, code.store)

    return types.void(rows, columns, added, x, row, weight, column, out), builds(build)


def _multiplying_some(typing_context: Any, rows: Any, columns: Any, added: Any, x: Any, row: Any,
                      weight: Any, column: Any, out: Any) -> Any:  # fmt: skip
    """The same of fewer columns than there are lanes, known when it runs."""
    tall = rows.literal_value

    def build(code: Code) -> None:
        some = code.first(code.number(1))

        def load(place: Any) -> Any:
            return code.load_some(place, some)

        def store(x: Any, place: Any) -> None:
            code.store_some(x, place, some)

        _tile(code, tall, 1, load, store)

    return types.void(rows, types.intp, added, x, row, weight, column, out), builds(build)


def _tile(code: Code, tall: int, vectors: int, load: Load, store: Store) -> None:
    """So many rows and vectors of sums, which stay in registers while a loop passes weights by."""
    builder, added, column = code.builder, code.number(2), code.number(6)
    lines = [code.plus(code.number(4), n) for n in range(tall)]
    columns = [code.plus(column, LANES * n) for n in range(vectors)]
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in columns] for _ in lines]  # type: ignore[no-untyped-call]  # no types
    tile = [
        (total, code.place(7, line, at))
        for line, sums in zip(lines, totals, strict=True)
        for total, at in zip(sums, columns, strict=True)
    ]
    for total, place in tile:
        builder.store(builder.select(added, load(place), code.constant(0.0)), total)
    with code.counting(code.length(5)) as number:
        weights = [load(code.place(5, number, at)) for at in columns]
        for line, sums in zip(lines, totals, strict=True):
            each = code.all(builder.load(code.place(3, line, number)))
            for weight, total in zip(weights, sums, strict=True):
                builder.store(code.sum(code.product(weight, each), builder.load(total)), total)
    for total, place in tile:
        store(builder.load(total), place)


multiply: Any = intrinsic(prefer_literal=True)(_multiplying)
multiply_some: Any = intrinsic(prefer_literal=True)(_multiplying_some)
