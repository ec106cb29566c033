"""The comparison with the papers runs at a small size, keeps its guarantees, and charges the costs of its formulas."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from bench.costs import text
from bench.papers import main
from bench.papers_gpu import A3B, H20, MEASURED, QWEN_32B, Hardware
from bench.papers_points import OWN, Point, loses_nothing, oldest
from bench.papers_runs import Campaign, Interval
from bench.papers_shapes import SHAPES, Shape, small
from bench.papers_tables import by_shape, ratios, systems
from staleflow.configs.loading.cost_file import read_costs
from staleflow.sim.peers.presets import PEERS


@pytest.fixture(scope="module")
def keep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("papers") / "keep.jsonl"


@pytest.fixture(scope="module")
def point(keep: Path) -> Point:
    (shape,) = small([SHAPES["mixed-7b"]])
    return Point.of(Campaign(keep), shape, 1, 1)


def test_our_choices_keep_the_bound_and_only_the_token_bound_masks(point: Point) -> None:
    assert {name: (oldest(of), loses_nothing(of)) for name, of in point.own.items()} == {
        name: (1, name != "staleflow token") for name in OWN
    }


def test_a_peer_without_a_bound_is_compared_at_a_setting_that_keeps_it(point: Point) -> None:
    assert oldest(point.peers["areal"]) > 1
    assert (point.equal["areal"].setting, oldest(point.equal["areal"].outcomes)) == (0, 0)
    assert point.equal["psrl"].setting == 1


def test_the_fastest_rival_keeps_the_bound_and_loses_nothing(point: Point) -> None:
    rival = point.equal[point.rival()].outcomes
    assert oldest(rival) <= 1
    assert loses_nothing(rival)


def test_tables_have_every_system(point: Point) -> None:
    rows = [line.split(" | ")[0].strip("| ") for line in systems([point]).splitlines() if line.startswith("| ")]
    assert rows[2:] == [*OWN, *PEERS]
    assert all(f"| {name} |" in ratios([point]) for name in PEERS)
    assert "| **mixed-7b** | average / maximum |" in by_shape([point])


def test_the_command_continues_from_finished_runs(point: Point, keep: Path) -> None:
    finished = keep.read_bytes()
    chosen = ["--small", "--shapes", "mixed-7b", "--etas", "1", "--seeds", "1"]
    shown = CliRunner().invoke(main, [*chosen, "--keep", str(keep)])
    assert shown.exit_code == 0, shown.output
    assert systems([point]) in shown.output
    assert keep.read_bytes() == finished


def test_the_picture_is_well_formed(point: Point, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.papers_plot import draw

    draw([point], tmp_path / "papers.svg")
    words = {element.text for element in ElementTree.parse(tmp_path / "papers.svg").iter()}
    assert {"mixed-7b", "staleflow token", "nemo-rl"} <= words


def test_an_interval_is_students() -> None:
    assert str(Interval.of([1.0, 2.0, 3.0])) == "2.000 ± 2.484"
    assert Interval.of([1.0]) == Interval(1.0, 0.0)


def test_an_unknown_shape_is_refused() -> None:
    shown = CliRunner().invoke(main, ["--shapes", "staleflow-70b"])
    assert shown.exit_code == 2
    assert "'staleflow-70b' is none of staleflow-7b, staleflow-moe," in shown.output


# --- costs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_committed_cost_file_is_what_the_formulas_give(shape: Shape) -> None:
    assert shape.cost_file.read_text(encoding="utf-8") == text(shape.hardware.costs()), "python -m bench.papers_gpu"


def test_servers_cost_what_was_measured_and_the_rest_is_named_as_derived() -> None:
    costs, measured = SHAPES["staleflow-moe"].hardware.costs(), read_costs(MEASURED)
    assert (costs.scheduler, costs.shard, costs.wire) == (measured.scheduler, measured.shard, measured.wire)
    derived = (costs.publish, costs.pull, costs.load, costs.engine, costs.trainer)
    assert all(table is not None and table.source.startswith("derived: ") for table in derived)


def test_a_dense_engine_is_a_roofline() -> None:
    """65.6 GB of weights over 4 x 4 TB/s, of which 70 % are reached; 262,144 B a token in the KV cache."""
    engine = Hardware(model=QWEN_32B, engine_gpu=H20, tp=4, trainer_gpu=H20, trainer_gpus=8).costs().engine
    assert engine is not None
    assert (engine.k1, engine.k2) == pytest.approx((262_144 / 11.2e12, 65.6e9 / 11.2e12))
    assert engine.k3 == pytest.approx(2 * 32.8e9 / (4 * 148e12 * 0.5))


def test_a_mixture_of_experts_reads_the_experts_that_its_samples_choose() -> None:
    hardware = Hardware(model=A3B, engine_gpu=H20, tp=1, trainer_gpu=H20, trainer_gpus=8)
    engine = hardware.costs().engine
    assert engine is not None
    assert (engine.experts, engine.active) == (128, 8)
    assert engine.k2 + engine.experts_s == pytest.approx(61e9 / 2.8e12)
    assert hardware.kv_tokens == int((0.9 * 96e9 - 4e9 - 61e9) / 98_304)
