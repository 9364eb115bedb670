"""What runs inside the sandboxes of `python_tests`; it imports nothing but the standard library.

The answer runs in one sandbox and its tests in another. Tests call the answer through a socket and
get plain values back, so the answer can neither see nor change what it is compared with: whatever
it does in its own process, it has to return what the tests expect. Values of other types stay where
they are; the other side holds a `Remote`, on which only attributes, calls and iteration work.
"""

import builtins
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

Message = Any
"""A JSON value."""
_LONGEST_REASON = 500
"""Characters of what is told of an exception."""


class Stopped(BaseException):
    """The other side ended, or sent what nobody can read; no test can catch it as an error."""


class Channel:
    """Sends and receives JSON messages of at most `longest` bytes through a socket, one a line."""

    def __init__(self, descriptor: int, longest: int) -> None:
        self._descriptor, self._longest = descriptor, longest
        self._lines = open(descriptor, "rb", closefd=False)  # noqa: SIM115

    def send(self, message: Message) -> None:
        """Sends a message; raises ValueError for one that is too long."""
        data = json.dumps(message).encode("ascii") + b"\n"
        if len(data) > self._longest:
            raise ValueError("output: too long a value")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            raise Stopped("ended") from None

    def receive(self) -> Message:
        """Waits for a message; raises Stopped if there is none, or it cannot be read."""
        try:
            line = self._lines.readline(self._longest)
            if line.endswith(b"\n"):
                return json.loads(line)
        except OSError:
            raise Stopped("ended") from None
        except (ValueError, RecursionError):
            raise Stopped("unreadable value") from None
        except MemoryError:
            raise Stopped("MemoryError") from None
        raise Stopped("output: too long a value" if len(line) == self._longest else "ended")


# Values ------------------------------------------------------------------------------------------

_COLLECTIONS: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def pack_value(value: Any, keep: Callable[[Any], int]) -> Message:
    """Returns a value as JSON; what is not plain is kept here, and its number is sent.

    A value of a subclass is sent as one of its base: a `Counter` is a dict.
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, Remote):
        return {"yours": value.number}
    if isinstance(value, int) or hasattr(type(value), "__index__"):
        number = operator.index(value)
        return number if abs(number) < 1 << 63 else {"int": hex(number)}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        pairs = [[pack_value(k, keep), pack_value(v, keep)] for k, v in value.items()]
        return {"dict": pairs}
    for name, kind in _COLLECTIONS.items():
        if isinstance(value, kind):  # type: ignore[arg-type]
            return {name: [pack_value(each, keep) for each in value]}
    return {"mine": keep(value)}


def unpack_value(data: Message, peer: "Peer") -> Any:
    """Returns the value of a message, in exactly the plain types of Python, or raises Stopped."""
    try:
        return _unpack(data, peer)
    except (ValueError, TypeError, LookupError, RecursionError, AttributeError, OverflowError):
        raise Stopped("unreadable value") from None


def _unpack(data: Message, peer: "Peer") -> Any:
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("a bare list")
        return data
    ((name, content),) = data.items()
    if name in _COLLECTIONS:
        return _COLLECTIONS[name](_unpack(each, peer) for each in content)
    if name == "dict":
        return {_unpack(key, peer): _unpack(value, peer) for key, value in content}
    if name == "int":
        return int(content, 16)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    if name == "yours":
        return peer.objects[content]
    if name == "mine" and type(content) is int:
        return Remote(peer, content)
    raise ValueError(name)


class Remote:
    """An object of the other side, which is equal to nothing here but itself."""

    __slots__ = ("_peer", "number")

    def __init__(self, peer: "Peer", number: int) -> None:
        self._peer, self.number = peer, number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("attribute", self.number, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer.ask("call", self.number, args, named)

    def __iter__(self) -> "Remote":
        iterator = self._peer.ask("iterate", self.number)
        if not isinstance(iterator, Remote):
            raise TypeError("not an iterator")
        return iterator

    def __next__(self) -> Any:
        return self._peer.ask("advance", self.number)

    def __repr__(self) -> str:
        return "<object of the answer>"


class AnswerError(Exception):
    """An exception of the answer that is none of Python's own."""


class Peer:
    """One of the two sides: asks the other one, and answers it.

    `find` finds an object by its name; without it, only objects that were sent can be used, and
    only called, as a test's callbacks. `errors` has the names of exceptions that the other side
    raised, and `stopped` why no more can be asked.
    """

    def __init__(self, channel: Channel, find: Callable[[str], Any] | None) -> None:
        self._channel, self._find = channel, find
        self.objects: list[Any] = []
        self.stopped: str | None = None
        self.errors: set[str] = set()

    def ask(self, what: str, *arguments: Any) -> Any:
        """Has the other side do something, and returns or raises what comes of it."""
        if self.stopped is not None:
            raise Stopped(self.stopped)
        packed = [pack_value(argument, self.keep) for argument in arguments]
        try:
            self._channel.send({"ask": what, "arguments": packed})
            while "ask" in (message := self._receive()):
                self._answer(message)
            if "error" not in message:
                return unpack_value(message.get("value"), self)
        except Stopped as reason:
            self.stopped = str(reason)
            raise
        name, text = message["error"]
        self.errors.add(name)
        raise _build_exception(name, text)

    def serve(self) -> NoReturn:
        """Answers the other side until it ends."""
        while True:
            self._answer(self._receive())

    def keep(self, value: Any) -> int:
        """Keeps an object that the other side may name by the returned number."""
        self.objects.append(value)
        return len(self.objects) - 1

    def _receive(self) -> Message:
        message = self._channel.receive()
        if not isinstance(message, dict):
            raise Stopped("unreadable value")
        if "error" in message and not _is_error(message["error"]):
            raise Stopped("unreadable value")
        return message

    def _answer(self, message: Message) -> None:
        try:
            arguments = [unpack_value(each, self) for each in message.get("arguments", ())]
            value = self._do(str(message.get("ask")), *arguments)
            reply = {"value": pack_value(value, self.keep)}
            self._channel.send(reply)
        except Stopped:
            raise
        except BaseException as error:  # noqa: BLE001  whatever the answer raises
            text = str(error)[:_LONGEST_REASON] if isinstance(error, Exception) else ""
            self._channel.send({"error": [type(error).__name__, text]})

    def _do(self, what: str, *arguments: Any) -> Any:
        if what == "call":
            number, args, named = arguments
            return self.objects[number](*args, **named)
        if self._find is None:
            raise Stopped("unreadable value")
        if what == "name":
            return self._find(arguments[0])
        if what == "attribute":
            return getattr(self.objects[arguments[0]], arguments[1])
        if what == "iterate":
            return _KeptIterator(iter(self.objects[arguments[0]]))
        return next(self.objects[arguments[0]])


class _KeptIterator:
    """An iterator that stays here, whatever its type is."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __next__(self) -> Any:
        return next(self._iterator)


def _build_exception(name: str, text: str) -> Exception:
    """The exception of Python of that name, or an `AnswerError`."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass
    return AnswerError(f"{name}: {text}")


# The sandbox of the answer -----------------------------------------------------------------------


def serve_answer(channel: Channel) -> None:
    """Runs an answer as a module, and lets tests use it."""
    channel.send("ready")
    code = channel.receive()
    module = types.ModuleType("answer")
    sys.modules["answer"] = module

    def find(name: str) -> Any:
        return module.__dict__[name]

    try:
        exec(compile(code, "answer.py", "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001  whatever the answer raises
        channel.send([type(error).__name__, str(error)[:_LONGEST_REASON]])
        return
    channel.send(None)
    Peer(channel, find).serve()


def run_answer(channel: Channel) -> None:
    """Runs an answer as a program, once per text on stdin; a process each."""
    channel.send("ready")
    code = channel.receive()
    while True:
        channel.send(_run_once(code, channel.receive()))


def _run_once(code: str, text: str) -> Message:
    """What a program wrote to stdout, and its exit status as `waitstatus_to_exitcode` has it."""
    stdin, stdout = (_open_unnamed_file(name) for name in ("stdin", "stdout"))
    os.write(stdin, text.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    if not (child := os.fork()):
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        _run_program(code)
    _, status = os.waitpid(child, 0)
    size = os.fstat(stdout).st_size
    written = os.pread(stdout, size, 0).decode(errors="replace")
    os.close(stdin)
    os.close(stdout)
    return {"stdout": written, "status": os.waitstatus_to_exitcode(status)}


def _open_unnamed_file(name: str) -> int:
    descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)  # noqa: PTH108
    return descriptor


def _run_program(code: str) -> NoReturn:
    status = 1
    try:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.argv = ["answer.py"]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(code, "answer.py", "exec"), module.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(status & 0xFF)


OUT_OF_MEMORY = 77
"""Exit status of a program that ran out of memory."""


# The sandbox of the tests ------------------------------------------------------------------------


def run_tests(channel: Channel, to_answer: Channel) -> None:
    """Runs tests against an answer in another sandbox, and reports which pass.

    Receives `{code, tests: [{code, names, modules}]}`, and reports `{passed: [bool], why: str}`,
    with the reason of the first failure.
    """
    to_answer.receive()
    channel.send("ready")
    request = channel.receive()
    passed: list[bool] = []
    try:
        to_answer.send(request["code"])
        error = to_answer.receive()
    except Stopped as reason:
        channel.send({"passed": passed, "why": str(reason)})
        return
    if error is not None:
        fault = _describe(*error) if _is_error(error) else "unreadable value"
        channel.send({"passed": passed, "why": fault})
        return
    peer, first = Peer(to_answer, None), None
    for number, test in enumerate(request["tests"], 1):
        why = _run_test(test, peer)
        passed.append(why is None)
        if why is not None and first is None:
            first = f"test {number} of {len(request['tests'])}: {why}"
    channel.send({"passed": passed, "why": peer.stopped or first})


def _run_test(test: Message, peer: Peer) -> str | None:
    """Why a test does not pass; None if it does."""
    peer.errors.clear()
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        for name in test["modules"]:
            space[name] = __import__(name)
        for name in test["names"]:
            with suppress(KeyError):  # the test says that it is not defined
                space[name] = peer.ask("name", name)
        exec(compile(test["code"], "tests.py", "exec"), space)
        for name, function in list(space.items()):
            if name.startswith("test_") and isinstance(function, types.FunctionType):
                function()
    except BaseException as error:  # noqa: BLE001  whatever the test raises
        if "MemoryError" in peer.errors:
            return "MemoryError"
        return _describe(type(error).__name__, str(error))
    return peer.stopped  # also where the test caught it


def _is_error(error: Message) -> bool:
    """Whether this is the name and the text of an exception, and not what an answer sent as one."""
    return isinstance(error, list) and len(error) == 2 and all(isinstance(e, str) for e in error)


def _describe(name: str, text: str) -> str:
    return (f"{name}: {text}" if text else name)[:_LONGEST_REASON]


def main() -> None:
    """Takes the side, the longest message and the descriptors from the command line."""
    side, longest, *descriptors = sys.argv[1:]
    channels = [Channel(int(each), int(longest)) for each in descriptors]
    sides: dict[str, Callable[..., None]] = {
        "serve": serve_answer,
        "run": run_answer,
        "tests": run_tests,
    }
    with suppress(Stopped):
        sides[side](*channels)


if __name__ == "__main__":
    main()
