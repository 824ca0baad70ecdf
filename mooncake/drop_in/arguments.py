"""Arguments as a compiled binding takes them: wrong types are TypeError, before anything happens.

Knows: what counts as an address, a length, a list of them, a name. Does not know: what they are used for. Callers tell these
errors (a bug of theirs) from negative results (a runtime failure), so the two must not be mixed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_LIMIT = 1 << 64


def integer(value: Any, what: str) -> int:
    """An unsigned 64 bit number: int or anything with `__index__`. Raises TypeError."""
    try:
        number = operator.index(value)
    except TypeError:
        _refuse(what, "an integer", value)
    if not 0 <= number < _LIMIT:
        _refuse(what, "an integer from 0 to 2**64 - 1", value)
    return number


def integers(values: Any, what: str) -> U64:
    """A sequence or numpy array of such numbers, as a column. Raises TypeError."""
    if isinstance(values, np.ndarray):
        return _column(values, what)
    unordered = isinstance(values, (str, bytes, bytearray, Mapping, Set))
    if unordered or not (hasattr(values, "__getitem__") and hasattr(values, "__len__")):
        _refuse(what, "a sequence of integers", values)
    try:
        numbers = values if set(map(type, values)) <= {int} else [operator.index(value) for value in values]
        return np.array(numbers, np.uint64)
    except (TypeError, OverflowError):
        _refuse(what, "a sequence of integers from 0 to 2**64 - 1", values)


def _column(values: npt.NDArray[Any], what: str) -> U64:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        _refuse(what, "a one-dimensional array of integers", values)
    if values.dtype.kind == "i" and len(values) and int(values.min()) < 0:
        _refuse(what, "an array of non-negative integers", values)
    return values.astype(np.uint64, copy=False)


def text(value: Any, what: str) -> str:
    """A str, or UTF-8 bytes. Raises TypeError."""
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        _refuse(what, "a str", value)
    return value


def _refuse(what: str, wanted: str, value: Any) -> NoReturn:
    shown = repr(value)
    raise TypeError(f"{what} must be {wanted}, not {shown[:80]}{'...' if len(shown) > 80 else ''}")
