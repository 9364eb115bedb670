"""Tools that the policy calls by schema: Python functions, whose types and docstring are their
schema, and those of MCP servers. What is wrong with a call is its result."""

import atexit
import hashlib
import inspect
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal

from pydantic import ValidationError, validate_call

from rlx.errors import SpecError
from rlx.importing import speed_up_imports
from rlx.plugin import Action, Environment, Episode, Step, ToolCall
from rlx.plugin_files import load_function
from rlx.spec import McpServer, McpTools, ToolUse

CALL, CALL_END = "<tool_call>", "</tool_call>"
"""How a call is written where neither the tokenizer nor the chat template says it: as JSON between
these, which is how Qwen, Hermes and others write calls."""
_FORM = '{"name": ..., "arguments": {...}}'
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
"""How its result is written without a chat template."""
MOST_CALLS = 16
"""Calls of one turn that are answered."""
LONGEST_RESULT = 10_000
"""Characters of a result that are kept."""

Schema = Mapping[str, Any]
"""A tool in OpenAI's form: `{"type": "function", "function": {"name", "description",
"parameters"}}`."""


# What is called ----------------------------------------------------------------------------------
class InvalidCallError(Exception):
    pass


@dataclass(frozen=True)
class FunctionTool:
    """A Python function."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        return self.function.__name__

    @cached_property
    def schema(self) -> Schema:
        with speed_up_imports():  # workers, which call the function, do without
            from transformers.utils import get_json_schema
        schema: Schema = get_json_schema(self.function)
        return schema

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Arguments are read as Pydantic reads the types of the function.

        Raises:
            InvalidCallError: the arguments are not those of the schema.
        """
        try:
            result = self._checked(**arguments)
        except ValidationError as error:
            if error.title != self.name:  # of a model that the tool itself uses
                raise
            faults = [
                f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
            ]
            raise InvalidCallError("; ".join(faults)) from error
        if inspect.isawaitable(result):
            import asyncio

            result = asyncio.run(_await(result))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)

    @cached_property
    def _checked(self) -> Callable[..., Any]:
        return validate_call(self.function)


async def _await(value: Any) -> Any:
    return await value


@dataclass(frozen=True)
class ServedTool:
    """A tool of an MCP server, which runs as long as this process."""

    server: McpServer
    schema: Schema

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    def call(self, arguments: Mapping[str, Any]) -> str:
        try:
            return _connect(self.server).call(self.name, arguments)
        except _ServerError:
            raise
        except Exception:
            _connect.cache_clear()  # the next call starts it anew
            raise


Tool = FunctionTool | ServedTool


class _Connection:
    """A session with an MCP server, in a thread of its own. Its end is that of the process."""

    def __init__(self, server: McpServer) -> None:
        import asyncio

        import mcp  # noqa: F401  (where it is missing, it is missing here)

        self._loop = asyncio.new_event_loop()
        self._opened = threading.Event()
        self._fault: BaseException | None = None
        self._closing = asyncio.Event()
        self._client: Any = None
        self._thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._fault is not None:
            raise RuntimeError(f"the server cannot be used: {_name_cause(self._fault)}")

    def _serve(self, server: McpServer) -> None:
        self._loop.run_until_complete(self._hold_open(server))

    async def _hold_open(self, server: McpServer) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        try:
            where: Any = server.url
            if server.command is not None:
                program, *arguments = server.command
                program = sys.executable if program == "python" else program
                started = StdioServerParameters(command=program, args=arguments)
                # a notebook's stderr is no file
                where = stdio_client(started, errlog=sys.__stderr__ or sys.stderr)
            async with Client(where) as self._client:
                self._opened.set()
                await self._closing.wait()
        except BaseException as error:  # noqa: BLE001  (the thread's end; told by who waits)
            self._fault = error
            self._opened.set()

    def _run(self, what: Any) -> Any:
        import asyncio

        return asyncio.run_coroutine_threadsafe(what, self._loop).result()

    def list_tools(self) -> list[Schema]:
        found: list[Schema] = []
        cursor = None
        while True:
            page = self._run(self._client.list_tools(cursor=cursor))
            found += [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    },
                }
                for tool in page.tools
            ]
            if (cursor := page.next_cursor) is None:
                return found

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Parts of the result that are no text are named by their type."""
        result = self._run(self._client.call_tool(name, dict(arguments)))
        parts = [getattr(part, "text", None) or f"({part.type})" for part in result.content]
        text = "\n".join(parts)
        if result.is_error:
            raise _ServerError(text)
        return text

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()


class _ServerError(Exception):
    """What a server says went wrong; its text is the whole reason."""


def _name_cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@lru_cache(maxsize=16)
def _connect(server: McpServer) -> _Connection:
    connection = _Connection(server)
    atexit.register(connection.close)
    return connection


@lru_cache(maxsize=64)
def _load_tools(use: ToolUse) -> tuple[Tool, ...]:
    if isinstance(use, McpTools):
        return tuple(ServedTool(use.mcp, schema) for schema in _connect(use.mcp).list_tools())
    return (FunctionTool(load_function(use)),)


def list_schemas(uses: Sequence[ToolUse]) -> tuple[Schema, ...]:
    """What the policy is told of the tools, in order.

    Raises:
        SpecError: one cannot be imported or asked, its types and docstring are no schema, or two
            have one name.
    """
    found: dict[str, Schema] = {}
    for number, use in enumerate(uses):
        try:
            for tool in _load_tools(use):
                if tool.name in found:
                    raise ValueError(f"there are two tools {tool.name!r}")
                found[tool.name] = tool.schema
        except (Exception, SystemExit) as error:  # the code of others
            missing = isinstance(error, ImportError) and error.name == "mcp"
            how = "; pip install 'rlx[mcp]'" if missing else ""
            raise SpecError(f"rollout.tools[{number}]: {_name_cause(error)}{how}") from error
    return tuple(found.values())


def _name_tools(uses: Sequence[ToolUse]) -> dict[str, Tool]:
    return {tool.name: tool for use in uses for tool in _load_tools(use)}


# Where it is called ------------------------------------------------------------------------------
CallFault = Literal["", "invalid", "failed"]
"""What was wrong with a call: nothing, the call itself, or what came of it."""


class Tools(Environment):
    """Calls tools for the policy: Python functions and those of MCP servers, by their schemas.

    A turn is of kind `call`, `invalid` if none of its calls could be made, or `answer` without a
    call, which ends the rollout.
    """

    kinds: ClassVar[tuple[str, ...]] = ("answer", "call", "invalid")
    examples: ClassVar[tuple[Episode, ...]] = (
        Episode(name="no call", problem={}, turns=("7",), kinds=("answer",)),
    )

    tools: tuple[ToolUse, ...] = ()
    """Those of `rollout.tools`."""

    def data(self) -> Mapping[str, str]:
        return {
            f"tool {name}": hashlib.sha256(_write_definition(tool).encode()).hexdigest()
            for name, tool in _name_tools(self.tools).items()
        }

    def reset(self, problem: Mapping[str, Any], seed: int) -> None:
        pass

    def step(self, state: None, action: Action) -> Step:
        answers = [self._call(call) for call in action.calls]
        results = [(f"error: {text}" if fault else text, fault) for text, fault in answers]
        return combine_results(action, [(_clean(text), fault) for text, fault in results])

    def _call(self, call: ToolCall) -> tuple[str, CallFault]:
        if call.fault:
            return call.fault, "invalid"
        tools = _name_tools(self.tools)
        if call.name not in tools:
            return f"there is no tool {call.name!r}; there are {', '.join(tools)}", "invalid"
        try:
            return tools[call.name].call(call.arguments), ""
        except InvalidCallError as error:
            return str(error), "invalid"
        except _ServerError as error:
            return str(error), "failed"
        except Exception as error:  # noqa: BLE001  (the code of others)
            return f"{type(error).__name__}: {error}", "failed"


def _write_definition(tool: Tool) -> str:
    source = inspect.getsource(tool.function) if isinstance(tool, FunctionTool) else ""
    return json.dumps([tool.schema, source], sort_keys=True)


def combine_results(action: Action, results: Sequence[tuple[str, CallFault]]) -> Step:
    invalid, failed = (sum(each == of for _, each in results) for of in ("invalid", "failed"))
    return Step(
        kind="answer" if not results else "call" if invalid < len(results) else "invalid",
        results=tuple(text for text, _ in results),
        done=not results or action.forced,
        info={
            "calls": len(results),
            "invalid": invalid,
            "failed": failed,
            "called": [call.name for call in action.calls],
        },
    )


def join_results(results: Sequence[str], text: str) -> str:
    return "\n".join([*results, *([text] if text else [])])


def _clean(text: str) -> str:
    for tag in (CALL, CALL_END, RESULT, RESULT_END):
        text = text.replace(tag, f"{tag[0]} {tag[1:]}")
    more = len(text) - LONGEST_RESULT
    return text if more <= 0 else f"{text[:LONGEST_RESULT]}… ({more} more characters)"


# How a call is written ---------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ReadReply:
    """A turn as a message: what is no call, its calls with those that could not be read, and what a
    tokenizer that reads replies itself takes for reasoning."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None


def read_calls(text: str, tools: Sequence[Schema], *, bare: bool = False) -> ReadReply:
    """Reads the calls in a turn: JSON, or a function with its parameters in tags, between
    `<tool_call>` and `</tool_call>`; if `bare`, a turn that is JSON and nothing else. What cannot
    be read stays in the content, too."""
    if bare:
        call = _read_json(text) if text.lstrip().startswith("{") else None
        return ReadReply(text) if call is None else ReadReply("", (call,))
    content, calls = [], []
    before, *parts = text.split(CALL)
    content.append(before)
    for part in parts:
        written, _, after = part.partition(CALL_END)
        call = _read_json(written) or _read_tags(written, tools)
        if call is None:
            content.append(CALL + part)
            calls.append(ToolCall("", fault=f"a call is written as {_FORM} between its tags"))
        else:
            calls.append(call)
            content.append(after)
    return ReadReply("".join(content), tuple(calls))


def _read_json(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return build_call(call["name"], call.get("arguments", call.get("parameters", {})))


def build_call(name: str, arguments: Any) -> ToolCall:
    if not isinstance(arguments, Mapping):
        return ToolCall(name, {}, "the arguments are not a JSON object")
    return ToolCall(name, arguments)


def _read_tags(text: str, tools: Sequence[Schema]) -> ToolCall | None:
    """Reads `<function=NAME><parameter=NAME>VALUE</parameter>…</function>`."""
    _, opened, rest = text.partition("<function=")
    name, closed, body = rest.partition(">")
    if not opened or not closed:
        return None
    name, arguments = name.strip(), {}
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        value = value.rpartition("</parameter>")[0] or value
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _read_value(value, _find_type(tools, name, key.strip()))
    return ToolCall(name, arguments)


def _find_type(tools: Sequence[Schema], name: str, key: str) -> Any:
    for tool in tools:
        if tool["function"]["name"] == name:
            known = tool["function"].get("parameters", {}).get("properties", {})
            return known.get(key, {}).get("type")
    return None


def _read_value(text: str, type_: Any) -> Any:
    if type_ == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def limit_calls(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    if len(calls) <= MOST_CALLS:
        return calls
    more = ToolCall("", fault=f"only the first {MOST_CALLS} calls of a turn are answered")
    return (*calls[:MOST_CALLS], more)


def make_up_call(tool: Schema) -> ToolCall:
    """A call with made-up arguments of the types in the schema, for trials."""
    parameters = tool["function"].get("parameters", {})
    required = parameters.get("required", ())
    known = parameters.get("properties", {})
    return ToolCall(tool["function"]["name"], {key: _make_up(known[key]) for key in required})


_MADE_UP: Mapping[str, Any] = {
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def _make_up(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type")
    return _MADE_UP.get(kind[0] if isinstance(kind, list) and kind else str(kind), "1")


def describe_tools(tools: Sequence[Schema]) -> str:
    told = ("name", "description", "parameters")
    listed = [{key: tool["function"].get(key) for key in told} for tool in tools]
    written = [json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in listed]
    return "\n".join(["Tools:", *written, f"Call one by {CALL}{_FORM}{CALL_END}"])


def write_call(call: ToolCall) -> str:
    written = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    return f"{CALL}{written}{CALL_END}"
