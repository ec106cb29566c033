# pyright: basic, reportMissingImports=false
"""Prompts become token ids: plain, by chat template, and without a tokenizer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from staleflow.clients.prompts import prompt_of  # noqa: E402
from staleflow.clients.tokens import (  # noqa: E402
    check_same_tokens,
    check_vocabulary,
    encoder,
    open_tokenizer,
    stop_ids,
)
from staleflow.configs.errors import ConfigError  # noqa: E402
from staleflow.examples.quickstart.model import character_tokenizer  # noqa: E402


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    character_tokenizer().save_pretrained(tmp_path)
    transformers.Qwen3Config().save_pretrained(tmp_path)
    return tmp_path


def test_a_prompt_is_read_as_it_stands(directory: Path) -> None:
    tokenizer = open_tokenizer(directory)
    ids = encoder(tokenizer, chat_template=False)("1+2=")
    assert (str(ids.dtype), tokenizer.decode(ids.tolist())) == ("int32", "1+2=")


def test_a_chat_template_wraps_the_prompt_as_one_user_message(directory: Path) -> None:
    tokenizer = open_tokenizer(directory)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    assert tokenizer.decode(encoder(tokenizer, chat_template=True)("1+2").tolist()) == "1+2="


ROLES = (
    "{% for t in tools or [] %}{{ t['name'] }};{% endfor %}"
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}+{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""A template that shows what it gets."""
CHAT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]


class Noting:
    """A tokenizer that keeps the text that it is called with."""

    chat_template = ROLES

    def __init__(self, tokenizer: Any) -> None:
        tokenizer.chat_template = ROLES
        self.apply_chat_template = tokenizer.apply_chat_template
        self.text = ""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        self.text = text
        return {"input_ids": [int(add_special_tokens)]}


def rendered(directory: Path, prompt: object, **more: str) -> str:
    """Return the text that the template makes of a prompt."""
    noting = Noting(open_tokenizer(directory))
    assert encoder(noting, chat_template=True, **more)(prompt).tolist() == [0]
    return noting.text


def test_messages_and_tools_come_to_the_template_as_they_are(directory: Path) -> None:
    row = {"prompt": "3", "messages": CHAT, "tools": [{"name": "add"}]}
    assert rendered(directory, prompt_of(row)) == "add;u1+a2+u3+="
    assert rendered(directory, prompt_of({"prompt": "3"})) == "u3+="


def test_a_system_message_precedes_prompts_without_one_of_their_own(directory: Path) -> None:
    own = [{"role": "system", "content": "own"}, *CHAT]
    assert rendered(directory, "3", system="sum") == "ssum+u3+="
    assert rendered(directory, prompt_of({"messages": CHAT}), system="sum") == "ssum+u1+a2+u3+="
    assert rendered(directory, prompt_of({"messages": own}), system="sum") == "sown+u1+a2+u3+="


def test_messages_that_the_template_refuses_are_named_with_its_reason(directory: Path) -> None:
    tokenizer = open_tokenizer(directory)
    tokenizer.chat_template = "{{ raise_exception('no tool role here') }}"
    with pytest.raises(ValueError, match="the chat template refuses its messages: no tool role here"):
        encoder(tokenizer, chat_template=True)("1")


def test_a_tokenizer_without_a_chat_template_is_the_operators_error(directory: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        encoder(open_tokenizer(directory), chat_template=True)


def test_a_directory_without_a_readable_tokenizer_is_the_operators_error(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        open_tokenizer(tmp_path / "nowhere")
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_tokenizer(directory)
    for path in directory.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        open_tokenizer(directory)


def test_a_tokenizer_of_another_model_is_the_operators_error() -> None:
    tokenizer: Any = character_tokenizer()

    def model(rows: int) -> Any:
        text = SimpleNamespace(vocab_size=rows)
        return SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text))

    count = len(tokenizer)
    check_vocabulary(tokenizer, model(count))
    check_vocabulary(tokenizer, model(count + 44))  # padded embeddings are common
    with pytest.raises(ConfigError, match=rf'tokenizer is "{count} tokens"; the model\'s vocabulary has {count - 1}'):
        check_vocabulary(tokenizer, model(count - 1))


def test_another_model_must_have_every_token_of_the_policy_under_the_same_number(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    tokenizer: Any = character_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(other)
    transformers.Qwen3Config().save_pretrained(other)
    check_same_tokens("reference.path", other, directory)
    with pytest.raises(ConfigError, match=r"^critic\.path is .* 1 tokens differ: 'more' is missing, not \d+$"):
        check_same_tokens("critic.path", directory, other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"1":', '"X":').replace('"2":', '"1":').replace('"X":', '"2":'))
    with pytest.raises(
        ConfigError, match=r"its tokenizer is not the policy's, of which 2 tokens differ: '1' is \d+, not"
    ):
        check_same_tokens("reference.path", other, directory)


def test_a_completion_stops_at_every_end_that_model_and_tokenizer_name() -> None:
    def model(eos: list[int] | int | None) -> SimpleNamespace:
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))

    tokenizer: Any = character_tokenizer()
    assert stop_ids(object(), tokenizer) == [tokenizer.eos_token_id]
    assert stop_ids(model([7, 5]), tokenizer) == sorted({5, 7, tokenizer.eos_token_id})
    assert stop_ids(model(9), tokenizer) == sorted({9, tokenizer.eos_token_id})
    tokenizer.eos_token = None
    assert stop_ids(model(None), tokenizer) == []
