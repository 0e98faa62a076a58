"""Loops that numpy cannot express, compiled by numba at their first call; the machine code is kept for the next process.

Only the modules with loops import this one, and they are imported where they are used: a command that encodes nothing never pays
for numba. The code is kept beside the source, or in the user's cache directory where that is read-only, or where
NUMBA_CACHE_DIR says; where none of these can be written it is compiled anew in each process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """The function as machine code that runs without the interpreter's lock; integers wrap, indices are not checked.

    It may not make arrays: without numba's runtime there are no reference counts, whose atomic updates cost more than the loops.
    """
    try:
        return cast(Function, numba.njit(nogil=True, _nrt=False, cache=True)(function))
    except RuntimeError:  # numba found no directory to keep the code in
        return cast(Function, numba.njit(nogil=True, _nrt=False)(function))
