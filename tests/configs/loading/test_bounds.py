"""Every number and every string of the schema has bounds, and a value outside them is rejected by name at load time."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as kinds
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.explain import decode
from staleflow.configs.loading.load import from_json, load, read_run, to_json, write_resolved
from staleflow.configs.schema import Config
from staleflow.configs.section import Mebibytes, Seconds
from staleflow.protocols.consistency.limits import MAX_STALENESS, Limits
from staleflow.servers.scheduler.ledger.identity import limits
from staleflow.store.lmdb import Store
from tests.configs.conftest import Write

REQUIRED: dict[str, dict[str, Any]] = {
    "": {"prompts": {}, "reward": {"run": "m:f"}},
    "reward": {"run": "m:f"},
    "reward.functions": {"run": "m:f"},
    "eval": {"name": "a", "source": "m:f"},
    "stage": {"name": "a", "run": "m:f", "makes": ["x"]},
    "column": {"name": "a", "per": "token", "dtype": "int32"},
    "simulation.fleet": {"count": 1},
    "simulation.events": {"at_s": 1, "engine": 0, "what": "join"},
}
LISTS = ("stage", "column", "eval", "reward.functions", "prompts.sources", "simulation.fleet", "simulation.events")


def leaves(kind: kinds.Type, path: str = "") -> Iterator[tuple[str, kinds.Type, bool]]:
    """Yield (dotted key, its type, true for a list of that type) for all of the schema's own values."""
    assert isinstance(kind, kinds.StructType)
    for field in kind.fields:
        key, listed = f"{path}.{field.name}".lstrip("."), isinstance(field.type, kinds.ListType)
        inner = field.type.item_type if isinstance(field.type, kinds.ListType) else field.type
        if isinstance(inner, kinds.StructType):
            yield from leaves(inner, key)
        else:
            yield key, inner, listed


def table_with(key: str, value: object) -> dict[str, Any]:
    """Return the smallest configuration with ``value`` at ``key``."""
    *above, last = key.split(".")
    inner = {**REQUIRED.get(".".join(above), {}), last: value}
    for at in range(len(above), 0, -1):
        path = ".".join(above[:at])
        held: object = [inner] if path in LISTS else inner
        inner = {**REQUIRED.get(".".join(above[: at - 1]), {}), above[at - 1]: held}
    return inner


def named(key: str, value: object) -> str:
    """Return the key that the rejection of the value names."""
    with pytest.raises(ConfigError) as refused:
        decode(table_with(key, value))
    return refused.value.what.replace("[0]", "")


ALL = list(leaves(kinds.type_info(Config)))


@pytest.mark.parametrize(("key", "listed"), [(key, listed) for key, kind, listed in ALL if type(kind) is kinds.IntType])
def test_no_integer_is_without_end(key: str, listed: bool) -> None:
    most = 2**63 - 1
    assert named(key, [most] if listed else most) == key


@pytest.mark.parametrize("key", [key for key, kind, _ in ALL if type(kind) is kinds.FloatType])
def test_no_number_is_without_end(key: str) -> None:
    assert named(key, 1e300) == key


@pytest.mark.parametrize("letter", ["\0", "\n", "\x1b", "\x85", "\u2028"])
def test_no_name_path_or_address_has_what_cannot_be_printed(letter: str) -> None:
    texts = [(key, listed) for key, kind, listed in ALL if type(kind) is kinds.StrType]
    assert ("security.keys", False) in texts
    for key, listed in texts:
        if key in ("rollout.stop", "prompts.system") and letter == "\n":
            continue  # texts that a model reads or writes may have lines
        text = f"a{letter}b"
        assert named(key, [text] if listed else text) == key


def test_what_is_refused_is_shown_without_being_obeyed() -> None:
    with pytest.raises(ConfigError) as refused:
        decode(table_with("security.keys", "a\x1b[2J\0"))
    assert str(refused.value) == 'security.keys is "a\\x1b[2J\\x00"; it must be a printable string'


def test_text_of_the_users_own_options_may_have_lines(write: Write, tmp_path: Path) -> None:
    config = load(write(), ['prompts.options={template="a\\n\\u0000b"}'])
    write_resolved(config, tmp_path / "run")
    assert read_run(tmp_path / "run") == config == load(tmp_path / "run" / "config.toml")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "{when=2020-01-01}",
            'options.when is 2020-01-01; it must be no date and no time: write the string "2020-01-01"',
        ),
        ("{when=[12:30:00]}", 'options.when is 12:30:00; it must be no date and no time: write the string "12:30:00"'),
        ("{a={when=2020-01-01T00:00:00Z}}", "options.a.when is 2020-01-01 00:00:00+00:00; it must be no date"),
    ],
)
def test_a_date_is_refused_which_a_run_would_give_back_as_a_string(write: Write, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(write(), [f"prompts.options={value}"])
    assert said in str(refused.value)


@pytest.mark.parametrize("override", ["prompts.options.a=\udc80", "prompts.options.\udc80=1", "model.path=/\udc80"])
def test_what_no_file_can_hold_is_refused(write: Write, override: str) -> None:
    with pytest.raises(ConfigError, match="it must be text: UTF-8 cannot write it"):
        load(write(), [override])


def test_a_run_at_its_limits_has_a_ledger_and_can_be_read_back(write: Write) -> None:
    most = [f"staleness.max_staleness={MAX_STALENESS}", f"trainer.batch_size={1 << 20}", "trainer.steps=1000000000"]
    config = load(write(), [*most, "scheduler.lease_s=604800", "rollout.max_inflight=1048576"])
    assert from_json(to_json(config)) == config
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(limits(config)), type=Limits) == limits(config)


def test_the_ledger_refuses_what_the_schema_does() -> None:
    with pytest.raises(ValueError, match=r"max_staleness is 1025; it must be at most 1024"):
        Limits(max_staleness=MAX_STALENESS + 1, batch_size=1)


def test_prompts_that_are_put_in_order_together_fit_into_memory(write: Write) -> None:
    clustered = ["coordination.composition=length_clustered", "coordination.lookahead=1024"]
    assert load(write(), [*clustered, "trainer.batch_size=1024"])
    with pytest.raises(ConfigError, match=r"lookahead is 1024; 1049600 groups of trainer\.batch_size 1025 batches: at"):
        load(write(), [*clustered, "trainer.batch_size=1025"])


def test_the_largest_map_can_be_opened_and_the_longest_wait_be_waited(tmp_path: Path) -> None:
    map_mb, seconds = kinds.type_info(Mebibytes), kinds.type_info(Seconds)
    assert isinstance(map_mb, kinds.IntType)
    assert isinstance(seconds, kinds.FloatType)
    Store(tmp_path / "store", tables=("a",), map_bytes=(map_mb.le or 0) << 20, durability="process").close()
    assert (seconds.le or math.inf) * 1000 < 2**31, "epoll takes milliseconds of 32 bits"
    assert (seconds.ge or 0) * 1000 == 1
