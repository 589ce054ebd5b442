"""Rows of any data set, under the names that a task uses: from files, folders or the hub (`grpo_rl.envs.sources`)."""

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import UnionType
from typing import Any

from grpo_rl.envs.sources import AnySource, Row, Source, read
from grpo_rl.envs.task import Messages
from grpo_rl.envs.tools.schemas import checked_calls, read_arguments

Kind = type | UnionType
CHAT = ("prompt", "messages")
"""Columns in which data sets have chat messages."""
TOOLS = "tools"
"""The column of the functions that a conversation may call."""
EXTRA_FIELDS = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Names that chat templates have for what an assistant's message holds next to its content."""


def load_rows(
    path: AnySource = None,
    split: str = "train",
    columns: Collection[str] | None = None,
    *,
    chat: tuple[str, str | None] | None = None,
    hub: str | None = None,
) -> list[Row]:
    """Rows of files, of a folder or of a data set of the hub, as they stand there but for ``columns`` of the source.

    Args:
        path: a path of files, of a folder or of the hub, or a source, with more to say.
        split: of the hub's data, or of a folder with several; a file is one split.
        columns: which to read, as far as they are there; None reads all. Of CSV they are read as texts.
        chat: the columns of prompts and gold answers, where chat messages may stand; see :func:`asked_in_chat`.
        hub: the name that is read where ``path`` is None.

    Raises:
        ValueError: there is no such data, it can't be read or is empty, or a column to be renamed is not there.
    """
    source = Source.of(path)
    if source.path is None and hub is None:
        wanted = "a JSONL, JSON, CSV or Parquet file, a folder or pattern of such, or a hub name such as trl-lib/tldr"
        raise ValueError(f"the task has no data of its own; set env.path to {wanted}")
    source = replace(source, path=source.path or hub)
    theirs = [source.columns.get(name, name) for name in columns or ()]

    def choose(present: Sequence[str]) -> Sequence[str]:
        names = {*(theirs if columns else present), *source.columns.values()}
        if chat:
            names |= {TOOLS, *(CHAT if source.columns.get(chat[0], chat[0]) not in present else ())}
        # All where none of those wanted is there: without a column there would be no rows.
        return [name for name in present if name in names] or present

    rows = [_renamed(row, source.columns) for row in read(source, split, choose, theirs)]
    if not rows:
        raise ValueError(f"{source.path} has no rows")
    return [row.now(asked_in_chat(row, row.where, *chat, tools=False)) for row in rows] if chat else rows


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    """The row under the task's names; the values that stood under these names before are left out."""
    for ours, theirs in names.items():
        if theirs not in row:
            hint = column_hint(theirs, row.columns, ours)
            raise ValueError(f"env.columns={{{ours}: {theirs}}}: {row.where} has no {theirs}{hint}")
    kept = {name: value for name, value in row.items() if name not in names and name not in names.values()}
    return row.now(kept | {ours: row[theirs] for ours, theirs in names.items()})


def asked_in_chat(row: dict, where: str, column: str, gold: str | None = None, tools: bool = True) -> dict:
    """The row; if its prompt is chat messages, under ``column``; ``tools``: whether the task shows those of a row.

    They stand in ``column`` itself, or where that is missing in one of :data:`CHAT`. If the last one is the
    assistant's, it is no part of the prompt but the gold answer, unless the row has one already.

    Raises:
        ValueError: no message of a user is left, or they are no messages.

    >>> chat = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    >>> asked_in_chat({"messages": chat}, "line 1", "question", "answer")
    {'question': [{'role': 'user', 'content': '1 + 1?'}], 'answer': '2'}
    """
    there = column if column in row else next((name for name in CHAT if name in row), None)
    if there is None or not isinstance(row[there], list):
        return row
    if row.get(TOOLS) and not tools:
        raise ValueError(f"{where} has tools, which this task would leave out; env.dataset=prompt_response takes them")
    where = f"{where}: {there}" if where else there
    messages = read_messages(row[there], where)
    last = messages.pop() if messages[-1]["role"] == "assistant" else None
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(f"{where} has no question before the assistant's last message")
    row = {name: value for name, value in row.items() if name != there} | {column: messages}
    return row if last is None or gold is None or row.get(gold) is not None else row | {gold: message_text(last)}


def read_messages(value: Any, where: str) -> Messages:
    """Chat messages with all that a template may show, but nulls; next to calls the content may be null.

    Raises:
        ValueError: they are no messages, or a call is none, or its arguments are no JSON object.

    >>> call = {"function": {"name": "add", "arguments": {"x": 1, "y": None}}}
    >>> read_messages([{"role": "assistant", "content": None, "tool_calls": [call], "name": None}], "line 1")
    [{'role': 'assistant', 'content': '', 'tool_calls': [{'function': {'name': 'add', 'arguments': {'x': 1}}}]}]
    """
    messages = []
    for message in value if isinstance(value, list) else ():
        if isinstance(message, Mapping) and (calls := message.get("tool_calls")):
            _check_calls(calls, where)
            message = {**message, "content": ""} if message.get("content") is None else message
        messages.append(without_nulls(message))
    if not (messages and all(map(is_message, messages))):
        raise ValueError(f"{where} is {value!r:.80}; messages have texts as role and content")
    return messages


def _check_calls(calls: Any, where: str) -> None:
    try:
        for call in checked_calls(calls):
            if (given := call["function"]["arguments"]) and read_arguments(given) is None:
                raise ValueError(f"the arguments {given!r:.80} of a call are no JSON object")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def message_text(message: dict[str, Any]) -> str | dict[str, Any]:
    """The text of an assistant's message; the message itself where it has more."""
    return message if any(map(message.get, EXTRA_FIELDS)) else message["content"]


def without_nulls(value: Any) -> Any:
    """The value without the nulls in its objects, which tables put where rows differ in their keys."""
    if isinstance(value, Mapping):
        return {name: without_nulls(own) for name, own in value.items() if own is not None}
    return [without_nulls(own) for own in value] if isinstance(value, list) else value


def is_message(message: object) -> bool:
    """True if this is a chat message: a role and a content, both texts."""
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def place_of(rows: Sequence[dict], index: int) -> str:
    """The place of a row: its file and line, where that is known."""
    return getattr(rows[index], "where", f"row {index}")


def checked_row(row: Any, columns: Mapping[str, Kind], where: str) -> dict:
    """The row, with a number's text where a column is to be a text.

    Raises:
        ValueError: it has not these columns, each of its type.

    >>> checked_row({"answer": 2}, {"answer": str}, "row 0")
    {'answer': '2'}
    """
    row = row.now(row) if isinstance(row, Row) else dict(row)
    for column, kind in columns.items():
        if column not in row:
            raise ValueError(f"{where} has no {column}{column_hint(column, getattr(row, 'columns', row))}")
        value, text = row[column], isinstance("", kind) and not isinstance(0, kind)
        if text and isinstance(value, (int, float)) and not isinstance(value, bool):
            row[column] = str(value)
        elif not isinstance(value, kind):
            wanted = getattr(kind, "__name__", kind)
            found = f"{value!r:.80}, of type {type(value).__name__}"
            raise ValueError(f"{where}: {column} is {found}; it must be of type {wanted}")
    return row


def column_hint(missing: Any, present: Iterable[str], ours: Any = None) -> str:
    """The end of a message about a missing column, to the task ``ours``: those that are there, and how to name one.

    >>> column_hint("question", ["problem", "questions"])
    "; its columns are ['problem', 'questions']; did you mean questions? 'env.columns={question: questions}' renames it"
    """
    present = list(present)
    close = difflib.get_close_matches(str(missing), present, n=1)
    hint, nearest = (f"did you mean {close[0]}? ", close[0]) if close else ("", "ITS_NAME")
    return f"; its columns are {present}; {hint}'env.columns={{{ours or missing}: {nearest}}}' renames it"
