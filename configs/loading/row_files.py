"""Rows of JSONL and Parquet files, used for prompts and for lengths of trajectories."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install

PROMPT = "prompt"
MESSAGES = "messages"
TOOLS = "tools"
ROLES = ("system", "user", "assistant", "tool")

_json = msgspec.json.Decoder(dict[str, Any])
_encoder = msgspec.msgpack.Encoder(order="sorted")


def read_rows(key: str, path: Path, column: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of each row; from a Parquet file only ``column``, if the file has it.

    Raises ``ConfigError`` with the configuration's ``key`` if the file does not exist or cannot be read.
    """
    if not path.is_file():
        raise ConfigError(key, str(path), "no such file")
    match path.suffix:
        case ".jsonl":
            return _jsonl(key, path)
        case ".parquet":
            return _parquet(key, path, column)
        case _:
            raise ConfigError(key, str(path), "it must end in .jsonl or .parquet")


def _jsonl(key: str, path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {number}", _json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(key, str(path), f"line {number} must be a JSON object: {error}") from error


def _parquet(key: str, path: Path, column: str) -> Iterator[tuple[str, Any]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ImportError as error:
        wanted = f"reading Parquet needs the extra: {install('parquet')}"
        raise ConfigError(key, str(path), wanted) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(columns=columns):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise ConfigError(key, str(path), f"it must be a Parquet file: {error}") from error


def prompt_row(
    key: str, given: str, place: str, row: Any, columns: dict[str, str], *, chat_template: bool = True
) -> tuple[list[str], bytes]:
    """Return the columns of one prompt row under our names, and the row as it is sent.

    ``columns`` maps our names to theirs; columns that a rename replaces are left out. A row with messages, in
    ``messages`` or ``prompt``, has them in ``messages``, and the text of the last user's message in ``prompt``. Raises
    ``ConfigError`` for a row that no run can use.
    """
    if not isinstance(row, dict):
        allowed = f"{place} must be a dict of columns, it is {type(row).__name__}: {row!s:.80}"
        raise ConfigError(key, given, allowed)
    theirs = cast(dict[str, Any], row)
    has = ", ".join(map(str, theirs))
    for name in columns.values():
        if name not in theirs:
            raise ConfigError(key, given, f'{place} has no column "{name}" (it has {has})')
    renamed = set(columns.values())
    ours = {name: value for name, value in theirs.items() if name not in renamed and name not in columns}
    ours |= {our: theirs[name] for our, name in columns.items()}
    if isinstance(ours.get(PROMPT), list):
        ours[MESSAGES] = ours.pop(PROMPT)
    if MESSAGES in ours:
        try:
            text = _checked_messages(ours[MESSAGES], ours.get(TOOLS), chat_template=chat_template)
        except ValueError as error:
            raise ConfigError(key, given, f"{place}: {error}") from None
        ours[MESSAGES] = [
            {name: value for name, value in message.items() if value is not None} for message in ours[MESSAGES]
        ]
        ours.setdefault(PROMPT, text)
    if PROMPT not in ours:
        raise ConfigError(key, given, f'{place} has no column "{PROMPT}" (it has {has}); name it in prompts.columns')
    if not isinstance(ours[PROMPT], str):
        raise ConfigError(key, given, f'{place}: column "{PROMPT}" must be text, it is {type(ours[PROMPT]).__name__}')
    try:
        return list(ours), _encoder.encode(ours)
    except (TypeError, ValueError, OverflowError, msgspec.EncodeError) as error:
        raise ConfigError(key, given, f"{place} cannot be sent: {error}") from error


def _checked_messages(messages: object, tools: object, *, chat_template: bool) -> str:
    """Return the last user's text. ``ValueError`` unless the policy can continue these messages."""
    if not chat_template:
        raise ValueError("it has messages: set prompts.chat_template, or rename the column with prompts.columns")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message, each with role and content")
    user, role = "", ""
    for number, given in enumerate(cast(list[object], messages)):
        message = cast(dict[str, object], given) if isinstance(given, dict) else {}
        role, content = str(message.get("role")), message.get("content")
        if role not in ROLES:
            raise ValueError(f"messages[{number}].role is {role!r}; it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str) and not (role == "assistant" and message.get("tool_calls")):
            raise ValueError(f"messages[{number}].content must be text, it is {type(content).__name__}")
        user = content if role == "user" and isinstance(content, str) else user
    if role == "assistant":
        raise ValueError("the last message has role assistant; the policy writes the next answer")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in cast(list[object], tools))):
        raise ValueError("tools must be a list of descriptions, each a table as in the OpenAI calls")
    return user
