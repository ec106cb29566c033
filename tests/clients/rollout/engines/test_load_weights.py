# pyright: basic, reportMissingImports=false
"""Weights reach a device without a copy in the memory of the host."""

import numpy as np
import pytest

from staleflow.clients.rollout.engines.load_weights import over


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "int64", "bool"])
def test_a_tensor_over_a_read_only_array_shares_its_memory(dtype: str) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    array.setflags(write=False)
    tensor = over(array)
    assert tensor.data_ptr() == array.ctypes.data
    np.testing.assert_array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("array", [np.zeros((0, 4), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3).T])
def test_an_array_that_is_empty_or_not_in_c_order_is_copied(array: np.ndarray) -> None:
    np.testing.assert_array_equal(over(array).numpy(), array)
