"""Read pickles without running them: a fixed set of opcodes, and a table that maps names to our own functions.

Python's own unpickler calls whatever a pickle names. Here each name is looked up in a table from the caller, so that a
pickle can only build plain data, and objects that do nothing but hold attributes. Free of torch.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET"),
    *("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD", "BINPERSID"),
)


class Held:
    """Stand-in for an object of a class that a pickle names: it only holds attributes."""

    state: Any = None
    """The state that the pickle sets."""

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


Maker = Callable[..., Any] | type[Held] | object
"""What a name maps to: one of our functions, a subclass of Held, or a value."""


def read_pickle(
    content: bytes, names: Mapping[str, Maker], of_persistent_id: Callable[[Any], Any] | None = None
) -> Any:
    """The data in a pickle; a ValueError for an opcode or a name that is not allowed."""
    try:
        return _Reader(io.BytesIO(content), names, of_persistent_id).load()
    except ValueError as error:
        raise ValueError(_one_line(error)) from None
    except Exception as error:  # from values of the wrong types on the stack
        raise ValueError(f"not a pickle of the expected kind ({type(error).__name__})") from None


def _one_line(error: ValueError) -> str:
    return str(error).partition("\n")[0] or "not a pickle of the expected kind"


# The standard library's unpickler in pure Python, so that the handler of each opcode can be replaced or removed.
class _Reader(pickle._Unpickler):
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self, file: io.BytesIO, names: Mapping[str, Maker], of_persistent_id: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(file)
        self._names, self._of_persistent_id = names, of_persistent_id

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._names:
            shown = f"{module}.{name}"[:100]
            raise ValueError(f"it names {shown!r}, which is not allowed in a checkpoint: nothing was run")
        return self._names[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Any:
        if self._of_persistent_id is None:
            raise ValueError("it refers to something outside")
        return self._of_persistent_id(pid)

    def load_newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if not (isinstance(cls, type) and issubclass(cls, Held)):
            raise ValueError("it makes an object of a class that is not allowed")
        made = cls()
        made.state = arguments or None
        self.append(made)

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not any(function is allowed for allowed in self._names.values()) or not callable(function):
            raise ValueError("it calls what is not allowed")
        self.append(function(*arguments))

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Held):
            raise ValueError("it sets the state of something other than a held object")
        target.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _set(self.stack[-1], key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            _set(self.stack[-1], key, value)

    def load_append(self) -> None:
        value = self.stack.pop()
        _append(self.stack[-1], [value])

    def load_appends(self) -> None:
        values = self.pop_mark()
        _append(self.stack[-1], values)

    def _refuse(self) -> None:
        raise ValueError("it has an instruction that is not allowed in a checkpoint")

    dispatch: ClassVar[dict[int, Any]] = dict.fromkeys(range(256), _refuse) | {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _INSTRUCTIONS
    }
    dispatch |= {
        pickle.NEWOBJ[0]: load_newobj,
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
    }


def _set(target: Any, key: Any, value: Any) -> None:
    # The hash of a tuple of tuples is computed without a limit on depth: such a key could crash the process.
    if type(target) is not dict or not isinstance(key, str | int | Held):
        raise ValueError("it has a dict whose keys are not plain")
    target[key] = value


def _append(target: Any, values: list[Any]) -> None:
    if type(target) is not list:
        raise ValueError("it appends to something other than a list")
    target.extend(values)
