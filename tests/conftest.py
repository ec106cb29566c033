"""Async tests run on the event loop that the product uses. Property tests have no deadline and the same examples in
every run; ``make test-search`` tries new ones."""

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import settings

from tests.object_store import S3Server, installed
from tests.servers.ports import ReservedPort

# An example that waits for a processor is no failure.
settings.register_profile("search", settings.get_profile("default"), deadline=None)
settings.register_profile("tests", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("tests")

# The interfaces of trl.experimental may change, says a warning at their import; the extra pins the version.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Keep long values out of the names of tests: each worker of xdist sends all names, and one value has 33 MiB."""
    return argname if isinstance(val, str | bytes) and len(val) > 200 else None


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the models that tests build for this session, outside the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.getbasetemp().parent / "cache"
        patch.setenv("XDG_CACHE_HOME", str(path))
        yield path


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A folder whose path leaves room for a Unix socket (107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="sf-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # a thread of a cancelled task may still write there


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Numbers of three ports of loopback, reserved for servers of this test."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(ReservedPort())).number for _ in range(3)]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server for all tests of this process that need one. A test that kills it starts it again."""
    if not installed():
        pytest.skip("needs the extra s3, and moto with flask")
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a new bucket, which this process reaches by its environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    name = f"weights-{secrets.token_hex(4)}"
    s3_server.make_bucket(name)
    return name
