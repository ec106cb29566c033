"""Rollout workers may differ in the settings of their engines, and in no others."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import check_shared, config_sha, from_json, load, to_json, worker_config
from staleflow.configs.own_settings import as_overrides
from staleflow.configs.placement import place
from staleflow.configs.pools import pools, workers
from staleflow.configs.schema import Config
from tests.configs.conftest import MINIMAL, Write

REAL = ("rollout.engine=transformers", "trainer.backend=torch", "model.path=/m")
MIXED = """
[[rollout.pool]]
engine = "vllm"
max_inflight = 256
[rollout.pool.vllm]
kv_cache_mb = 16
options = { max_num_batched_tokens = 99, kv_cache_dtype = "fp8" }

[[rollout.pool]]
workers = 2
threads = 3
"""


def mixed(write: Write, *overrides: str) -> Config:
    return load(write(MINIMAL + MIXED), [*REAL, *overrides])


def test_a_pool_has_the_settings_of_rollout_below_its_own(write: Write) -> None:
    config = mixed(write, "rollout.max_inflight=32", "rollout.vllm.max_model_len=64")
    assert from_json(to_json(config)) == config
    fast, *slow = (worker.rollout for worker in workers(config))
    assert (fast.engine, fast.max_inflight, fast.threads) == ("vllm", 256, 0)
    assert (fast.vllm.kv_cache_mb, fast.vllm.max_model_len) == (16, 64)
    assert [(one.engine, one.max_inflight, one.threads, one.vllm.kv_cache_mb) for one in slow] == [
        ("transformers", 32, 3, 512)
    ] * 2
    assert [pool.key for pool in pools(load(write(), REAL))] == ["rollout"]


def test_overrides_give_a_worker_the_settings_of_its_pool(write: Write) -> None:
    config = mixed(write)
    assert as_overrides(workers(config)[1], config) == ["rollout.threads=3"]
    for pool in pools(config):
        own = worker_config(config, as_overrides(pool.config, config))
        assert to_json(own).replace(b'"workers":1', b'"workers":2') == to_json(pool.config).replace(
            b'"workers":1', b'"workers":2'
        )


def test_workers_of_one_run_share_its_hash_whatever_their_engines(write: Write) -> None:
    config = mixed(write, "environment.run=a:B")
    own = ["rollout.engine=a:B", "rollout.engine_options.x=1", "rollout.max_inflight=9", "environment.advertise=box"]
    for worker in (*workers(config), worker_config(config, own)):
        assert config_sha(worker) == config_sha(config)
    assert config_sha(mixed(write, "environment.run=a:B", "rollout.max_new_tokens=9")) != config_sha(config)


def test_options_of_one_engine_are_not_those_of_another(write: Write) -> None:
    config = load(write(), [*REAL, "rollout.engine=a:B", "rollout.engine_options.x=1"])
    assert worker_config(config, ["rollout.max_inflight=9"]).rollout.engine_options == {"x": 1}
    assert worker_config(config, ["rollout.engine=vllm"]).rollout.engine_options == {}


def test_an_engine_in_a_file_is_found_from_the_file_that_names_it(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(write(MINIMAL + '[[rollout.pool]]\nengine = "mine.py:E"\n'), REAL)
    assert workers(config)[0].rollout.engine == f"{tmp_path}/mine.py:E"
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    assert worker_config(config, ["rollout.engine=mine.py:E"]).rollout.engine == f"{tmp_path}/there/mine.py:E"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "rollout.max_new_tokens=9",
            r"rollout\.max_new_tokens is 9; all processes of a run share it; a rollout worker",
        ),
        ("seed=1", r"seed is 1; all processes of a run share it; a rollout worker may set rollout\.engine, "),
        ("rollout.workers=2", r"rollout\.workers is 2; all processes of a run share it"),
        ("rollout.max_inflight=1", r"rollout\.max_inflight is 1; a group of 8 samples must fit: at least 8"),
        ("rollout.max_inflight=x", r'rollout\.max_inflight is "x"; it must be an integer from 1'),
        ("rollout.engine=simulated", r'rollout\.engine is "simulated"; the run has "transformers", and all its'),
    ],
)
def test_settings_that_a_worker_cannot_have_are_refused(write: Write, override: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        worker_config(load(write(), REAL), [override])


def test_every_shared_key_that_differs_is_named(write: Write) -> None:
    run, other = load(write(), REAL), load(write(), [*REAL, "seed=3", "trainer.lr=0.1", "rollout.max_inflight=9"])
    with pytest.raises(ConfigError) as raised:
        check_shared(other, run, 'run "a"')
    expected = 'seed is 3; run "a" has 0, and all its processes share this key (other differences: trainer.lr)'
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            "[{group_size=3}]",
            r"rollout\.pool\[0\]\.group_size is 3; a pool may set workers, gpus, engine, .*; workers share",
        ),
        ("[{}, {max_inflight=1}]", r"rollout\.pool\[1\]\.max_inflight is 1; a group of 8 samples must fit"),
        ("[{threads=-1}]", r"rollout\.pool\[0\]\.threads is -1; it must be an integer from 0 to 4096"),
        ("[{vllm={gpus=0}}]", r"rollout\.pool\[0\]\.vllm\.gpus is 0; there is no such key"),
        ("[{engine='x'}]", r'rollout\.pool\[0\]\.engine is "x"; it must be one of'),
        ("[{engine='simulated'}]", r'pool\[0\]\.engine is "simulated"; tokens of all workers must be the same'),
        ("[{vllm={options={seed=1}}}]", r"rollout\.pool\[0\]\.vllm\.options\.seed is 1; another key sets"),
        ("[{gpus=[1,1]}]", r"rollout\.pool\[0\]\.gpus is \[1, 1\]; each GPU may be named once"),
        ("[{engine='vllm', gpus=[1], vllm={tensor_parallel=2}}]", r"pool\[0\]\.gpus is \[1\]; an engine needs 2 of"),
        ("3", r"rollout\.pool is 3; it must be a list, each a table"),
    ],
)
def test_a_wrong_pool_is_named(write: Write, given: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(), [*REAL, f"rollout.pool={given}"])


def test_pools_replace_the_number_of_workers(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.workers is 2; each \[\[rollout\.pool\]\] has its own number of"):
        mixed(write, "rollout.workers=2")


def test_spares_need_the_places_of_all_pools(write: Write) -> None:
    pooled = "rollout.pool=[{workers=2}, {max_inflight=128}]"
    spare = ["rollout.redundancy.groups=2.0", "rollout.max_inflight=8", "trainer.batch_size=8"]
    load(write(), [*REAL, *spare, pooled])
    with pytest.raises(ConfigError, match=r"pool\[0\]\.workers 2 x rollout\.pool\[0\]\.max_inflight 8 hold 4 groups"):
        load(write(), [*REAL, *spare, "rollout.pool=[{workers=2}]"])


def test_pools_without_gpus_of_their_own_share_those_of_rollout_in_order(write: Write) -> None:
    two = 'engine="vllm", vllm={tensor_parallel=2}'
    config = load(
        write(), [*REAL, "rollout.gpus=[0,1,2,3,4]", f"rollout.pool=[{{{two}}}, {{gpus=[7]}}, {{workers=2}}]"]
    )
    assert place(config, 0).rollout == [(0, 1), (7,), (2,), (3,)]
    assert place(load(write(), REAL), 0).rollout == [()]
