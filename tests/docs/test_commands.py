"""Every command on a page is valid: its verb exists, takes these options, and its configuration loads.

Long commands are not run here; the command line itself parses them. Files that are in the repository are loaded with
the overrides beside them.
"""

import importlib.util
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from staleflow.cli.main import VERBS, cli, main
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from tests.docs.markdown import ROOT, Block, blocks, inline, pages

BASE = ROOT / "configs" / "smoke.toml"
"""Placeholder for the reader's own configuration, which a page only names."""
SHELL = ("", "bash", "console", "sh", "text")
OTHERS = {
    *(
        "cd",
        "cp",
        "curl",
        "docker",
        "export",
        "git",
        "hf",
        "vllm",
        "kill",
        "kubectl",
        "mount",
        "podman",
        "pre-commit",
        "prometheus",
        "ray",
    ),
    *("sbatch", "scp", "scontrol", "source", "squeue", "ssh", "tail", "tmux", "torchrun"),
}
"""First words of commands that do not belong to staleflow."""
ARGUMENTS = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*=")


def commands(block: Block) -> Iterator[tuple[str, str]]:
    """Yield the commands of a block, each with the error that the page shows for it, or an empty string.

    Where some lines start with ``$``, only these are commands, and plain-text blocks have no others.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    marked = block.language == "text" or any(line.startswith("$ ") for line in lines)
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        said = re.sub(r"\s+#( .*)?$", "", line.strip().removeprefix("$ "))
        said = re.sub(r"^((\.venv(-\w+)?/bin/)|(\w+=\S+ +))+", "", said)
        ours = said.startswith(("staleflow ", "make ", "python -m ", "pip install ")) or block.language in SHELL[1:4]
        if line.startswith("$ ") if marked else said and ours and not said.startswith("#"):
            yield said, after.removeprefix("staleflow: ") if after.startswith("staleflow: ") else ""


CASES = [(str(block), *said) for block in blocks() if block.language in SHELL for said in commands(block)]


def test_there_are_commands() -> None:
    assert len(CASES) > 60


@pytest.mark.parametrize(("where", "said", "error"), CASES, ids=[f"{where} {said}" for where, said, _ in CASES])
def test_a_command_of_a_block_is_one(where: str, said: str, error: str) -> None:
    if not error:
        return check(said)
    with pytest.raises((ConfigError, click.ClickException)) as raised:
        check(said)
    assert str(raised.value) == error


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_has_examples_that_are_commands(verb: str) -> None:
    found = list(examples(verb))
    assert found
    for said in found:
        check(said)


@pytest.mark.parametrize("page", pages())
def test_commands_in_the_text_have_these_verbs_and_options(page: str) -> None:
    if page == "CHANGELOG.md":
        pytest.skip("it tells of what was")
    for code in inline(page):
        if code.startswith("staleflow ") and not code.startswith("staleflow["):
            named(code.split()[1:])
        elif re.fullmatch(r"make [a-z-]+", code) or code.startswith("python -m "):
            check(code)


def examples(verb: str) -> Iterator[str]:
    """Return the examples of a verb and of its subcommands."""
    context = click.Context(cli)
    command = cli.get_command(context, verb)
    assert command is not None
    below = command.list_commands(context) if isinstance(command, click.Group) else []
    inner = [command.get_command(context, name) for name in below] if isinstance(command, click.Group) else []
    for one in (command, *inner):
        assert one is not None
        told = (one.help or "").partition("Examples:")[2]
        for line in told.splitlines():
            if line.strip().startswith("staleflow "):
                yield re.split(r"\s{2,}| > ", line.strip())[0]


def check(said: str) -> None:
    words = shlex.split(re.split(r" [|>] ", said)[0])
    match words[0]:
        case "staleflow":
            parsed([word for word in words[1:] if word not in ("…", "...")])
        case "make":
            targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            assert {word for word in words[1:] if "=" not in word} <= targets
        case "python" if words[1] == "-m":
            module(words[2], words[3:])
        case "pip" | "pipx" | "uv":
            extras(said)
        case first:
            assert first in OTHERS or first.endswith("/pip") or first.startswith("python"), said


def parsed(words: list[str]) -> None:
    """Parse with the command line itself; load configurations."""
    command, words, context = verb_of(words)
    files = [word for word in words if word.endswith(".toml") and (ROOT / word).is_file()]
    with command.make_context(command.name, list(words), parent=context) as made:
        given = made.params.get("overrides") or made.params.get("arguments", ())[1:]
    assert [word for word in given if "=" not in word] == []
    overrides = [word for word in words if ARGUMENTS.match(word) and "--" not in word]
    if overrides or files:
        chosen = "model.build=" in overrides  # then a model of the reader's fits in its place
        load(ROOT / files[0] if files else BASE, [word for word in overrides if chosen or not missing(word)])


def missing(override: str) -> bool:
    """Return true for an override that needs something only the reader has."""
    return override.startswith(("model.", "rollout.simulated", "security.keys=")) and "/" in override


def verb_of(words: list[str]) -> tuple[click.Command, list[str], click.Context]:
    context = click.Context(cli, info_name="staleflow")
    command = cli.get_command(context, words[0])
    assert command is not None, f"there is no verb {words[0]}"
    rest = words[1:]
    if isinstance(command, click.Group) and rest:
        inner = command.get_command(context, rest[0])
        assert inner is not None, f"there is no verb {' '.join(words[:2])}"
        return inner, rest[1:], click.Context(command, info_name=words[0], parent=context)
    return command, rest, context


def named(words: list[str]) -> None:
    """A command inside a page's text may omit its arguments."""
    if words[0].startswith("-"):
        return
    command, rest, context = verb_of([word for word in words if word not in ("…", "...")])
    known = {name for parameter in command.get_params(context) for name in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word.partition("=")[0] for word in rest if word.startswith("--")}
    assert asked <= known


def module(name: str, words: list[str]) -> None:
    """Check that the module exists and accepts the options."""
    if name == "venv":
        return
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    source = (path.with_name("__main__.py") if path.name == "__init__.py" else path).read_text()
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def extras(said: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {name for group in re.findall(r"(?:\.|staleflow)\[([\w,-]+)\]", said) for name in group.split(",")}
    assert asked <= set(project["optional-dependencies"])


AT_ONCE = ("completion", "explain", "init", "keygen")
SIMULATED = [said for _, said, error in CASES if said.startswith("staleflow simulate ") and not error]


def test_commands_that_answer_at_once_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    ran: list[str] = []
    for said in dict.fromkeys(said for _, said, error in CASES if not error):
        words = shlex.split(re.split(r" [|>] ", said)[0])[1:]
        drawn = words[:1] == ["plan"] and {"--graph", "--mermaid"} & set(words)
        if said.startswith("staleflow ") and (words[0] in AT_ONCE or drawn) and "KEY" not in words:
            shutil.rmtree(words[1] if words[0] in ("init", "keygen") and "--add" not in words else "none", True)
            assert main(words) == 0, said
            ran.append(said)
    assert len(ran) >= 8


@pytest.mark.long
@pytest.mark.parametrize("said", dict.fromkeys(SIMULATED))
def test_simulations_of_the_pages_end(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("configs", "bench"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(said)[1:]
    if (ROOT / words[1]).is_file():
        assert main([*words, "--steps", "12"]) == 0
