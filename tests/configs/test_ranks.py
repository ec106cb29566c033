"""The environment determines the rank of a process, and the configuration limits the ranks."""

from typing import Any

import msgspec
import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.ranks import Place, place
from staleflow.configs.rules.checks import consistent
from staleflow.configs.schema import Config

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def config(dtype: str = "float32", **trainer: Any) -> Config:
    table = {
        "model": {"path": "/a/model", "dtype": dtype},
        "prompts": {"source": "some:prompts"},
        "reward": {"run": "some:reward"},
        "trainer": trainer,
    }
    return msgspec.convert(table, Config)


def test_torchruns_variables_say_who_a_process_is_and_without_them_it_is_alone() -> None:
    assert place(TORCHRUN) == Place(rank=1, world=2, local_rank=1, master_addr="127.0.0.1", master_port=29500)
    assert place({}) == Place(rank=0, world=1)
    assert place({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).leads
    assert not place(TORCHRUN).leads


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2"}, "RANK is 2; with WORLD_SIZE 2 it must be 0 to 1"),
        ({"MASTER_PORT": ""}, 'MASTER_PORT is ""; the launcher (torchrun, deepspeed) must set it to a number'),
        ({"LOCAL_RANK": "x"}, 'LOCAL_RANK is "x"; the launcher (torchrun, deepspeed) must set it to a number'),
    ],
)
def test_variables_that_do_not_fit_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        place(TORCHRUN | variables)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"nproc": 2},
            'trainer.nproc is 2; trainer.backend "torch" is one process: 1, or a backend of ddp, fsdp and deepspeed',
        ),
        (
            {"nproc": 4, "backend": "ddp", "batch_size": 3},
            "trainer.nproc is 4; each rank needs a group of every batch: at most trainer.batch_size, 3",
        ),
        (
            {"nproc": 2, "backend": "fsdp", "gpus": [1]},
            "trainer.gpus is [1]; each of the trainer.nproc = 2 ranks needs one of its own, or none be named",
        ),
        (
            {"backend": "deepspeed", "zero_stage": 1, "dtype": "bfloat16"},
            'trainer.zero_stage is 1; with model.dtype "bfloat16" it must be 2 or 3',
        ),
    ],
)
def test_ranks_that_cannot_work_are_refused(trainer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        consistent(config(**trainer))
    assert str(error.value) == message


def test_as_many_ranks_as_groups_are_allowed() -> None:
    consistent(config(nproc=4, backend="fsdp", batch_size=4, gpus=[4, 5, 6, 7]))
