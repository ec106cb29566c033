"""Keys that contradict each other are rejected."""

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.configs.rules.checks import check_rows, needs_model
from staleflow.configs.stages import stages
from tests.configs.conftest import MINIMAL, Write

DIRECT = ("parameters.transport=direct", "rollout.engine=transformers", "trainer.backend=torch", "model.path=/m")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["rollout.engine=transformers"], r"model\.path is missing; it must be a model directory, or model\.build"),
        (["trainer.algorithm.kl_coef=0.1"], r"model\.path is missing; it must be a model directory, or model\.build"),
        (["trainer.algorithm.advantage=gae", "reference.path=/m"], r"model\.path is missing; it must be a model"),
        (["model.path=/m", "model.build=a:b"], r"one of the two; model\.build= leaves that one out$"),
        (
            ["model.path=/m", "model.build=a:b", "model.options.x=1"],
            r'model\.path is "/m"; with model\.build "a:b" there must .*; model\.build= model\.options=\{\} leaves',
        ),
        (["model.options.x=1"], r"model\.options is \{'x': 1\}; these are options of model\.build, which is missing"),
        (["prompts.path=/p.jsonl"], r"prompts\.path is \"/p\.jsonl\"; with prompts\.source there must be only one"),
        (['prompts.source=""'], r"prompts\.path is missing; it must be a \.jsonl or \.parquet file"),
        (['prompts.source=""', "prompts.path=/p.csv"], r'prompts\.path is "/p\.csv"; it must end in \.jsonl or'),
        (
            ["prompts.submitted=true"],
            r'prompts\.source is "staleflow.*"; with prompts\.submitted clients submit the rows, each for',
        ),
        (
            ["prompts.submitted=true", "prompts.source=", "prompts.epochs=2"],
            r"prompts\.epochs is 2; with prompts\.submitted clients submit the rows",
        ),
        (
            ["prompts.max_pending=9"],
            r"prompts\.max_pending is 9; it is for prompts\.submitted = true; leave it at 4096$",
        ),
        (["prompts.eval_path=/a.jsonl", "prompts.eval_source=a:b"], r"with prompts\.eval_source only one of the two"),
        (
            ["rollout.on_update=recompute"],
            r'rollout\.on_update is "recompute"; rollout\.engine "simulated" has nothing to',
        ),
        (
            ["rollout.engine=vllm", "model.path=/m", "rollout.temperature=0.009"],
            r'rollout\.temperature is 0\.009; with rollout\.engine "vllm" at least 0\.01, which vLLM would sample',
        ),
        (
            ["rollout.engine=vllm_server", "model.path=/m", "rollout.workers=2"],
            r'rollout\.workers is 2; each worker needs a server of its own with rollout\.engine "vllm_server": 1, or',
        ),
        (
            ["rollout.engine=vllm_server", "model.path=/m", "rollout.vllm_server.url=box:8000"],
            r'rollout\.vllm_server\.url is "box:8000"; it must be http://host:port$',
        ),
        (
            ["trainer.lr_min_share=0.1"],
            r'lr_min_share is 0\.1; with trainer\.lr_schedule "constant" nothing ends at it; leave it at 0\.0$',
        ),
        (
            ["trainer.attention=flash_attention_2"],
            r'attention is "flash_attention_2"; with model\.dtype "float32" it must be another: "auto" or "sdpa"$',
        ),
        (["trainer.zero_stage=3"], r'trainer\.zero_stage is 3; it is for trainer\.backend "deepspeed"; leave it at 2$'),
        (
            ["prompts.source=", "prompts.path=/p.jsonl", "prompts.options.limit=7"],
            r"prompts\.options is \{'limit': 7\}; these are options of prompts\.source and .*, which are missing$",
        ),
        (["rollout.gpus=[1,0,1]"], r"rollout\.gpus is \[1, 0, 1\]; each GPU may be named once$"),
        (["trainer.gpus=[0,0]"], r"trainer\.gpus is \[0, 0\]; each GPU may be named once$"),
        (
            ["rollout.engine=vllm", "model.path=/m", "rollout.vllm.tensor_parallel=2", "rollout.gpus=[3]"],
            r"rollout\.gpus is \[3\]; an engine needs 2 of them \(rollout\.vllm\.tensor_parallel\), or none",
        ),
        (["trainer.eval_every=5"], r"trainer\.eval_every is 5; it needs held-out prompts: prompts\.eval_path or"),
        (
            ["rollout.simulated.lengths=trace"],
            r"rollout\.simulated\.trace is missing; with rollout\.simulated\.lengths \"trace\" it must be a \.jsonl",
        ),
        (["rollout.simulated.trace=/t.jsonl"], r'trace is "/t\.jsonl"; rollout\.simulated\.lengths is "lognormal"'),
        (
            ["rollout.simulated.lengths=uniform", "rollout.simulated.min_tokens=99", "rollout.max_new_tokens=9"],
            r"rollout\.simulated\.min_tokens is 99; lengths are uniform up to 9: at most that",
        ),
        (
            ["parameters.transport=direct"],
            r'parameters\.transport is "direct"; with rollout\.engine "simulated" it must be "server"',
        ),
        (
            ["parameters.transport=direct", "rollout.engine=transformers", "model.path=/m"],
            r'parameters\.transport is "direct"; with trainer\.backend "simulated" it must be "server"',
        ),
        (
            ["parameters.store=memory", "parameters.durability=power"],
            r'parameters\.store is "memory"; with parameters\.durability "power", .* it must be "disk" or "auto"',
        ),
        (
            ["parameters.transport=direct", "security.keys=keys"],
            r'parameters\.transport is "direct"; with security\.keys it must be "server": .* not encrypted',
        ),
        (
            ["parameters.direct_bind=tcp://127.0.0.1:5590"],
            r'direct_bind is "tcp://127\.0\.0\.1:5590"; it is for parameters\.transport "direct"; leave it at ""',
        ),
        (
            [*DIRECT, "parameters.direct_bind=tcp://0.0.0.0:5590", "security.insecure=true"],
            r'direct_bind is "tcp://0\.0\.0\.0:5590"; engines are sent there: tcp://host:port, with the address of one',
        ),
        ([*DIRECT, "parameters.direct_bind=ipc:///tmp/p"], r'direct_bind is "ipc:///tmp/p"; engines are sent there'),
        (
            [*DIRECT, "parameters.direct_bind=tcp://10.0.0.1:5590"],
            r'direct_bind is "tcp://10\.0\.0\.1:5590"; without security\.keys only loopback may be bound',
        ),
        (
            ["rollout.weights_from=mirror"],
            r'weights_from is "mirror"; it needs parameters\.mirror; leave it at "server"',
        ),
        (["parameters.mirror=/shared"], r'parameters\.mirror is "/shared"; it must be s3://BUCKET/PREFIX or file:///'),
        (
            ["parameters.mirror=s3://AKID:secret@bucket/x"],
            r'mirror is "s3://\.\.\.@bucket/x"; credentials and options belong into the environment',
        ),
        (["reward.run=score"], r'reward\.run is "score"; it must be module:function or file\.py:function'),
        (["reward.run=a:"], r'reward\.run is "a:"; it must be module:function'),
        (['reward.run=""'], r'reward\.run is ""; it must be module:function'),
        (["environment.options.x=1"], r"environment\.options is \{'x': 1\}; this is for environment\.run, which is"),
        (["environment.timeout_s=9"], r"environment\.timeout_s is 9\.0; .* environment\.run, .*; leave it at 120\.0"),
        (
            ["reference.path=/m"],
            r'reference\.path is "/m"; the run has no reference stage: .*kl_coef is 0.* leave it at ""',
        ),
        (["reference.threads=2"], r"reference\.threads is 2; the run has no reference stage: .*; leave it at 0$"),
        (
            ["critic.path=/m"],
            r'critic\.path is "/m"; the run has no critic stage: .*advantage is not "gae"; leave it at',
        ),
        (
            ["critic.lr=0.1", "trainer.algorithm.kl_coef=1", "model.path=/m"],
            r"critic\.lr is 0\.1; the run has no critic",
        ),
        (["reference.batch=2", "trainer.algorithm.advantage=gae", "model.path=/m"], r"the run has no reference stage"),
        (
            ["environment.run=a:B", "coordination.migration=idle"],
            r'coordination\.migration is "idle"; it must be "none" with environment\.run: an episode cannot leave',
        ),
        (["environment.run=a"], r'environment\.run is "a"; it must be module:function or file\.py:function'),
        (["staleness.bound=token", "staleness.on_overdue=drop"], r'staleness\.on_overdue is "drop"; with staleness'),
        (
            ["coordination.min_gain=0.4", "coordination.routing=sticky"],
            r'coordination\.min_gain is 0\.4; .*"cost_model"; leave it at 0\.',
        ),
        (["coordination.sync_threshold=4"], r'coordination\.sync_threshold is 4; .*"threshold"; leave it at 8$'),
        (["coordination.sync=idle", "coordination.sync_threshold=4"], r"coordination\.sync_threshold is 4; it is the"),
        (
            ["coordination.migration_gap=3", "coordination.migration=idle"],
            r'migration_gap is 3\.0; .*"throughput"; leave',
        ),
        (["coordination.lookahead=5"], r'coordination\.lookahead is 5; .*"length_clustered"; leave it at 20$'),
        (
            ["coordination.composition=length_clustered", "coordination.ranker=none"],
            r'composition is "length_clustered"; with coordination\.ranker "none" no length is expected: "iid", or a',
        ),
        (
            ["rollout.redundancy.groups=2", "rollout.max_inflight=8", "trainer.batch_size=8"],
            r"redundancy\.groups is 2\.0; .*1 x rollout\.max_inflight 8 hold 2 groups, the bound alone admits 24",
        ),
        (
            ["scheduler.lease_s=0.01"],
            r"scheduler\.lease_s is 0\.01; workers renew their leases once a second: it must be",
        ),
        (["staleness.min_trainable=0.5"], r"staleness\.min_trainable is 0\.5; it means something only with"),
        (["rollout.max_inflight=7"], r"rollout\.max_inflight is 7; a group of 8 samples must fit: at least 8"),
        (["rollout.max_inflight=8", "rollout.redundancy.samples=1.1"], r"a group of 9 samples must fit: at least 9"),
        (["rollout.group_size=1", "rollout.filter=zero_spread"], r"rollout\.group_size is 1; .* at least 2"),
        (
            ["trajectories.bind=['tcp://127.0.0.1:1']", "trajectories.shards=2"],
            r"it must have trajectories\.shards = 2",
        ),
        (["scheduler.bind=tcp://0.0.0.0:1"], r'scheduler\.bind is "tcp://0\.0\.0\.0:1"; without security\.keys only'),
        (["scheduler.bind=tcp://*:1", "security.insecure=true"], r"write 0\.0\.0\.0 \(or \[::\]\) for every interface"),
        (
            ["security.keys=/k", "security.insecure=true"],
            r'insecure is true; with security\.keys "/k" it must be false',
        ),
        (["scheduler.bind=tcp://127.0.0.1"], r"it must be tcp://host:port or ipc:///path"),
        (["scheduler.bind=tcp://127.0.0.1:0"], r"with a port from 1 to 65535"),
        (["scheduler.bind=tcp://127.0.0.1:70000"], r"it must be tcp://host:port"),
        (["scheduler.bind=ipc://relative"], r"it must be tcp://host:port or ipc:///path"),
        (["scheduler.bind=tcp://[::1]:7", "parameters.bind=tcp://[::1]:7"], r"scheduler\.bind has it already"),
    ],
)
def test_a_contradiction_is_named(write: Write, overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        load(write(), overrides)


def test_what_fits_is_left_alone(write: Write) -> None:
    assert load(write(), ["scheduler.bind=tcp://[::1]:7", "parameters.bind=ipc:///tmp/p"]).scheduler.bind
    assert load(write(), ["rollout.max_inflight=8"]).rollout.group_size == 8
    assert load(write(), [*DIRECT, "parameters.direct_bind=tcp://127.0.0.1:5590"]).parameters.transport == "direct"


WIDE = (
    *("0.0.0.0", "*", "[::]", "[::0]", "0", "10.0.0.1", "192.168.1.7", "[fe80::1]", "[::ffff:10.0.0.1]"),
    *("eth0", "lo", "example.org", "LOCALHOST.example.org", "127.1", "2130706433", "0x7f000001", "128.0.0.1"),
)


@pytest.mark.parametrize("host", WIDE)
@pytest.mark.parametrize("key", ["scheduler.bind", "parameters.bind", "trajectories.bind"])
def test_without_keys_only_loopback_may_be_configured(write: Write, key: str, host: str) -> None:
    value = f"['tcp://{host}:5000']" if key == "trajectories.bind" else f"tcp://{host}:5000"
    with pytest.raises(ConfigError) as caught:
        load(write(), [f"{key}={value}"])
    assert (caught.value.what, caught.value.value) == (key, f"tcp://{host}:5000")


@pytest.mark.parametrize("so", ["security.keys=/k", "security.insecure=true"])
@pytest.mark.parametrize("host", sorted(set(WIDE) - {"*"}))
def test_with_keys_or_said_to_be_insecure_more_may_be_configured(write: Write, host: str, so: str) -> None:
    assert load(write(), [f"scheduler.bind=tcp://{host}:5000", so]).scheduler.bind == f"tcp://{host}:5000"


def test_stages_are_those_that_the_algorithm_needs(write: Write) -> None:
    path, kl, gae = write(), "trainer.algorithm.kl_coef=0.1", "trainer.algorithm.advantage=gae"
    assert stages(load(path)) == ("reward",)
    assert stages(load(path, [kl, "reference.path=/m"])) == ("reward", "reference")
    assert stages(load(path, [gae, "critic.path=/m"])) == ("reward", "critic")
    assert stages(load(path, [kl, gae, "model.path=/m"])) == ("reward", "reference", "critic")
    assert not needs_model(load(path, [kl, "reference.path=/m"]))
    assert needs_model(load(path, [kl, gae, "reference.path=/m", "model.path=/n"]))


def test_prompts_that_cannot_fill_every_batch_are_named_with_how_many_passes_would_do(write: Write) -> None:
    config = load(write(MINIMAL), ["prompts.epochs=1", "trainer.steps=10", "trainer.batch_size=4"])
    check_rows(config, 40)
    with pytest.raises(ConfigError) as raised:
        check_rows(config, 39)
    assert str(raised.value) == (
        "prompts.epochs is 1; 39 rows x 1 give 39 groups, but trainer.batch_size 4 x trainer.steps 10 need 40: "
        "at least 2, or 0 to repeat until the trainer is done"
    )
    check_rows(load(write(MINIMAL), ["prompts.epochs=0"]), 1)
    with pytest.raises(ConfigError, match="it has no rows"):
        check_rows(config, 0)


def test_with_an_environment_the_reward_may_be_left_to_it(write: Write) -> None:
    config = load(write(), ["environment.run=a:B", 'reward.run=""'])
    assert (config.environment.run, config.reward.run) == ("a:B", "")


@pytest.mark.parametrize("backend", ["torch", "ddp", "fsdp", "deepspeed"])
def test_an_environment_may_have_held_out_prompts_with_every_trainer(write: Write, backend: str) -> None:
    overrides = ["environment.run=a:B", "prompts.eval_source=a:b", "trainer.eval_every=5", "environment.timeout_s=9"]
    stage = ["trainer.zero_stage=3"] if backend == "deepspeed" else []
    config = load(write(), [*overrides, "model.path=/m", f"trainer.backend={backend}", *stage])
    assert (config.trainer.eval_every, config.environment.timeout_s) == (5, 9.0)


def test_keys_that_mean_something_with_the_others_are_taken(write: Write) -> None:
    for overrides in (
        ["trainer.lr_schedule=cosine", "trainer.lr_min_share=0.1"],
        ["trainer.backend=deepspeed", "model.path=/m", "trainer.zero_stage=3"],
        ["prompts.eval_source=a:b", "trainer.eval_every=5"],
        ["prompts.source=", "prompts.path=/p.jsonl", "prompts.eval_source=a:b", "prompts.options.limit=7"],
        ["rollout.engine=transformers", "model.path=/m", "rollout.workers=3", "rollout.gpus=[0]"],  # all share it
        ["rollout.engine=vllm", "model.path=/m", "rollout.vllm.tensor_parallel=2", "rollout.gpus=[3,1]"],
        ["rollout.engine=transformers", "model.path=/m", "rollout.vllm.tensor_parallel=2", "rollout.gpus=[3]"],
    ):
        load(write(), overrides)
