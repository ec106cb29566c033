"""Columns are declared with a free name, a type and a size, and anything else is refused by name."""

import pytest

from staleflow.configs.columns import typed_columns
from staleflow.configs.errors import ConfigError
from staleflow.configs.loading.load import load
from staleflow.protocols.wire.typed_columns import TypedColumn
from tests.configs.conftest import MINIMAL, Write

EXPERTS = '\n[[column]]\nname = "experts"\nper = "token"\ndtype = "int32"\nshape = [4, 2]\nrequired = false\n'
OWN = "rollout.engine=mine.py:Engine"


def test_a_declared_column_is_that_of_the_wire(write: Write) -> None:
    image = '\n[[column]]\nname = "image"\nper = "sample"\ndtype = "bytes"\nmax_bytes = 100\n'
    config = load(write(MINIMAL + EXPERTS + image), [OWN])
    assert typed_columns(config.column) == (
        TypedColumn(name="experts", per="token", dtype="int32", shape=(4, 2), max_bytes=1 << 20, required=False),
        TypedColumn(name="image", per="sample", dtype="bytes", max_bytes=100),
    )


@pytest.mark.parametrize(
    ("changed", "to", "key", "says"),
    [
        ('"experts"', '"Experts"', "name", "lower-case letters"),
        ('"experts"', '"logprobs"', "name", "it must be none of prompt_ids"),
        ("required = false\n", "required = false\n" + EXPERTS, "name", r"column\[0\] has it already"),
        ('"int32"\nshape = [4, 2]', '"bytes"', "dtype", 'use "uint8" and a shape'),
        ('"int32"', '"float64"', "dtype", "float64"),
        ('per = "token"\ndtype = "int32"', 'per = "sample"\ndtype = "bytes"', "shape", "leave it empty"),
        ("[4, 2]", "[1, 1, 1, 1, 1, 1, 1]", "shape", "at most 6 dimensions"),
        ("[4, 2]", "[4, 0]", "shape", "each an integer from 1"),
        ("[4, 2]", "[100_000]", "shape", "takes 400000 bytes; at most 65536 a token"),
        ("[4, 2]", "[4]\nmax_bytes = 7", "max_bytes", 'it is for dtype = "bytes"'),
        ("required = false", "required = true", "required", 'rollout.engine "simulated" makes no columns'),
    ],
)
def test_a_wrong_column_is_refused_by_its_key(write: Write, changed: str, to: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        load(write(MINIMAL + EXPERTS.replace(changed, to)))
    assert refused.value.what.startswith("column[")
    assert refused.value.what.partition(".")[2].startswith(key)


def test_a_run_has_at_most_sixteen_columns(write: Write) -> None:
    many = "".join(EXPERTS.replace("experts", f"experts{n}") for n in range(17))
    with pytest.raises(ConfigError, match="at most 16 columns"):
        load(write(MINIMAL + many))
