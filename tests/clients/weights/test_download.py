"""A reader outside the run gets exactly a version, or at least one, from the mirror alone; or it is told why not."""

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from staleflow import ConfigError, fetch_weights
from staleflow.cli.main import main
from staleflow.clients.weights import CorruptWeights
from staleflow.clients.weights.download import NotMirrored, save_weights
from staleflow.clients.weights.external import external
from staleflow.clients.weights.tensors import copy_into, layout, with_digests
from staleflow.protocols.consistency.ids import Lineage, Version
from staleflow.protocols.wire.manifest import digest, lay_out
from staleflow.protocols.wire.tensors import Array
from staleflow.store.mirror import INDEX, MANIFEST, Index, MirroredVersion, parts
from staleflow.store.objects import NoObject, Objects, StoreError
from tests.servers.running import WEIGHTS, Run

pytestmark = pytest.mark.xdist_group("s3")

Mirror = Callable[..., Objects]


def weights(number: int) -> dict[str, Array]:
    return {"w": np.full((3, 5), number, np.float32), "head": np.arange(number, dtype=np.uint16)}


async def put(objects: Objects, lineage: int, version: int, arrays: dict[str, Array] | None = None) -> MirroredVersion:
    """Put a version into the mirror as the parameter server does."""
    arrays = weights(version) if arrays is None else arrays
    places = layout(arrays)
    data = np.zeros(places.nbytes, np.uint8)
    copy_into(places, arrays, data)
    digests = [digest(data[one.offset : one.offset + one.nbytes].data) for one in places.tensors]
    manifest = with_digests(places, digests)
    mirrored = MirroredVersion(
        lineage=Lineage(lineage), version=Version(version), sha=manifest.sha, nbytes=manifest.nbytes
    )
    for name, offset, nbytes in parts(manifest.nbytes):
        await objects.put(f"{mirrored.folder}/{name}", data[offset : offset + nbytes].tobytes())
    await objects.put(f"{mirrored.folder}/{MANIFEST}", msgspec.json.encode(manifest))
    return mirrored


async def show(objects: Objects, lineage: int, *versions: MirroredVersion) -> None:
    index = Index(run="run-1", lineage=Lineage(lineage), versions=versions)
    await objects.put(INDEX, msgspec.json.encode(index))


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return Objects(f"file://{tmp_path}/shared/run-1")


async def get(objects: Objects, *, version: int | None = None, min_version: int = 0, timeout_s: float = 0.0) -> int:
    """Fetch a version, compare its weights and return its number."""
    wanted = partial(fetch_weights, version=version, min_version=min_version, timeout_s=timeout_s)
    pulled = await asyncio.to_thread(wanted, objects.url)
    arrays = pulled.arrays()
    for name, array in weights(pulled.version).items():
        np.testing.assert_array_equal(arrays[name], array)
    return pulled.version


async def test_the_newest_version_or_exactly_one_is_fetched(objects: Objects) -> None:
    await show(objects, 1, await put(objects, 0, 3), await put(objects, 0, 5), await put(objects, 1, 7))
    assert await get(objects) == 7
    assert await get(objects, min_version=4) == 7
    assert await get(objects, version=5) == 5
    with pytest.raises(NotMirrored, match="at least 8 yet; it has 3, 5, 7"):
        await get(objects, min_version=8)
    with pytest.raises(NotMirrored, match="does not have version 8 yet; it has 3, 5, 7"):
        await get(objects, version=8)
    with pytest.raises(NotMirrored, match="version 4, which was deleted or skipped"):
        await get(objects, version=4, timeout_s=600)  # it will not come: no wait
    with pytest.raises(ConfigError, match="only one of the two"):
        await get(objects, version=4, min_version=4)


@pytest.mark.parametrize("exactly", [True, False])
async def test_a_version_that_is_not_there_yet_is_waited_for(objects: Objects, exactly: bool) -> None:
    first = await put(objects, 0, 1)
    await show(objects, 0, first)
    wanted = get(objects, version=2, timeout_s=60) if exactly else get(objects, min_version=2, timeout_s=60)
    waiting = asyncio.ensure_future(wanted)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await show(objects, 0, first, await put(objects, 0, 2))
    assert await waiting == 2


async def test_the_first_version_of_a_run_is_waited_for(objects: Objects) -> None:
    waiting = asyncio.ensure_future(get(objects, timeout_s=60))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await show(objects, 0)
    await show(objects, 0, await put(objects, 0, 0))
    assert await waiting == 0


async def test_an_abandoned_version_does_not_count(objects: Objects) -> None:
    kept, _abandoned = await put(objects, 0, 1), await put(objects, 0, 2)
    await show(objects, 1, kept)
    assert await get(objects) == 1
    with pytest.raises(NotMirrored):
        await get(objects, version=2)
    with pytest.raises(NotMirrored):
        await get(objects, min_version=2)


async def test_a_version_that_is_deleted_while_it_is_read_is_replaced_by_a_newer_one(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = await put(objects, 0, 1), await put(objects, 0, 2)
    await show(objects, 0, old)
    read = Objects.get

    async def deleted(self: Objects, name: str) -> memoryview:
        if name == f"{old.folder}/{MANIFEST}":
            await show(objects, 0, new)
            await objects.delete_folder(old.folder, first=MANIFEST)
        return await read(self, name)

    monkeypatch.setattr(Objects, "get", deleted)
    assert await get(objects) == 2


async def test_an_index_that_names_a_missing_version_is_an_error_without_end(objects: Objects) -> None:
    one = await put(objects, 0, 1)
    await show(objects, 0, one)
    await objects.delete_folder(one.folder, first=MANIFEST)
    with pytest.raises(NoObject, match=one.folder):
        await get(objects)


async def test_damage_is_found(objects: Objects) -> None:
    one = await put(objects, 0, 1)
    await show(objects, 0, one)
    await objects.put(f"{one.folder}/000000.part", bytes(one.nbytes))
    with pytest.raises(CorruptWeights, match="tensor w"):
        await get(objects)
    await objects.put(INDEX, b"{")
    with pytest.raises(Exception, match=r"index\.json is damaged"):
        await get(objects)


async def test_a_url_without_a_run_names_the_runs(objects: Objects) -> None:
    await show(objects, 0)
    with pytest.raises(NoObject, match=r"has no index\.json; folders there: run-1"):
        await asyncio.to_thread(fetch_weights, objects.url.removesuffix("/run-1"))


async def test_a_saved_version_has_the_same_bits(objects: Objects, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    await show(objects, 0, await put(objects, 0, 2))
    about = await asyncio.to_thread(save_weights, objects.url, tmp_path / "to")
    assert (about.run, about.lineage, about.version) == ("run-1", 0, 2)
    assert json.loads((tmp_path / "to" / "staleflow.json").read_bytes()) == msgspec.to_builtins(about)
    files = sorted((tmp_path / "to").iterdir())
    assert [path.name for path in files] == ["model.safetensors", "staleflow.json"]
    assert files[0].stat().st_mode == files[1].stat().st_mode
    tensors = load_file(tmp_path / "to" / "model.safetensors")
    assert tensors["head"].dtype == torch.bfloat16
    np.testing.assert_array_equal(tensors["head"].view(dtype=torch.uint16).numpy(), weights(2)["head"])
    np.testing.assert_array_equal(tensors["w"].numpy(), weights(2)["w"])


async def test_a_version_whose_weights_are_elsewhere_is_not_saved(objects: Objects, tmp_path: Path) -> None:
    await show(objects, 0, await put(objects, 0, 2, external("s3://mine/step-2")))
    with pytest.raises(NotMirrored, match=r"version 2 has no weights in the run, but the digest 's3://mine/step-2'"):
        await asyncio.to_thread(save_weights, objects.url, tmp_path / "to")
    assert not (tmp_path / "to").exists()


async def test_a_version_that_does_not_fit_into_memory_is_refused(objects: Objects) -> None:
    manifest = lay_out([("w", "uint8", (1 << 47,), "0" * 32)])
    huge = MirroredVersion(lineage=Lineage(0), version=Version(1), sha=manifest.sha, nbytes=manifest.nbytes)
    await objects.put(f"{huge.folder}/{MANIFEST}", msgspec.json.encode(manifest))
    await show(objects, 0, huge)
    with pytest.raises(StoreError, match=f"no memory for the {1 << 47} bytes of {huge.folder}"):
        await get(objects)


async def test_the_command_reports_a_full_disk_and_leaves_nothing_there(
    objects: Objects, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python would keep a truncated file of it
    one, folder = await put(objects, 0, 1000), tmp_path / "to"
    await show(objects, 0, one)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The version fits, its file does not: that has a header, too.
    resource.setrlimit(resource.RLIMIT_FSIZE, (one.nbytes, limits[1]))
    try:
        code = await asyncio.to_thread(main, ["weights", "fetch", objects.url, "--to", str(folder)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code != 0
    assert f"{folder}/model.safetensors.part: " in capsys.readouterr().err
    assert list(folder.iterdir()) == []


async def test_the_command_prints_no_control_characters_of_the_store(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index = Index(run="\x1b[31mrun", lineage=Lineage(0), versions=(await put(objects, 0, 1),))
    await objects.put(INDEX, msgspec.json.encode(index))

    def keep_colours(*_: object, **__: object) -> bool:
        """As on a terminal."""
        return False

    monkeypatch.setattr("click.utils.should_strip_ansi", keep_colours)
    await asyncio.to_thread(main, ["weights", "fetch", objects.url, "--to", str(tmp_path / "to")])
    assert capsys.readouterr().out.endswith("run \\x1b[31mrun\n")


async def test_the_command_fetches_what_a_run_published(
    make_run: Callable[..., Run], bucket: str, tmp_path: Path
) -> None:
    run = make_run(parameters={"mirror": f"s3://{bucket}/weights"})
    run.scheduler()
    run.parameters()
    trainer = await run.trainer()
    await trainer.publish(0, WEIGHTS)
    url = f"s3://{bucket}/weights/{(await run.status(run.where.scheduler))['run']}"

    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "staleflow.cli", "weights", "fetch", url, "--to", str(tmp_path / "to"), *words]
        return subprocess.run(line, capture_output=True, text=True, check=False, env=dict(os.environ))

    done = await asyncio.to_thread(command, "--min-version", "0", "--timeout", "60", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 0
    assert (tmp_path / "to" / "model.safetensors").exists()
    late = await asyncio.to_thread(command, "--version", "3")
    assert (late.returncode, late.stdout) == (1, "")
    assert late.stderr == f"staleflow: {url} does not have version 3 yet; it has 0\n"
