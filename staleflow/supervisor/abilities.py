"""Derive from the findings of ``staleflow doctor`` which engines and backends can run, and suggest a first command."""

from collections.abc import Sequence

from staleflow.configs.loading.extras import install
from staleflow.supervisor.checkup import Finding

ENGINES = {"simulated": (), "transformers": ("torch", "transformers"), "vllm": ("torch", "transformers", "vllm")}
"""Engines, each with the findings that must be good."""
BACKENDS = {
    "simulated": (),
    "torch": ("torch", "transformers"),
    "ddp": ("torch", "transformers"),
    "fsdp": ("torch", "transformers"),
    "deepspeed": ("torch", "transformers", "deepspeed"),
}


def abilities(findings: Sequence[Finding]) -> list[Finding]:
    """Return two findings: what can run here, and a command to start with."""
    good = {finding.what for finding in findings if finding.state == "good"}
    engines = [name for name, needs in ENGINES.items() if good.issuperset(needs)]
    backends = [name for name, needs in BACKENDS.items() if good.issuperset(needs)]
    can = f"engines {', '.join(engines)}; trainer backends {', '.join(backends)}"
    if "transformers" in engines:
        start = "staleflow init my-task: a starter task that runs unchanged"
    else:
        start = f"staleflow run configs/simulated.toml; for models {install('train')}"
    return [Finding("can run", "good", can), Finding("start with", "good", start)]
