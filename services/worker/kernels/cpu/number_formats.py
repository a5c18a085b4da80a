"""Conversions between stored and computed numbers: float32, int8, and bfloat16, which NumPy handles
as the int16 of its bits."""

from typing import Any

import numpy as np
import torch
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.generic]

_SIXTEEN, _ONE = np.uint32(16), np.uint32(1)
_BELOW_HALF = np.uint32(0x7FFF)  # just below half of the last bit of a bfloat16
_NO_SIGN, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.int16(0x7FC0)


def as_numpy(x: Tensor) -> Numbers:
    """A view of the same memory; for bfloat16, of its bits."""
    return (x.view(torch.int16) if x.dtype is torch.bfloat16 else x).numpy()


def real(x: Any) -> Any:
    """Converts a stored number to float32. This and the next two are for code that Numba
    compiles."""
    raise NotImplementedError


def stored(x: Any, like: Any) -> Any:
    """Converts a float32 to the stored format of `like`; bfloat16 rounds to nearest, ties to
    even."""
    raise NotImplementedError


def reals(x: Any) -> Any:
    """Converts stored numbers [rows, ·] to float32: unchanged, or a converted copy for bfloat16."""
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
