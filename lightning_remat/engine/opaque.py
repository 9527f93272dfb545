"""Keeping the compiler out of the tape.

A frame that runs while a compiled function is active may be looked at by Dynamo, and our hooks run inside such
functions. What they do is no part of anybody's graph, so their code is marked to be skipped: once, without a wrapper
and so without a cost per call. It is what ``torch._dynamo.eval_frame.skip_code`` does, without importing the compiler.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_frames: Any = torch._C._dynamo.eval_frame
_SKIP = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)


def hide_from_compiler(*modules: ModuleType) -> None:
    """Mark every function and method that is defined in ``modules``, nested ones included."""
    for module in modules:
        for thing in vars(module).values():
            if getattr(thing, "__module__", None) == module.__name__:
                _hide(thing)


def _hide(thing: Any) -> None:
    if isinstance(thing, FunctionType):
        _hide_code(inspect.unwrap(thing).__code__)
        _hide_code(thing.__code__)
    elif isinstance(thing, (classmethod, staticmethod)):
        _hide(thing.__func__)
    elif isinstance(thing, property):
        for part in (thing.fget, thing.fset):
            _hide(part)
    elif isinstance(thing, type):
        for member in vars(thing).values():
            _hide(member)


def _hide_code(code: CodeType) -> None:
    _frames.set_code_exec_strategy(code, _SKIP)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _hide_code(constant)
