"""Builder of LLVM vector code with sixteen lanes, for loops that Numba does not vectorise well.

An intrinsic is a Python function that generates code when Numba compiles a kernel that calls it;
its docstring describes the generated code. Sizes are compile-time constants, so that all loops over
them are unrolled. LLVM splits vectors that are wider than the processor's.

Stored numbers are float32, int8, or int16 for the bits of a bfloat16. Computation is in float32.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

LANES = 16

FLOAT, INT32, BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(8)
FLOATS, INT32S = ir.VectorType(FLOAT, LANES), ir.VectorType(INT32, LANES)
FUSED = ("contract",)  # allows a product and a sum with one rounding


class Code:
    """Builds the code of one call of an intrinsic. `values` are those of its arguments."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Sequence[Any]):
        self.builder = builder
        self._context = context
        self._kinds, self._values = signature.args, values

    def number(self, argument: int) -> Any:
        """The value of a number argument."""
        return self._values[argument]

    def place(self, argument: int, *indices: Any) -> Any:
        """The address of an array argument's element; indices are values or Python integers."""
        kind, array = self._kinds[argument], self._array(argument)
        wide = self._context.get_value_type(types.intp)
        at = [ir.Constant(wide, x) if isinstance(x, int) else x for x in indices]
        return cgutils.get_item_pointer(  # type: ignore[no-untyped-call]  # no types
            self._context, self.builder, kind, array, at, wraparound=False
        )

    def plus(self, value: Any, number: int) -> Any:
        return self.builder.add(value, ir.Constant(value.type, number))

    def length(self, argument: int) -> Any:
        """The length of an array argument's first dimension."""
        return self.builder.extract_value(self._array(argument).shape, 0)

    def _array(self, argument: int) -> Any:
        make = self._context.make_array(self._kinds[argument])
        return make(self._context, self.builder, self._values[argument])

    @contextmanager
    def counting(self, count: Any) -> Iterator[Any]:
        """A loop; its body is built within the context, which yields the loop index."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index

    def load(self, place: Any, count: int = LANES) -> Any:
        """Loads `count` stored numbers as floats; the other lanes are 0."""
        stored = place.type.pointee
        size = 4 if stored == FLOAT else stored.width // 8
        whole = ir.VectorType(stored, count).as_pointer()
        x = self._real(self.builder.load(self.builder.bitcast(place, whole), align=size), count)
        if count == LANES:
            return x
        zeros = ir.Constant(ir.VectorType(FLOAT, count), [0.0] * count)
        return self.shuffled(x, zeros, [min(lane, count) for lane in range(LANES)])

    def _real(self, x: Any, count: int = LANES) -> Any:
        """Converts stored numbers to floats."""
        if x.type.element == FLOAT:
            return x
        if x.type.element.width == 8:
            return self.builder.sitofp(x, ir.VectorType(FLOAT, count))
        wide = self.builder.zext(x, ir.VectorType(INT32, count))
        sixteen = ir.Constant(ir.VectorType(INT32, count), [16] * count)
        return self.builder.bitcast(self.builder.shl(wide, sixteen), ir.VectorType(FLOAT, count))

    def first(self, count: Any) -> Any:
        """A mask of the first `count` lanes; `count` is known at run time."""
        lanes = ir.Constant(INT32S, list(range(LANES)))
        most = self._spread(self.builder.trunc(count, INT32), INT32S)
        return self.builder.icmp_signed("<", lanes, most)

    def load_some(self, place: Any, some: Any) -> Any:
        """Loads the lanes of a mask as floats; the others are 0, and their memory is not read."""
        kind = ir.VectorType(place.type.pointee, LANES)
        name = f"llvm.masked.load.{_name_of(kind)}.p0{_name_of(kind)}"
        x = self.call(name, kind, self._at(place, kind), self._align(place), some, _zeros(kind))
        return self._real(x)

    def store_some(self, x: Any, place: Any, some: Any) -> None:
        """Stores the lanes of a mask, as `store`."""
        kind = ir.VectorType(place.type.pointee, LANES)
        x = x if place.type.pointee == FLOAT else self._rounded(x)
        name = f"llvm.masked.store.{_name_of(kind)}.p0{_name_of(kind)}"
        self.call(name, ir.VoidType(), x, self._at(place, kind), self._align(place), some)

    def _at(self, place: Any, kind: Any) -> Any:
        return self.builder.bitcast(place, kind.as_pointer())

    def _align(self, place: Any) -> Any:
        stored = place.type.pointee
        return ir.Constant(INT32, 4 if stored == FLOAT else stored.width // 8)

    def store(self, x: Any, place: Any, count: int = LANES) -> None:
        """Stores the first `count` lanes, as float32 or rounded to bfloat16."""
        size = 4
        if place.type.pointee != FLOAT:
            x, size = self._rounded(x), 2
        if count < LANES:
            x = self.shuffled(x, x, list(range(count)))
        self.builder.store(x, self.builder.bitcast(place, x.type.as_pointer()), align=size)

    def _rounded(self, x: Any) -> Any:
        """The bits of the nearest bfloat16, ties to even; NaN stays NaN."""
        bits = self.builder.bitcast(x, INT32S)
        upper = self.builder.lshr(bits, self.integer(16))
        odd = self.builder.and_(upper, self.integer(1))
        near = self.builder.add(self.builder.add(bits, self.integer(0x7FFF)), odd)
        size = self.builder.and_(bits, self.integer(0x7FFFFFFF))
        number = self.builder.icmp_unsigned("<=", size, self.integer(0x7F800000))
        near = self.builder.select(number, near, self.integer(0x7FC00000))
        return self.builder.trunc(
            self.builder.lshr(near, self.integer(16)), ir.VectorType(ir.IntType(16), LANES)
        )

    def shuffled(self, a: Any, b: Any, order: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(
            a, b, ir.Constant(ir.VectorType(INT32, len(order)), list(order))
        )

    def all(self, x: Any) -> Any:
        """A vector with the number in every lane."""
        return self._spread(x, FLOATS)

    def _spread(self, x: Any, kind: Any) -> Any:
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(nothing, x, ir.Constant(INT32, 0))
        return self.shuffled(first, first, [0] * LANES)

    def constant(self, x: float) -> Any:
        return ir.Constant(FLOATS, [x] * LANES)

    def integer(self, x: int) -> Any:
        return ir.Constant(INT32S, [x] * LANES)

    def sum(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=FUSED)

    def product(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=FUSED)

    def sum_of_lanes(self, x: Any) -> Any:
        """The sum of all lanes as a number."""
        half = LANES // 2
        while half:
            order = [(lane + half) % LANES for lane in range(LANES)]
            x, half = self.sum(x, self.shuffled(x, x, order)), half // 2
        return self.builder.extract_element(x, ir.Constant(INT32, 0))

    def call(self, name: str, result: Any, *values: Any) -> Any:
        """Calls an LLVM intrinsic function."""
        kind = ir.FunctionType(result, [value.type for value in values])
        module = self.builder.module
        function = cgutils.get_or_insert_function(module, kind, name)  # type: ignore[no-untyped-call]  # no types
        return self.builder.call(function, values)


def _name_of(kind: Any) -> str:
    """The name of a vector type in the names of LLVM's intrinsic functions."""
    return f"v{kind.count}f32" if kind.element == FLOAT else f"v{kind.count}i{kind.element.width}"


def _zeros(kind: Any) -> Any:
    return ir.Constant(kind, [0.0 if kind.element == FLOAT else 0] * kind.count)


Built = Callable[[Any, Any, Any, Sequence[Any]], Any]


def builds(build: Callable[[Code], None]) -> Built:
    """The code of an intrinsic that returns nothing."""

    def code(context: Any, builder: Any, signature: Any, values: Sequence[Any]) -> Any:
        build(Code(context, builder, signature, values))
        return context.get_dummy_value()

    return code


def vector_parts(dim: int) -> list[tuple[int, int]]:
    """The parts of sixteen lanes of a vector of `dim` numbers: start and size of each."""
    return [(first, min(LANES, dim - first)) for first in range(0, dim, LANES)]
