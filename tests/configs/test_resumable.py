"""A resume may change the ranks and the backend of the trainer where the new ones can read the run's checkpoints."""

from pathlib import Path

import pytest

from staleflow.configs import resumable
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load, resumed
from staleflow.configs.schema import Config

QUICKSTART = Path(__file__).parent.parent.parent / "configs" / "quickstart.toml"


def run(*overrides: str) -> Config:
    return load(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ((), ("trainer.steps=7",)),
        ((), ("trainer.backend=fsdp", "trainer.nproc=4", "trainer.gpus=[0,1,2,3]")),
        (("trainer.backend=fsdp", "trainer.nproc=4"), ("trainer.nproc=2",)),
        (("trainer.backend=fsdp", "trainer.nproc=4"), ("trainer.backend=ddp",)),
        (("trainer.backend=ddp", "trainer.nproc=4"), ("trainer.backend=torch", "trainer.nproc=1")),
        (("trainer.backend=deepspeed", "trainer.nproc=2"), ("trainer.steps=7",)),
    ],
)
def test_a_resume_may_change_ranks_and_backend(before: tuple[str, ...], change: tuple[str, ...]) -> None:
    old = run(*before)
    new = resumed(old, change)
    assert new != old
    assert resumable.with_keys_of(new, old) == old


@pytest.mark.parametrize(
    ("before", "change", "message"),
    [
        ((), "trainer.backend=deepspeed", r"'torch'; a resume may change it to one of torch, ddp, fsdp"),
        ((), "trainer.backend=simulated", r"'torch'; a resume may change it to one of torch, ddp, fsdp"),
        (("trainer.backend=deepspeed",), "trainer.backend=fsdp", r"'deepspeed', whose checkpoints only it can read"),
        (("trainer.backend=deepspeed",), "trainer.nproc=2", r"the run has 1, and its DeepSpeed checkpoints fit no oth"),
        ((), "trainer.nproc=2", r"trainer\.nproc is 2; trainer\.backend"),
        ((), "trainer.zero_stage=1", r"a run keeps its configuration: --resume may change trainer\.steps, "),
    ],
)
def test_a_change_that_leaves_checkpoints_unreadable_is_refused(
    before: tuple[str, ...], change: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resumed(run(*before), [change])
