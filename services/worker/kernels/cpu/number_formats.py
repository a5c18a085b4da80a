"""Numbers as stored and as computed: float32, int8, or bfloat16, whose bits numpy only knows as
int16."""

from typing import Any

import numpy as np
import torch
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.generic]

_SIXTEEN, _ONE = np.uint32(16), np.uint32(1)
_BELOW_HALF = np.uint32(0x7FFF)  # of a bfloat16's last bit
_NO_SIGN, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.int16(0x7FC0)


def as_numpy(x: Tensor) -> Numbers:
    """The same memory; the bits of bfloat16."""
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()


def real(x: Any) -> Any:
    """A stored number as float32; for code that Numba compiles, like the functions below."""
    raise NotImplementedError


def stored(x: Any, like: Any) -> Any:
    """A float32 in the stored format of the other argument; bfloat16 rounds to nearest, ties to
    even."""
    raise NotImplementedError


def reals(x: Any) -> Any:
    """Stored numbers [rows, ·] as float32: unchanged, or a converted copy for bfloat16."""
    raise NotImplementedError


@overload(real, inline="always")
def _real(x: Any) -> Any:
    return _from_bits if x.bitwidth == 16 else _from_number


def _from_bits(x: Any) -> Any:
    return np.uint32(np.uint32(np.uint16(x)) << _SIXTEEN).view(np.float32)


def _from_number(x: Any) -> Any:
    return np.float32(x)


@overload(reals)
def _reals(x: Any) -> Any:
    return _all_from_bits if x.dtype.bitwidth == 16 else _unchanged


def _unchanged(x: Any) -> Any:
    return x


def _all_from_bits(x: Any) -> Any:
    floats = np.empty(x.shape, np.float32)
    for row in range(x.shape[0]):
        numbers, into = x[row], floats[row]
        for i in range(len(numbers)):
            into[i] = real(numbers[i])
    return floats


@overload(stored, inline="always")
def _stored(x: Any, like: Any) -> Any:
    return _to_bits if like.bitwidth == 16 else _to_number


def _to_bits(x: Any, like: Any) -> Any:
    bits = np.float32(x).view(np.uint32)
    rounded = np.uint32(bits + _BELOW_HALF + (np.uint32(bits >> _SIXTEEN) & _ONE))
    if np.uint32(bits & _NO_SIGN) > _INFINITY:
        return _NAN
    return np.int16(np.uint16(rounded >> _SIXTEEN))


def _to_number(x: Any, like: Any) -> Any:
    return np.float32(x)
