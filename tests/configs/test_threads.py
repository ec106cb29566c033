"""Threads of the processes of a run that choose their number."""

from pathlib import Path

import pytest

from staleflow.configs.loading.load import load
from staleflow.supervisor.roles import workers

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
CHOSEN = ["rollout.threads=0", "trainer.threads=0"]


@pytest.mark.parametrize(
    ("cores", "overrides", "expected"),
    [
        (1, [], (1, 1)),
        (2, [], (1, 1)),
        (2, ["rollout.workers=1"], (1, 1)),
        (8, [], (4, 2)),  # two engines and the trainer, which gets the remainder
        (8, ["rollout.threads=3"], (2, 3)),  # given numbers are obeyed
        (8, ["trainer.threads=2"], (2, 3)),
        (4, ["staleness.max_staleness=0"], (4, 2)),  # trainer and engines take turns
        (16, ["trainer.backend=ddp", "trainer.nproc=4"], (3, 2)),
        (
            16,
            [
                "model.path=/m",
                "model.build=",
                "model.options={}",
                "trainer.algorithm.kl_coef=0.1",
                "reference.workers=2",
            ],
            (4, 3),
        ),
    ],
)
def test_trainer_and_engines_share_the_cores(cores: int, overrides: list[str], expected: tuple[int, int]) -> None:
    engine, *_, trainer = workers(load(QUICKSTART, [*CHOSEN, *overrides]), Path("/r"), cores=cores)
    assert (trainer.threads, engine.threads) == expected


def test_a_run_never_has_more_threads_than_cores_unless_each_process_has_one() -> None:
    for cores in range(3, 40):
        roles = workers(load(QUICKSTART, CHOSEN), Path("/r"), cores=cores)
        models = [role.threads for role in roles if not role.name.startswith("reward")]
        assert cores - len(models) < sum(models) <= cores


def test_given_threads_reach_the_processes() -> None:
    roles = workers(load(QUICKSTART, ["rollout.threads=3", "trainer.threads=0"]), Path("/r"), cores=9)
    assert [(role.name, role.threads) for role in roles] == [
        ("rollout-0", 3),
        ("rollout-1", 3),
        ("reward-0", 1),
        ("trainer", 3),
    ]
