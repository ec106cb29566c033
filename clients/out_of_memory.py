"""Errors that mean too little memory, whoever raises them. No torch here: its own class is told by name."""

_SAID = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""In plain errors of torch: its allocator for CPUs, CUDA's own calls, cuBLAS."""


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or this machine, had less than was asked for."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID))
    )
