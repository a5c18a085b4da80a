"""Vector code of a head's norm and rotation, in registers (see codegen/vectors.py)."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from services.worker.kernels.cpu.codegen.vectors import FLOAT, Code, builds, vector_parts


def _rotate_code(typing_context: Any, dim: Any, half: Any, normed: Any, x: Any, row: Any, head: Any,
             weight: Any, eps: Any, cos: Any, sin: Any) -> Any:  # fmt: skip
    """Changes x[row, head] in place: applies the norm of weight[head] and eps if `normed`, then
    rotates the first 2 · half numbers by cos[row] and sin[row] [2 · half]; x [rows, heads, dim]."""
    dims, halves = dim.literal_value, half.literal_value

    def build(code: Code) -> None:
        row, head = code.number(4), code.number(5)
        low = vector_parts(halves)
        high = [(halves + begin, size) for begin, size in low]
        rest = [(2 * halves + begin, size) for begin, size in vector_parts(dims - 2 * halves)]
        pieces = [*low, *high, *rest]
        places = [code.place(3, row, head, begin) for begin, _ in pieces]
        numbers = [code.load(place, size) for place, (_, size) in zip(places, pieces, strict=True)]
        if normed.literal_value:
            scale = code.all(_scale(code, numbers, dims))
            weights = [code.load(code.place(6, head, begin), size) for begin, size in pieces]
            numbers = [
                code.product(code.product(number, scale), each)
                for number, each in zip(numbers, weights, strict=True)
            ]
        count = len(low)
        firsts, seconds = numbers[:count], numbers[count : 2 * count]
        rotated = [
            *_rotated(code, firsts, seconds, low, row),
            *_rotated(code, seconds, firsts, high, row),
            *numbers[2 * count :],
        ]
        for number, place, (_, size) in zip(rotated, places, pieces, strict=True):
            code.store(number, place, size)

    arguments = (dim, half, normed, x, row, head, weight, eps, cos, sin)
    return types.void(*arguments), builds(build)


def _scale(code: Code, numbers: list[Any], dim: int) -> Any:
    """1 / √(mean of the squares + eps)."""
    squares = code.product(numbers[0], numbers[0])
    for number in numbers[1:]:
        squares = code.sum(code.product(number, number), squares)
    mean = code.builder.fdiv(code.sum_of_lanes(squares), ir.Constant(FLOAT, float(dim)))
    root = code.call("llvm.sqrt.f32", FLOAT, code.builder.fadd(mean, code.number(7)))
    return code.builder.fdiv(ir.Constant(FLOAT, 1.0), root)


def _rotated(
    code: Code, own: list[Any], other: list[Any], pieces: list[tuple[int, int]], row: Any
) -> list[Any]:
    """own · cos + other · sin."""
    rotated = []
    for a, b, (begin, size) in zip(own, other, pieces, strict=True):
        cos, sin = (code.load(code.place(argument, row, begin), size) for argument in (8, 9))
        rotated.append(code.sum(code.product(a, cos), code.product(b, sin)))
    return rotated


rotate_head: Any = intrinsic(prefer_literal=True)(_rotate_code)
