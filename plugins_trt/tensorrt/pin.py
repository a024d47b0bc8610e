"""Objects that TensorRT goes on using after Python has let go of them."""

from __future__ import annotations

import ctypes


def pin(thing: object) -> None:
    """Keep an object for the life of the process, also while the interpreter is torn down.

    TensorRT holds creators, plugins and the logger without counting Python's references to them. A list in a module keeps
    them while Python runs, and is emptied when the interpreter ends, before TensorRT's own global parts are: these then
    call what is no more. A count that nobody takes back keeps them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
