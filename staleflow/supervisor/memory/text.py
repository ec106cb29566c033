"""The memory plan as lines of text."""

from collections.abc import Iterator

from staleflow.configs.schema import Config
from staleflow.supervisor.memory.plan import PARTS, Device, Plan, Use, fill, remedy


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f}" if nbytes >= 2**30 / 20 or nbytes == 0 else "<0.1"


def name(device: Device) -> str:
    return "main memory" if device.gpu is None else f"GPU {device.gpu}"


def verdict(config: Config, device: Device) -> str:
    """Return needed and free memory of a device, and the keys to change if it is too small."""
    if not device.free:
        return f"about {gib(device.needed)} GiB; free memory unknown"
    compared = f"about {gib(device.needed)} of {gib(device.free)} GiB free"
    return f"{compared}: fits" if device.fits else f"{compared}: does not fit; {remedy(config, device)}"


def parts(use: Use) -> str:
    """Return the parts of a process that are not negligible, the sum first."""
    named = [(part.replace("_", " "), getattr(use, part)) for part in PARTS]
    return f"{gib(use.total)} GiB: " + ", ".join(f"{part} {gib(nbytes)}" for part, nbytes in named if nbytes)


def lines(config: Config, plan: Plan) -> Iterator[str]:
    """Yield the plan: each device with its processes, then what is assumed and what is unknown."""
    for device in plan.devices:
        yield f"{name(device)}: {verdict(config, device)}"
        for use in device.uses:
            yield f"  {use.process} {parts(use)}"
    yield assumption(config, plan)
    yield from plan.unknown


def assumption(config: Config, plan: Plan) -> str:
    measured = plan.measured
    tokens = int(measured.pass_tokens * fill(config, measured))
    passes = f", passes of {tokens:,} tokens" if tokens else ""
    return f"estimated for prompts of {plan.prompt_tokens:,} tokens and completions of the maximum length{passes}"
