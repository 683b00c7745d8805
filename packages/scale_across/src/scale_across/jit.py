"""Formulas written once as plain scalar Python, run as Python for one candidate and compiled for a million.

`@formula` only marks a function. numba is imported when a batch is first asked for, so that the command line starts
quickly; the compiled code is cached on disk under a key that holds a digest of every source file of the package,
because numba alone notices changes in the outermost function's file only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_FORMULAS: list[Callable[..., Any]] = []


def formula(function: FunctionT) -> FunctionT:
    """Mark a scalar function as callable from compiled code; it stays an ordinary Python function."""
    _FORMULAS.append(function)
    return function


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Digest of the package's sources, part of the key of cached machine code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def compiled(make: Callable[[str], FunctionT]) -> FunctionT:
    """Compile the function that `make(digest)` returns; it must close over the digest, which keys the disk cache."""
    import numba
    from numba.extending import register_jitable

    for function in _FORMULAS:
        register_jitable(function)
    _FORMULAS.clear()
    result: FunctionT = numba.njit(cache=True, nogil=True, error_model="numpy")(make(source_digest()))
    return result
