"""Only the shareable part of a configuration appears in a report."""

from typing import Any

import pytest

from staleflow.configs.launch import Launch
from staleflow.configs.metrics import Metrics
from staleflow.configs.schema import Config, Environment, Model, Prompts, Reward, Rollout, Security, Stage
from staleflow.report.settings import HIDDEN, settings


def with_options(**options: Any) -> dict[str, Any]:
    shown: dict[str, Any] = settings(Config(prompts=Prompts(options=options), reward=Reward(run="a:b")))
    return dict(shown["prompts"]["options"])


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "secret_key", "API_KEY", "hf_token", "passwd", "secret", "HF_TOKEN", "apiKey", "openaikey"),
        *("passphrase", "db_pwd", "credentials_json", "Authorization", "x-auth-token", "session_cookie", "password2"),
    ],
)
def test_text_under_a_name_that_says_secret_is_not_shown(name: str) -> None:
    assert with_options(**{name: "S1"}) == {name: HIDDEN}
    assert with_options(headers={name: ["S1", {"a": "S2"}]}) == {"headers": {name: [HIDDEN, {"a": HIDDEN}]}}


def test_numbers_nothing_and_innocent_names_are_shown() -> None:
    numbers: dict[str, Any] = {"max_new_tokens": 64, "tokens": [1, 2], "pass_at": 8, "keyed": True, "token": ""}
    names = {"tokenizer": "gpt2", "monkey": "see", "keyword": "a", "passage": "b", "keep_best": "yes"}
    innocent = {**numbers, **names, "url": "https://host/v1?limit=3"}
    assert with_options(**innocent) == innocent


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("https://u:pw@host:1/v1", "https://host:1/v1"),
        ("postgres://me@host/db", "postgres://host/db"),
        ("https://host/v1?a=1&api_key=S1&b=2", f"https://host/v1?a=1&api_key={HIDDEN}&b=2"),
        ("https://host/a@b", "https://host/a@b"),
    ],
)
def test_a_url_is_shown_without_who_asks_and_with_what(given: str, shown: str) -> None:
    assert with_options(url=given) == {"url": shown}


def test_it_is_so_in_every_table_of_options_and_in_commands_but_paths_of_keys_are_shown() -> None:
    config = Config(
        prompts=Prompts(source="https://u:pw@host/x"),
        reward=Reward(run="a:b"),
        model=Model(options={"hf_token": "S1"}),
        environment=Environment(options={"hf_token": "S2"}),
        stage=[Stage(name="judge", run="a:b", makes=["x"], options={"hf_token": "S3"})],
        rollout=Rollout(max_new_tokens=77),
        security=Security(keys="/k"),
        metrics=Metrics(token="/t"),
        launch=Launch(setup="export HF_TOKEN=S4; . venv/bin/activate"),
    )
    found = settings(config)
    assert "S" not in str([found[table] for table in ("model", "environment", "stage")]).replace(HIDDEN, "")
    assert found["launch"]["setup"] == f"export HF_TOKEN={HIDDEN}; . venv/bin/activate"
    assert (found["security"]["keys"], found["metrics"]["token"], found["prompts"]["source"]) == (
        "/k",
        "/t",
        "https://host/x",
    )
    assert found["rollout"]["max_new_tokens"] == 77
