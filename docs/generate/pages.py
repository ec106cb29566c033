"""All generated pages and pictures, by path below ``docs/``."""

from docs.generate.bars import charts
from docs.generate.commands import commands
from docs.generate.configuration import configuration, costs
from docs.generate.diagrams import architecture, machines, stages
from docs.generate.life import life
from docs.generate.metrics import metrics
from docs.generate.protocol import protocol
from docs.generate.timeline import timeline
from docs.generate.trace import trace
from docs.generate.window import window


def generated_files() -> dict[str, str]:
    """Return the text of each page and picture."""
    pages = {"configuration": configuration(), "costs": costs(), "commands": commands(), "metrics": metrics()}
    pictures = {"life": life(), "window": window(), "timeline": timeline()}
    pictures |= {"architecture": architecture(), "machines": machines(), "stages": stages(), **charts()}
    return {
        "trace.md": "\n".join(trace()).strip() + "\n",
        "protocol.md": "\n".join(protocol()).strip() + "\n",
        **{f"reference/{name}.md": "\n".join(lines).strip() + "\n" for name, lines in pages.items()},
        **{f"pictures/{name}.svg": text for name, text in pictures.items()},
    }
