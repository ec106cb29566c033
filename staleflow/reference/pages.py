"""Everything that is made, by its place below ``docs/``."""

from staleflow.reference.commands import commands
from staleflow.reference.configuration import configuration
from staleflow.reference.life import life
from staleflow.reference.metrics import metrics
from staleflow.reference.timeline import timeline
from staleflow.reference.window import window


def made() -> dict[str, str]:
    """The text of each page and picture."""
    pages = {"configuration": configuration(), "commands": commands(), "metrics": metrics()}
    pictures = {"life": life(), "window": window(), "timeline": timeline()}
    return {
        **{f"reference/{name}.md": "\n".join(lines).strip() + "\n" for name, lines in pages.items()},
        **{f"pictures/{name}.svg": text for name, text in pictures.items()},
    }
