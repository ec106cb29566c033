"""Objects behave alike in a bucket and in a folder; errors name the URL and the reason, and no key."""

from pathlib import Path

import pytest

from staleflow.configs.errors import ConfigError
from staleflow.store.objects import MAX_READ_BYTES, NoAccess, NoObject, Objects, StoreError
from tests.object_store import ENVIRONMENT, S3Server

pytestmark = pytest.mark.xdist_group("s3")


@pytest.fixture(params=["s3", "file"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "file":
        return Objects(f"file://{tmp_path}/a folder/new")
    return Objects(f"s3://{request.getfixturevalue('bucket')}/some/prefix/")


async def test_objects_are_written_listed_replaced_and_deleted(objects: Objects) -> None:
    assert await objects.sizes() == {}
    for name in ("1-2/b", "1-2/manifest.json", "1-20/a", "index.json"):
        await objects.put(name, b"old")
    await objects.put("1-2/b", memoryview(b"newer"))
    assert bytes(await objects.get("1-2/b")) == b"newer"
    assert await objects.sizes() == {"1-2/b": 5, "1-2/manifest.json": 3, "1-20/a": 3, "index.json": 3}
    assert await objects.sizes("1-2/") == {"1-2/b": 5, "1-2/manifest.json": 3}
    assert await objects.folders() == ["1-2", "1-20"]
    await objects.delete_folder("1-2", first="manifest.json")
    await objects.delete_folder("1-2", first="manifest.json")
    assert await objects.sizes() == {"1-20/a": 3, "index.json": 3}
    with pytest.raises(NoObject, match="1-2/b"):
        await objects.get("1-2/b")
    await objects.probe()
    assert await objects.sizes() == {"1-20/a": 3, "index.json": 3}


def secretless(error: StoreError) -> str:
    text = str(error)
    assert "\n" not in text
    assert not any(
        secret in text for secret in (ENVIRONMENT["AWS_ACCESS_KEY_ID"], ENVIRONMENT["AWS_SECRET_ACCESS_KEY"])
    )
    return text


async def test_an_object_too_large_for_a_mirror_is_not_read(tmp_path: Path) -> None:
    """Whoever may write to the store could otherwise fill the memory of its readers."""
    with (tmp_path / "000000.part").open("wb") as file:
        file.truncate(MAX_READ_BYTES + 1)
    with pytest.raises(StoreError, match=rf"000000\.part has {MAX_READ_BYTES + 1} bytes; at most {MAX_READ_BYTES} are"):
        await Objects(f"file://{tmp_path}").get("000000.part")


async def test_an_error_without_a_text_has_the_name_of_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("shutil.rmtree", fail)
    with pytest.raises(StoreError, match=r"1-2: MemoryError$"):
        await Objects(f"file://{tmp_path}").delete_folder("1-2", first="manifest.json")


@pytest.mark.usefixtures("bucket")
async def test_a_missing_bucket_is_one_line() -> None:
    objects = Objects("s3://no-such-bucket/x")
    with pytest.raises(NoAccess) as probed:
        await objects.probe()
    assert "s3://no-such-bucket/x" in secretless(probed.value)
    assert "NoSuchBucket" in secretless(probed.value)
    for step in (objects.sizes(), objects.get("k")):
        with pytest.raises(NoAccess, match="NoSuchBucket"):
            await step


async def test_refused_credentials_are_one_line(bucket: str, s3_server: S3Server) -> None:
    objects = Objects(f"s3://{bucket}/x")
    s3_server.forbid(True)
    try:
        for step in (objects.probe(), objects.sizes(), objects.get("k")):
            with pytest.raises(NoAccess) as refused:
                await step
            assert "InvalidAccessKeyId" in secretless(refused.value)
    finally:
        s3_server.forbid(False)


async def test_a_server_that_is_away_is_one_line(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StoreError) as away:
        await Objects(f"s3://{bucket}/x").probe()
    assert not isinstance(away.value, NoAccess | NoObject)
    assert "error sending request" in secretless(away.value)


async def test_a_folder_that_cannot_be_created_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file/below"):
        await Objects(f"file://{tmp_path}/file/below").probe()


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://", "s3://BUCKET"),
        ("/shared/weights", "s3://BUCKET"),
        ("gs://bucket/x", "s3://BUCKET"),
        ("file://host/x", "file:///FOLDER"),
        ("file:///", "file:///FOLDER"),
        ("s3://[bucket/x", "s3://BUCKET"),
        ("s3://bucket//x", "s3://BUCKET"),
        (" s3://bucket/x", "s3://BUCKET"),
        ("s3://AKID:hidden@bucket/x", "environment"),
        ("s3://AKID:hidden/hidden@bucket/x", "environment"),
        ("s3://AKID:hidden", "environment"),
        ("s3://bucket/x?secret=hidden", "environment"),
    ],
)
def test_another_url_is_refused_and_no_credential_is_repeated(url: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=allowed) as refused:
        Objects(url)
    assert "hidden" not in str(refused.value)
