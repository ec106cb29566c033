"""The digest of a payload names its algorithm, and that algorithm verifies it."""

import hashlib

import pytest

from staleflow.protocols.wire.payload_digest import matches, payload_digest, shortened

DATA = bytes(range(256)) * 20
NEW = payload_digest((DATA,))
OLD = hashlib.sha256(DATA).hexdigest()


def test_a_new_digest_is_blake3() -> None:
    # The test vector of the empty input, from the BLAKE3 specification.
    assert payload_digest(()) == "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.mark.parametrize("cut", [0, 1, 64, 1024, 5119, 5120])
def test_the_digest_of_parts_is_that_of_the_whole(cut: int) -> None:
    assert payload_digest((DATA[:cut], memoryview(DATA)[cut:])) == NEW


@pytest.mark.parametrize("digest", [NEW, OLD], ids=["blake3", "sha256"])
def test_a_changed_byte_is_found_by_either_algorithm(digest: str) -> None:
    assert matches(DATA, digest)
    assert not matches(DATA[:-1] + b"\0", digest)
    assert not matches(DATA, digest[:-1])


def test_no_digest_is_taken_for_one_of_another_algorithm() -> None:
    assert not matches(DATA, NEW.removeprefix("blake3:"))
    assert not matches(DATA, f"blake3:{OLD}")
    assert not matches(DATA, f"sha1:{OLD}")
    assert not matches(DATA, "")


@pytest.mark.parametrize(("digest", "start"), [(NEW, NEW[:19]), (OLD, OLD[:12]), ("", "")])
def test_a_message_shows_twelve_digits(digest: str, start: str) -> None:
    assert shortened(digest) == start
