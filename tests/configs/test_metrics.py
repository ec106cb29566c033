"""Metrics are readable on loopback, and beyond it only with a token or in a run without keys."""

from typing import Any

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.metrics import Metrics, check_metrics


def check(insecure: bool = False, **keys: Any) -> None:
    check_metrics(Metrics(**keys), insecure=insecure)


@pytest.mark.parametrize("bind", ["", "http://127.0.0.1:9464", "http://localhost:1", "http://[::1]:65535/"])
def test_loopback_may_be_bound_by_anybody(bind: str) -> None:
    check(bind=bind)


@pytest.mark.parametrize(
    "bind",
    ["127.0.0.1:9464", "tcp://127.0.0.1:9464", "http://127.0.0.1", "http://:9464", "http://h:99999", "http://h:1/x"],
)
def test_what_is_no_place_is_refused(bind: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be http://host:port"):
        check(bind=bind)


def test_beyond_loopback_there_must_be_a_token_or_no_secret_at_all() -> None:
    with pytest.raises(ConfigError, match=r"without metrics\.token only loopback"):
        check(bind="http://10.0.0.5:9464")
    check(bind="http://10.0.0.5:9464", token="/keys/token")
    check(bind="http://10.0.0.5:9464", insecure=True)
    with pytest.raises(ConfigError, match=r"it guards metrics\.bind, which is missing"):
        check(token="/keys/token")


def test_a_writer_is_named_once() -> None:
    check(writers=["tensorboard", "wandb"])
    with pytest.raises(ConfigError, match="each only once"):
        check(writers=["wandb", "wandb"])
