"""Vector code of the product of some rows with a matrix tile (see codegen/vectors.py)."""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.worker.kernels.cpu.codegen.vectors import FLOATS, LANES, Code, builds

Load = Callable[[Any], Any]
Store = Callable[[Any, Any], None]


def _multiply_code(typing_context: Any, rows: Any, columns: Any, added: Any, x: Any, row: Any,
                 weight: Any, column: Any, out: Any) -> Any:  # fmt: skip
    """out[row : row + rows, column : column + columns] = x[row : row + rows] · weight[:, column :
    column + columns], plus the old values of out if `added`; x [·, numbers] float32, weight
    [numbers, ·], out [·, ·]. Rounds once. `columns` is a multiple of LANES."""
    row_count, column_count = rows.literal_value, columns.literal_value

    def build(code: Code) -> None:
        _tile(code, row_count, column_count // LANES, code.load, code.store)

    return types.void(rows, columns, added, x, row, weight, column, out), builds(build)


def _multiply_some_code(typing_context: Any, rows: Any, columns: Any, added: Any, x: Any, row: Any,
                      weight: Any, column: Any, out: Any) -> Any:  # fmt: skip
    """As `multiply`, for fewer columns than LANES; their number is known at run time."""
    row_count = rows.literal_value

    def build(code: Code) -> None:
        some = code.first(code.number(1))

        def load(place: Any) -> Any:
            return code.load_some(place, some)

        def store(x: Any, place: Any) -> None:
            code.store_some(x, place, some)

        _tile(code, row_count, 1, load, store)

    return types.void(rows, types.intp, added, x, row, weight, column, out), builds(build)


def _tile(code: Code, row_count: int, vectors: int, load: Load, store: Store) -> None:
    """Keeps the sums of a tile in registers during the loop over the weights."""
    builder, added, column = code.builder, code.number(2), code.number(6)
    lines = [code.plus(code.number(4), n) for n in range(row_count)]
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


multiply: Any = intrinsic(prefer_literal=True)(_multiply_code)
multiply_some: Any = intrinsic(prefer_literal=True)(_multiply_some_code)
