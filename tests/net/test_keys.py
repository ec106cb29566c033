"""Key files load, the allow list decides which keys may connect, and each role has its own set of requests."""

import errno
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from staleflow.cli.main import main
from staleflow.configs.errors import ConfigError
from staleflow.net.allow_list import AllowList, Holder, read_allowed, write_allowed
from staleflow.net.keys import read_key
from staleflow.net.permissions import ATTACHES_AS, OPS, VERBS, Role, denial_reason
from staleflow.protocols.consistency.effects import ReleaseWhy
from staleflow.protocols.consistency.ids import GroupId, LeaseId, Lineage, Step, Version, WorkerId
from staleflow.protocols.wire import messages
from staleflow.protocols.wire.messages import Attach, Op, Operations, PushGroups, PushItem, RegisterQuarantine, Request

ME = "rollout-0.1"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    assert main(["keygen", str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def test_keygen_makes_a_private_key_for_each_role(keys: Path) -> None:
    assert {path.name for path in keys.iterdir()} == {"allowed.toml", *(f"{role}.key" for role in Role)}
    assert keys.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}
    found = [read_key(keys / f"{role}.key") for role in Role]
    assert [key.role for key in found] == list(Role)
    assert {key.server for key in found} == {read_key(keys / "server.key").public}
    assert len({key.secret for key in found} | {key.public for key in found}) == 2 * len(Role)
    assert read_allowed(keys / "allowed.toml") == {key.public: Holder(key.role, key.role.value) for key in found}


def test_keygen_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert main(["keygen", str(tmp_path / "keys")]) == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()} == {0o600}


def test_keygen_overwrites_nothing(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in keys.iterdir()}
    assert main(["keygen", str(keys)]) == 2
    assert "the folder exists and is not empty" in capsys.readouterr().err
    assert main(["keygen", str(keys), "--add", "stage", "--name", "rollout"]) == 2
    write_allowed(keys / "allowed.toml", {})  # no key has the name any more, but its file still exists
    assert main(["keygen", str(keys), "--add", "stage", "--name", "rollout"]) == 2
    before["allowed.toml"] = (keys / "allowed.toml").read_bytes()
    assert {path.name: path.read_bytes() for path in keys.iterdir()} == before


def test_keygen_adds_a_key_of_a_role(keys: Path) -> None:
    assert main(["keygen", str(keys), "--add", "rollout", "--name", "gpu-box-7"]) == 0
    added = read_key(keys / "gpu-box-7.key")
    assert (added.role, added.server) == (Role.ROLLOUT, read_key(keys / "server.key").public)
    assert read_allowed(keys / "allowed.toml")[added.public] == Holder(Role.ROLLOUT, "gpu-box-7")
    assert len(read_allowed(keys / "allowed.toml")) == len(Role) + 1


@pytest.mark.parametrize("name", ["../x", "a/b", "a.b", '"', "-x", "x" * 64])
def test_a_name_that_is_no_file_name_is_refused(keys: Path, name: str) -> None:
    assert main(["keygen", str(keys), "--add", "rollout", "--name", name]) == 2
    assert len(list(keys.iterdir())) == len(Role) + 1


def test_a_secret_is_in_its_file_only(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = read_key(keys / "trainer.key")
    assert key.secret.decode() not in repr(key)
    assert key.secret not in (keys / "allowed.toml").read_bytes()
    path = keys / "trainer.key"
    path.write_text(path.read_text().replace('role = "trainer"', 'role = "king"'))
    with pytest.raises(ConfigError) as caught:
        read_key(path)
    assert key.secret.decode() not in str(caught.value)
    assert key.secret.decode() not in "".join(capsys.readouterr())


def test_a_key_file_that_others_may_read_is_refused(keys: Path) -> None:
    (keys / "stage.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"others may use it \(mode 0640\)"):
        read_key(keys / "stage.key")
    with pytest.raises(ConfigError, match="no such file; staleflow keygen makes it"):
        read_key(keys / "nobody.key")


@pytest.mark.parametrize("text", ["", "role = 1", 'role = "rollout"', "\0", 'role = "rollout"\npublic = "short"'])
def test_what_is_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="key file is"):
        read_key(path)


def test_the_allow_list_follows_its_file(keys: Path) -> None:
    path = keys / "allowed.toml"
    held, allowed = read_key(keys / "rollout.key").public, AllowList(path)
    assert allowed.find(held) == Holder(Role.ROLLOUT, "rollout")
    assert not allowed.refresh()
    write_allowed(path, {public: holder for public, holder in read_allowed(path).items() if public != held})
    assert allowed.refresh()
    assert allowed.find(held) is None


def test_an_allow_list_that_cannot_be_read_stays_as_it_was(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = keys / "allowed.toml"
    held, allowed = read_key(keys / "rollout.key").public, AllowList(path)
    spoils: list[Callable[[], object]] = [lambda: path.write_text("[rollout"), path.unlink]
    for spoil in spoils:
        spoil()
        assert not allowed.refresh()
        assert allowed.find(held) == Holder(Role.ROLLOUT, "rollout")
    assert caplog.text.count("allow-list not reloaded") == len(spoils)


def test_a_revocation_that_cannot_be_read_at_first_is_applied_later(
    keys: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = keys / "allowed.toml"
    held, allowed = read_key(keys / "rollout.key").public, AllowList(path)
    write_allowed(path, {public: holder for public, holder in read_allowed(path).items() if public != held})

    def no_descriptor(path: Path, encoding: str) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", no_descriptor)
        for _ in range(3):
            assert not allowed.refresh()
    assert allowed.find(held) == Holder(Role.ROLLOUT, "rollout")
    assert caplog.text.count("allow-list not reloaded") == 1
    assert allowed.refresh()
    assert allowed.find(held) is None
    assert not allowed.refresh()


@pytest.mark.parametrize("written", [0, 1, 10])
def test_an_allow_list_that_is_half_written_shuts_nobody_out(
    keys: Path, caplog: pytest.LogCaptureFixture, written: int
) -> None:
    """``scp`` truncates a file and then fills it: a read in between finds valid TOML up to some line."""
    path, server = keys / "allowed.toml", read_key(keys / "server.key").public
    main(["keygen", str(keys), "--add", "rollout", "--name", "gpu-box-7"])
    held, allowed = read_key(keys / "rollout.key").public, AllowList(path)
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:written]))
    assert server not in read_allowed(path)
    assert not allowed.refresh()
    assert allowed.find(held) == Holder(Role.ROLLOUT, "rollout")
    assert "it lacks the key of the servers" in caplog.text
    path.write_text(whole.replace("gpu-box-7", "gpu-box-8"))
    assert allowed.refresh()
    assert Holder(Role.ROLLOUT, "gpu-box-8") in map(allowed.find, read_allowed(path))


def test_every_verb_is_in_the_table() -> None:
    assert set(typing.get_args(Request)) == set(VERBS)
    assert set(typing.get_args(Op)) == set(OPS)
    assert set(ATTACHES_AS) == set(Role)


def body(kind: type[typing.Any]) -> typing.Any:
    """Return a request of that kind with fields of the right types, in the name of ``ME``."""
    values: dict[str, typing.Any] = {}
    for part in msgspec.structs.fields(kind):
        if part.name in ("worker", "trainer"):
            values[part.name] = WorkerId(ME)
        elif part.name in ("ops", "items"):
            values[part.name] = []
    defaults = {"role": "monitor"}
    made = {part.name: values.get(part.name, defaults.get(part.name, 0)) for part in msgspec.structs.fields(kind)}
    return kind(**made)


def test_each_role_may_send_what_the_table_says_and_nothing_else() -> None:
    may = {role: {kind.__name__ for kind in VERBS if denial_reason(role, ME, body(kind)) is None} for role in Role}
    common = {"Ping", "Attach", "Detach"}
    pulling = {"GetManifest", "GetChunk", "GetDelta", "Unpin"}
    assert may[Role.MONITOR] == common | {"GetStatus"}
    assert may[Role.ADMIN] == common | {"GetStatus", "Drain"}
    assert may[Role.STAGE] == common | {"GetStageWork", "PutStageResults", "GetStatus"}
    assert may[Role.ROLLOUT] == common | {
        *("Report", "Pulled", "PutScores", "Operations", "GetRows", "GetSlab", "PushGroups", "PutPartial"),
        *("GetSources", *pulling),
    }
    assert may[Role.TRAINER] == common | {
        *("Join", "GetBatch", "CheckBatch", "GetClaims", "QuarantineGroups"),
        *("RegisterCheckpoint", "Metrics"),
        *("Finished", "GetGroups", "GetStatus"),
        *("BeginPublish", "PublishChunk", "CommitPublish", "GetSources", *pulling),
    }
    servers = {
        "GetStatus",
        "Operations",
        "GetRetained",
        "GetExpected",
        "StageLoads",
        "GetModelLimits",
        "PromptFeatures",
        "GetSubmittedRows",
        "RegisterVersion",
        "GetRetainedVersions",
    }
    assert may[Role.PROMPTS] == common | {"SubmitPrompts", "GetOutcomes"}
    assert may[Role.SERVER] == common | servers | pulling | {"JoinRelays"}


def test_a_role_attaches_as_itself_or_to_look() -> None:
    def attach(role: Role, claimed: str) -> str | None:
        return denial_reason(role, ME, Attach(worker=WorkerId(ME), name="x", role=claimed))

    assert attach(Role.ROLLOUT, "rollout") is attach(Role.ROLLOUT, "monitor") is None
    assert attach(Role.ROLLOUT, "trainer") == "a key of role rollout may not attach as trainer"
    assert attach(Role.SERVER, "trajectories") is attach(Role.SERVER, "parameters") is None
    for role in (Role.ROLLOUT, Role.STAGE, Role.TRAINER, Role.PROMPTS, Role.MONITOR, Role.ADMIN):
        assert attach(role, "parameters") is not None
    assert attach(Role.MONITOR, "admin") is not None


def test_a_batch_of_operations_is_judged_one_by_one() -> None:
    release = messages.RegisterRelease(group=GroupId(1), lease=LeaseId(1), why=ReleaseWhy.ABORTED)
    quarantine = RegisterQuarantine(group=GroupId(1))
    assert denial_reason(Role.ROLLOUT, ME, Operations(ops=[release])) is None
    both = Operations(ops=[release, quarantine])
    assert denial_reason(Role.ROLLOUT, ME, both) == "a key of role rollout may not send RegisterQuarantine"
    assert denial_reason(Role.SERVER, ME, both) is None
    moved = messages.RegisterYield(group=GroupId(1), lease=LeaseId(1), lineage=Lineage(0), version=Version(0), sha="")
    assert denial_reason(Role.SERVER, ME, Operations(ops=[moved])) is not None


def test_nobody_speaks_for_another_worker() -> None:
    other = WorkerId("rollout-1.2")
    item = PushItem(group=GroupId(1), lease=LeaseId(1), worker=other, truncated=False, frames=[])
    for role, said in (
        (Role.ROLLOUT, messages.Detach(worker=other, why="")),
        (Role.ROLLOUT, PushGroups(items=[item])),
        (Role.TRAINER, messages.Join(trainer=other, lineage=Lineage(0), version=Version(0))),
        (Role.ROLLOUT, messages.Unpin(worker=other, lineage=Lineage(0), version=Version(0))),
        (Role.TRAINER, messages.Metrics(worker=other, step=Step(0), values={})),
    ):
        assert denial_reason(role, ME, said) == f"{ME} may not act for {other}"
        assert denial_reason(role, other, said) is None


def test_the_document_has_the_same_table() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "security.md").read_text()
    rows = text.partition("| request | roles |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    told: dict[str, frozenset[str]] = {}
    for row in rows:
        verbs, roles = row.strip("| ").split(" | ")
        named = re.sub(r"\(.*?\)", "", roles).replace("every role, for itself", ", ".join(Role))
        told |= dict.fromkeys(re.findall(r"`(\w+)`", verbs), frozenset(role.strip() for role in named.split(",")))
    assert told == {kind.__name__: frozenset(map(str, roles)) for kind, roles in VERBS.items()}
    for role in (Role.ROLLOUT, Role.SERVER):
        listed = re.search(rf"`Operations` \|.*?{role} \((.*?)\)", text)
        assert listed
        assert set(re.findall(r"`(\w+)`", listed[1])) == {op.__name__ for op, roles in OPS.items() if role in roles}
