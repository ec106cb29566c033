"""What follows from a check-up: the engines and backends that can run here, and how to begin."""

from collections.abc import Sequence

from staleflow.configs.loading.extras import install
from staleflow.supervisor.checkup import Finding

ENGINES = {"simulated": (), "transformers": ("torch", "transformers"), "vllm": ("torch", "transformers", "vllm")}
"""Each with the findings that must be good."""
BACKENDS = {
    "simulated": (),
    "torch": ("torch", "transformers"),
    "ddp": ("torch", "transformers"),
    "fsdp": ("torch", "transformers"),
    "deepspeed": ("torch", "transformers", "deepspeed"),
}


def abilities(findings: Sequence[Finding]) -> list[Finding]:
    """Two findings: what can run, and a command to begin with."""
    good = {finding.what for finding in findings if finding.state == "good"}
    engines = [name for name, needs in ENGINES.items() if good.issuperset(needs)]
    backends = [name for name, needs in BACKENDS.items() if good.issuperset(needs)]
    can = f"engines {', '.join(engines)}; trainer backends {', '.join(backends)}"
    if "transformers" in engines:
        begin = "staleflow init my-task: a task of your own that runs as it is"
    else:
        begin = f"staleflow run configs/simulated.toml; for models {install('train')}"
    return [Finding("can run", "good", can), Finding("begin with", "good", begin)]
