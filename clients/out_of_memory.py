"""Errors that mean too little memory, whoever raises them. No torch here: its own class is told by name."""


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or this machine, had less than was asked for."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "not enough memory" in str(error))
    )
