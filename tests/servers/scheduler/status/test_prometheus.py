"""The metrics of a scheduler are finite numbers, in a text that Prometheus's own parser accepts."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from staleflow.configs.metrics import Metrics
from staleflow.metrics.names import METRICS, prometheus
from staleflow.protocols.consistency.ids import Step
from staleflow.protocols.wire.messages import Done
from staleflow.protocols.wire.messages import Metrics as StepMetrics
from staleflow.servers.scheduler.status.prometheus import names
from tests.servers.scheduler.world import TIMEOUT_S, Cast, World, config


@pytest.fixture
def url(ports: list[int]) -> str:
    return f"http://127.0.0.1:{ports[0]}"


@pytest.fixture
def watched(short_dir: Path, url: str) -> Iterator[World]:
    made = World(short_dir / "run", msgspec.structs.replace(config(), metrics=Metrics(bind=url)))
    made.start()
    yield made
    made.close()


def read(url: str) -> dict[str, Metric]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    """Return the samples by the values of their labels."""
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


async def test_a_step_is_seen_in_the_numbers(watched: World, url: str) -> None:
    cast = await Cast(watched).enter()
    assigns = await cast.instance.until_held(2)
    await cast.shard.finish(assigns[:2], cast.instance.worker)
    batch = await cast.trainer.next_batch(0)
    await cast.trainer.publish(1, batch.batch)
    said = {"reward/mean": 0.5, "my/own number": 7.0, "loss": float("nan")}
    await cast.trainer.client.ask(StepMetrics(worker=cast.trainer.worker, step=Step(0), values=said), Done)
    found = read(url)
    assert values(found["staleflow_model_version"]) == {(): 1}
    assert values(found["staleflow_steps"]) == {(): 1}
    assert values(found["staleflow_groups_trained"]) == {("0",): 2}
    assert values(found["staleflow_reward_mean"]) == {(): 0.5}
    assert values(found["staleflow_my_own_number"]) == {(): 7}
    assert values(found["staleflow_off_policy_max"]) == {(): 0}
    assert values(found["staleflow_violations"]) == {(): 0}
    assert 0 <= values(found["staleflow_time_pull"])[()] < 10, "from the order to load version 0 until it was there"
    assert values(found["staleflow_processes"])[("rollout",)] == 1
    assert values(found["staleflow_instance_leases"]) == {("rollout-0",): len(cast.instance.held) - 2}
    assert found["staleflow_steps"].type == "counter"
    assert found["staleflow_reward_mean"].documentation == METRICS["reward/mean"].meaning


async def test_every_name_is_one_that_is_known(watched: World, url: str) -> None:
    await Cast(watched).enter()
    found = {name + ("_total" if family.type == "counter" else "") for name, family in read(url).items()}
    assert found <= set(names())
    assert len(found) > 25


def test_every_metric_has_a_name_of_its_own() -> None:
    assert len({prometheus(name) for name in METRICS}) == len(METRICS)
    assert prometheus("off_policy/in_queue/mean") == "staleflow_off_policy_in_queue_mean"
