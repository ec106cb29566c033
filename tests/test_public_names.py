"""The public names of ``staleflow``, each imported at its first use, exist."""

import pytest

import staleflow


@pytest.mark.parametrize("name", staleflow.__all__)
def test_a_public_name_exists(name: str) -> None:
    assert getattr(staleflow, name) is not None
