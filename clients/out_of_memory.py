"""Detection of out-of-memory errors of any library. Imports no torch: its exception class is matched by name."""

_MESSAGES = ("can't allocate memory", "not enough memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Messages of plain ``RuntimeError``s of torch: its CPU allocator, CUDA itself, cuBLAS."""


def out_of_memory(error: BaseException) -> bool:
    """Return True if a device, or this machine, ran out of memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in _MESSAGES))
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, which allocators follow by a table."""
    return (str(error).splitlines() or [""])[0]
