"""Consistency of keys with each other. Pure: reads no file and imports no user code."""

import math
import re
from urllib.parse import urlsplit

from staleflow.configs import vllm_options
from staleflow.configs.columns import check_columns
from staleflow.configs.engines import ENGINES
from staleflow.configs.errors import MISSING, ConfigError, shown
from staleflow.configs.imports import split
from staleflow.configs.metrics import check_metrics
from staleflow.configs.pools import gpus_of_engine, pools, workers
from staleflow.configs.rewards import check_components
from staleflow.configs.rules import algorithm
from staleflow.configs.rules.coordination import check_coordination, check_spares, samples_started
from staleflow.configs.rules.evals import VLLM_TEMPERATURE, check_evals
from staleflow.configs.rules.lora import check_lora, check_lora_engine
from staleflow.configs.rules.memory import check_memory
from staleflow.configs.rules.mirror import check_mirror
from staleflow.configs.rules.router_replay import check_replay, check_replay_engine
from staleflow.configs.rules.streaming import check_pieces, check_streaming
from staleflow.configs.rules.updates import check_updates
from staleflow.configs.schema import Config, Prompts, Rollout
from staleflow.configs.section import Section
from staleflow.configs.stages import check_teacher, graph, stages
from staleflow.configs.trainer import Trainer
from staleflow.protocols.consistency.limits import Bound, OnOverdue
from staleflow.protocols.wire.stages import CRITIC, REFERENCE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EVERY_INTERFACE = ("0.0.0.0", "0", "::", "::0")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
MIN_LEASE_S = 2.0
"""Two intervals between the reports of a rollout worker; a shorter lease can expire while its worker is healthy."""


def consistent(config: Config) -> None:
    """Raise ``ConfigError`` for the first rule that ``config`` breaks."""
    for rule in (_pools, _name, _model, _prompts, _specs, _idle, _bound, _groups, check_coordination, _algorithm):
        rule(config)
    for rule in (_ranks, check_streaming, check_updates, _stages, _evaluated, _shards, _security, _binds, _metrics):
        rule(config)
    for rule in (
        _trainer,
        _attention,
        check_engine,
        _gpus,
        _elastic,
        _lease,
        check_evals,
        check_lora,
        check_memory,
        check_replay,
        _store,
    ):
        rule(config)


def check_engine(config: Config) -> None:
    """Raise ``ConfigError`` for the first rule that the settings of a rollout worker break.

    These are the rules about ``own_settings.OWN``. The run's other processes have other values of such settings.
    """
    for rule in (
        _model,
        _specs,
        _engine,
        check_lora_engine,
        check_replay_engine,
        _columns,
        _direct,
        check_mirror,
        _lengths,
    ):
        rule(config)


def _pools(config: Config) -> None:
    rollout = config.rollout
    if rollout.pool and rollout.workers != (default := Rollout().workers):
        allowed = f"each [[rollout.pool]] has its own number of workers; leave it at {default}"
        raise ConfigError("rollout.workers", rollout.workers, allowed)
    for pool in pools(config) if rollout.pool else []:
        try:
            check_engine(pool.config)
        except ConfigError as error:
            raise pool.named(error) from None
        if has_tokenizer(pool.config) != has_tokenizer(config):
            allowed = f"tokens of all workers must be the same, those of rollout.engine {shown(rollout.engine)} are not"
            raise ConfigError(f"{pool.key}.engine", pool.config.rollout.engine, allowed)


def _elastic(config: Config) -> None:
    """Raise ``ConfigError`` unless the run starts with a number of rollout workers within its limits."""
    limits, last = config.rollout.elastic, pools(config)[-1]
    count = len(workers(config))
    if not limits.max_workers:
        if limits.min_workers > 1:
            allowed = "it has no effect without rollout.elastic.max_workers: set both"
            raise ConfigError("rollout.elastic.min_workers", limits.min_workers, allowed)
        return
    if limits.max_workers < count:
        allowed = f"it must be at least the number of rollout workers at the start, {count}; 0 changes none"
        raise ConfigError("rollout.elastic.max_workers", limits.max_workers, allowed)
    if limits.min_workers > count:
        allowed = f"it must be at most the number of rollout workers at the start, {count}"
        raise ConfigError("rollout.elastic.min_workers", limits.min_workers, allowed)
    if last.config.rollout.engine == "vllm_server" and limits.max_workers > count:
        allowed = (
            f"further workers would share the vLLM server of {last.key}: it must be {count}, the number of workers"
        )
        raise ConfigError("rollout.elastic.max_workers", limits.max_workers, allowed)


def _lease(config: Config) -> None:
    lease_s = config.scheduler.lease_s
    if lease_s < MIN_LEASE_S:
        allowed = f"workers renew their leases once a second: it must be at least {MIN_LEASE_S:g}"
        raise ConfigError("scheduler.lease_s", lease_s, allowed)


def _store(config: Config) -> None:
    if config.parameters.store == "memory" and config.parameters.durability == "power":
        allowed = 'with parameters.durability "power", which memory does not survive, it must be "disk" or "auto"'
        raise ConfigError("parameters.store", "memory", allowed)


def needs_model(config: Config) -> bool:
    """Return True unless no shipped engine, trainer or stage starts from the policy's model."""
    if config.rollout.engine in ("transformers", "vllm", "vllm_server") or config.trainer.backend != "simulated":
        return True
    own = {REFERENCE: config.reference.path, CRITIC: config.critic.path}
    return any(not own[stage] for stage in stages(config) if stage in own)


def has_tokenizer(config: Config) -> bool:
    """Return True if token ids are those of the model's tokenizer; False for engines that make up their own."""
    return config.rollout.engine != "simulated" and needs_model(config)


def _name(config: Config) -> None:
    if not _NAME.fullmatch(config.name):
        raise ConfigError("name", config.name, "it names run directories: letters, digits, '.', '_' and '-' only")


def _model(config: Config) -> None:
    path, build = config.model.path, config.model.build
    if path and build:
        empty = "model.build= model.options={}" if config.model.options else "model.build="
        allowed = f'with model.build "{build}" there must be only one of the two; {empty} leaves that one out'
        raise ConfigError("model.path", path, allowed)
    if not path and not build and needs_model(config):
        raise ConfigError("model.path", MISSING, "it must be a model directory, or model.build must make one")
    if config.model.options and not build:
        raise ConfigError("model.options", config.model.options, "these are options of model.build, which is missing")


def _prompts(config: Config) -> None:
    prompts = config.prompts
    _submitted(prompts)
    if prompts.path and prompts.source:
        allowed = "with prompts.source there must be only one of the two; prompts.path= leaves this one out"
        raise ConfigError("prompts.path", prompts.path, allowed)
    if prompts.sources and (prompts.path or prompts.source):
        key = "path" if prompts.path else "source"
        allowed = f"with prompts.sources there must be only one of the two; prompts.{key}= leaves this one out"
        raise ConfigError(f"prompts.{key}", getattr(prompts, key), allowed)
    for place, given in enumerate(prompts.sources):
        if bool(given.path) == bool(given.source):
            value = f"{given.path} and {given.source}" if given.path else MISSING
            allowed = "exactly one of it and source must be set"
            raise ConfigError(f"prompts.sources[{place}].path", value, allowed)
        if given.options and not given.source:
            allowed = "these are options of source, which is missing"
            raise ConfigError(f"prompts.sources[{place}].options", given.options, allowed)
    if prompts.system and not prompts.chat_template:
        allowed = "it needs prompts.chat_template = true, which formats the messages"
        raise ConfigError("prompts.system", prompts.system, allowed)
    if not prompts.path and not prompts.source and not prompts.sources and not prompts.submitted:
        raise ConfigError("prompts.path", MISSING, "it must be a .jsonl or .parquet file, or prompts.source be set")
    if prompts.eval_path and prompts.eval_source:
        raise ConfigError("prompts.eval_path", prompts.eval_path, "with prompts.eval_source only one of the two")
    paths = [("prompts.path", prompts.path), ("prompts.eval_path", prompts.eval_path)]
    paths += [(f"prompts.sources[{place}].path", given.path) for place, given in enumerate(prompts.sources)]
    for key, path in paths:
        if path and not path.startswith("hf://") and not path.endswith((".jsonl", ".parquet")):
            raise ConfigError(key, path, "it must end in .jsonl or .parquet, or be hf://ORGANIZATION/NAME")
    if config.trainer.eval_every and not (prompts.eval_path or prompts.eval_source):
        allowed = "it needs held-out prompts: prompts.eval_path or prompts.eval_source"
        raise ConfigError("trainer.eval_every", config.trainer.eval_every, allowed)
    if prompts.options and not (prompts.source or prompts.eval_source):
        allowed = "these are options of prompts.source and prompts.eval_source, which are missing"
        raise ConfigError("prompts.options", prompts.options, allowed)


def _submitted(prompts: Prompts) -> None:
    """Check that submitted prompts have no other source, and others no limits of submissions."""
    if not prompts.submitted:
        for key in ("max_pending", "max_row_bytes"):
            value, default = getattr(prompts, key), getattr(Prompts(), key)
            if value != default:
                allowed = f"it is for prompts.submitted = true; leave it at {default}"
                raise ConfigError(f"prompts.{key}", value, allowed)
        return
    for key in ("path", "source", "sources", "epochs"):
        if value := getattr(prompts, key):
            allowed = "with prompts.submitted clients submit the rows, each for one group; leave it out"
            raise ConfigError(f"prompts.{key}", value, allowed)


def import_paths(config: Config) -> dict[str, str]:
    """Return every import path that is set, by key."""
    paths = {
        "model.build": config.model.build,
        "prompts.source": config.prompts.source,
        "prompts.eval_source": config.prompts.eval_source,
        **{f"prompts.sources[{place}].source": given.source for place, given in enumerate(config.prompts.sources)},
        "environment.run": config.environment.run,
        "rollout.engine": config.rollout.engine if ":" in config.rollout.engine else "",
        "reward.run": config.reward.run,
        **{f"reward.functions[{place}].run": given.run for place, given in enumerate(config.reward.functions)},
        **{f"stage[{place}].run": stage.run for place, stage in enumerate(config.stage)},
        **{f"eval[{place}].source": given.source for place, given in enumerate(config.eval)},
        "trainer.run": config.trainer.run,
        **algorithm.import_paths(config.trainer.algorithm),
    }
    needed = [f"stage[{place}].run" for place in range(len(config.stage))]
    needed += [f"reward.functions[{place}].run" for place in range(len(config.reward.functions))]
    needed += [] if config.environment.run or config.reward.functions else ["reward.run"]
    return {key: spec for key, spec in paths.items() if spec or key in needed}


def _specs(config: Config) -> None:
    for key, spec in import_paths(config).items():
        split(spec, key)
    check_components(config.reward)


def _idle(config: Config) -> None:
    """Check that every key of an unused section is left at its default, as in ``trainer.algorithm``."""
    active = stages(config)
    for name, used, needed in (
        ("environment", bool(config.environment.run), "this is for environment.run, which is missing"),
        (
            "reference",
            REFERENCE in active,
            "the run has no reference stage: trainer.algorithm.kl_coef is 0, and no teacher",
        ),
        ("critic", CRITIC in active, 'the run has no critic stage: trainer.algorithm.advantage is not "gae"'),
    ):
        section: Section = getattr(config, name)
        for key in () if used else section.__struct_fields__:
            value, default = getattr(section, key), getattr(type(section)(), key)
            if value != default:
                raise ConfigError(f"{name}.{key}", value, f"{needed}; leave it at {shown(default)}")


def _stages(config: Config) -> None:
    graph(config)
    check_teacher(config)


def _columns(config: Config) -> None:
    check_columns(config.column, engine=config.rollout.engine, environment=bool(config.environment.run))


def _evaluated(config: Config) -> None:
    """Held-out prompts are scored by the reward alone."""
    held_out = config.prompts.eval_path or config.prompts.eval_source
    if config.reward.needs and held_out and config.trainer.eval_prompts:
        allowed = "held-out prompts go through no other stage: leave it empty, or trainer.eval_prompts at 0"
        raise ConfigError("reward.needs", config.reward.needs, allowed)


def _bound(config: Config) -> None:
    staleness = config.staleness
    if staleness.bound is Bound.TOKEN and staleness.on_overdue is not OnOverdue.WAIT:
        allowed = 'with staleness.bound "token" no group is ever overdue: leave it at "wait"'
        raise ConfigError("staleness.on_overdue", staleness.on_overdue.value, allowed)
    if staleness.bound is not Bound.TOKEN and staleness.min_trainable > 0:
        allowed = 'it means something only with staleness.bound "token"; leave it at 0'
        raise ConfigError("staleness.min_trainable", staleness.min_trainable, allowed)


def _engine(config: Config) -> None:
    rollout = config.rollout
    if rollout.engine not in ENGINES and ":" not in rollout.engine:
        named = ", ".join(f'"{name}"' for name in ENGINES)
        allowed = f"it must be one of {named}, or module:Class or file.py:Class of your own"
        raise ConfigError("rollout.engine", rollout.engine, allowed)
    if rollout.engine_options and rollout.engine in ENGINES:
        allowed = "these are keyword arguments of an engine class of your own; leave it empty"
        raise ConfigError("rollout.engine_options", ", ".join(rollout.engine_options), allowed)
    vllm_options.check_own(rollout.vllm.options)
    if rollout.engine == "vllm_server":
        _server(config)
    samples = samples_started(rollout)
    if samples > rollout.max_inflight:
        allowed = f"a group of {samples} samples must fit: at least {samples}"
        raise ConfigError("rollout.max_inflight", rollout.max_inflight, allowed)
    if rollout.on_update == "recompute" and rollout.engine == "simulated":
        allowed = 'rollout.engine "simulated" has nothing to read anew: "keep" or "drain"'
        raise ConfigError("rollout.on_update", "recompute", allowed)
    if rollout.engine in ("vllm", "vllm_server") and rollout.temperature < VLLM_TEMPERATURE:
        allowed = (
            f'with rollout.engine "{rollout.engine}" at least {VLLM_TEMPERATURE}, which vLLM would sample with instead'
        )
        raise ConfigError("rollout.temperature", rollout.temperature, allowed)


def _server(config: Config) -> None:
    """Check that a worker has a vLLM server to itself: each load of weights pauses it."""
    rollout, url = config.rollout, urlsplit(config.rollout.vllm_server.url)
    if url.scheme not in ("http", "https") or not url.netloc or url.path.strip("/"):
        allowed = "it must be http://host:port"
        raise ConfigError("rollout.vllm_server.url", rollout.vllm_server.url, allowed)
    if rollout.workers > 1:
        allowed = 'each worker needs a server of its own with rollout.engine "vllm_server": 1, or [[rollout.pool]]'
        raise ConfigError("rollout.workers", rollout.workers, allowed)


def _groups(config: Config) -> None:
    rollout = config.rollout
    check_spares(config, samples_started(rollout))
    if algorithm.filter_of(config) == "zero_spread" and rollout.group_size == 1:
        allowed = 'rollout.filter "zero_spread" releases every group of one: at least 2'
        raise ConfigError("rollout.group_size", rollout.group_size, allowed)
    if (name := config.trainer.algorithm.advantage) in algorithm.OVER_BATCH and rollout.group_size == 1:
        allowed = f'trainer.algorithm.advantage "{name}" compares the group: at least 2'
        raise ConfigError("rollout.group_size", rollout.group_size, allowed)


def _algorithm(config: Config) -> None:
    if not all(0 <= beta < 1 for beta in config.trainer.betas):
        raise ConfigError("trainer.betas", list(config.trainer.betas), "each must be at least 0 and below 1")
    algorithm.check_algorithm(config.trainer.algorithm)
    algorithm.check_critic_warmup(config.trainer)


def check_ranks(config: Config, nproc: int) -> None:
    """Check that ``nproc`` ranks can share every batch."""
    trainer = config.trainer
    if nproc > 1 and trainer.backend in ("torch", "simulated"):
        allowed = f'trainer.backend "{trainer.backend}" is one process: 1, or a backend of ddp, fsdp and deepspeed'
        raise ConfigError("trainer.nproc", nproc, allowed)
    if nproc > trainer.batch_size:
        allowed = f"each rank needs a group of every batch: at most trainer.batch_size, {trainer.batch_size}"
        raise ConfigError("trainer.nproc", nproc, allowed)
    check_pieces(config, nproc)


def _ranks(config: Config) -> None:
    trainer = config.trainer
    check_ranks(config, trainer.nproc)
    if trainer.backend == "deepspeed" and trainer.zero_stage < 2 and config.model.dtype == "bfloat16":
        raise ConfigError("trainer.zero_stage", trainer.zero_stage, 'with model.dtype "bfloat16" it must be 2 or 3')


def _trainer(config: Config) -> None:
    """Check that keys of ``trainer`` that do not apply are left at their defaults."""
    trainer = config.trainer
    for meaningful, key, allowed in (
        (trainer.lr_schedule != "constant", "lr_min_share", 'with trainer.lr_schedule "constant" nothing ends at it'),
        (trainer.backend == "deepspeed", "zero_stage", 'it is for trainer.backend "deepspeed"'),
    ):
        default = getattr(Trainer(), key)
        if not meaningful and (value := getattr(trainer, key)) != default:
            raise ConfigError(f"trainer.{key}", value, f"{allowed}; leave it at {shown(default)}")


def _attention(config: Config) -> None:
    attention = config.trainer.attention
    if attention.startswith("flash_attention") and config.model.dtype == "float32":
        raise ConfigError(
            "trainer.attention", attention, 'with model.dtype "float32" it must be another: "auto" or "sdpa"'
        )


def _gpus(config: Config) -> None:
    """Check that each process has enough of the named GPUs, each named once.

    CUDA shows a process no GPU at all if a GPU is listed twice.
    """
    trainer, shared = config.trainer, config.rollout.gpus
    for key, gpus in (("trainer.gpus", trainer.gpus), ("rollout.gpus", shared)):
        if len(set(gpus)) < len(gpus):
            raise ConfigError(key, gpus, "each GPU may be named once")
    if trainer.gpus and len(trainer.gpus) < trainer.nproc:
        allowed = f"each of the trainer.nproc = {trainer.nproc} ranks needs one of its own, or none be named"
        raise ConfigError("trainer.gpus", trainer.gpus, allowed)
    for pool in pools(config):
        key = f"{pool.key}.gpus" if (own := pool.config.rollout.gpus) else "rollout.gpus"
        gpus, width = own or shared, gpus_of_engine(pool.config)
        if len(set(own)) < len(own):
            raise ConfigError(key, own, "each GPU may be named once")
        if 0 < len(gpus) < width:
            allowed = f"an engine needs {width} of them (rollout.vllm.tensor_parallel), or none be named"
            raise ConfigError(key, gpus, allowed)


def check_rows(config: Config, rows: int) -> None:
    """Check that the prompts last for every step; the filter may still take some of them."""
    prompts, trainer = config.prompts, config.trainer
    source = prompts.path or prompts.source or [given.path or given.source for given in prompts.sources]
    if rows < 1:
        key = "path" if prompts.path else "source" if prompts.source else "sources"
        raise ConfigError(f"prompts.{key}", source, "it has no rows")
    needed = trainer.batch_size * trainer.steps
    if prompts.epochs and rows * prompts.epochs < needed:
        allowed = (
            f"{rows} rows x {prompts.epochs} give {rows * prompts.epochs} groups, but trainer.batch_size "
            f"{trainer.batch_size} x trainer.steps {trainer.steps} need {needed}: "
            f"at least {math.ceil(needed / rows)}, or 0 to repeat until the trainer is done"
        )
        raise ConfigError("prompts.epochs", prompts.epochs, allowed)


def _shards(config: Config) -> None:
    binds, shards = config.trajectories.bind, config.trajectories.shards
    if binds and len(binds) != shards:
        raise ConfigError("trajectories.bind", binds, f"it must have trajectories.shards = {shards} addresses, or none")


def _security(config: Config) -> None:
    if config.security.insecure and config.security.keys:
        raise ConfigError("security.insecure", True, f'with security.keys "{config.security.keys}" it must be false')


def _binds(config: Config) -> None:
    binds = [("scheduler.bind", config.scheduler.bind), ("parameters.bind", config.parameters.bind)]
    binds += [("parameters.direct_bind", config.parameters.direct_bind)]
    binds += [("trajectories.bind", bind) for bind in config.trajectories.bind]
    wide = bool(config.security.keys) or config.security.insecure
    keys: dict[str, str] = {}
    for key, bind in binds:
        if not bind:
            continue
        _address(key, bind, wide=wide)
        if bind in keys:
            raise ConfigError(key, bind, f"{keys[bind]} has it already; each server needs its own")
        keys[bind] = key


def _metrics(config: Config) -> None:
    check_metrics(config.metrics, insecure=config.security.insecure)


def _direct(config: Config) -> None:
    """Reject combinations that cannot get weights from the trainer, before anything starts."""
    parameters = config.parameters
    if parameters.transport == "server":
        if parameters.direct_bind:
            allowed = 'it is for parameters.transport "direct"; leave it at ""'
            raise ConfigError("parameters.direct_bind", parameters.direct_bind, allowed)
        return
    if config.security.keys:
        allowed = 'with security.keys it must be "server": what engines get from the trainer itself is not encrypted'
        raise ConfigError("parameters.transport", "direct", allowed)
    for key, kind in (("rollout.engine", config.rollout.engine), ("trainer.backend", config.trainer.backend)):
        if kind == "simulated":
            allowed = f'with {key} "simulated" it must be "server": there are no weights to speak of, and no torch'
            raise ConfigError("parameters.transport", "direct", allowed)
    where = urlsplit(parameters.direct_bind)
    if where.scheme == "ipc" or where.hostname in _EVERY_INTERFACE:
        allowed = "engines are sent there: tcp://host:port, with the address of one interface"
        raise ConfigError("parameters.direct_bind", parameters.direct_bind, allowed)


def _address(key: str, bind: str, *, wide: bool) -> None:
    form = "it must be tcp://host:port or ipc:///path"
    if bind.startswith("ipc:///") and len(bind) > len("ipc:///"):
        return
    try:
        parts = urlsplit(bind)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise ConfigError(key, bind, form) from None
    if parts.scheme != "tcp" or not host or not port or parts.path:
        raise ConfigError(key, bind, f"{form}, with a port from 1 to 65535")
    if not _LOOPBACK.fullmatch(host) and not wide:
        allowed = "without security.keys only loopback may be bound: 127.0.0.1, ::1 or localhost"
        raise ConfigError(key, bind, allowed)
    if host == "*":
        raise ConfigError(key, bind, "write 0.0.0.0 (or [::]) for every interface")


def _lengths(config: Config) -> None:
    """Check the lengths of simulated engines."""
    simulated = config.rollout.simulated
    if simulated.lengths == "trace" and not simulated.trace:
        allowed = 'with rollout.simulated.lengths "trace" it must be a .jsonl or .parquet file'
        raise ConfigError("rollout.simulated.trace", MISSING, allowed)
    if simulated.lengths != "trace" and simulated.trace:
        allowed = f'rollout.simulated.lengths is "{simulated.lengths}", not "trace"; leave it at ""'
        raise ConfigError("rollout.simulated.trace", simulated.trace, allowed)
    most = simulated.max_tokens or config.rollout.max_new_tokens
    if simulated.lengths == "uniform" and simulated.min_tokens > most:
        allowed = f"lengths are uniform up to {most}: at most that"
        raise ConfigError("rollout.simulated.min_tokens", simulated.min_tokens, allowed)
