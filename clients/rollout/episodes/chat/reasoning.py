"""Reasoning between ``<think>`` and ``</think>`` at the start of an answer."""

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    """Return (reasoning, content) of an answer. ``opened``: the prompt already ends with the opening tag.

    Some templates open the tag themselves and some models leave it out. Reasoning that was cut off has no closing tag;
    its content is empty.
    """
    written = text.lstrip()
    if written.startswith(OPEN):
        written = written[len(OPEN) :]
    elif not opened and CLOSE not in text:
        return "", text
    reasoning, _, content = written.partition(CLOSE)
    return reasoning.strip("\n"), content.lstrip("\n")


def has_reasoning(name: str, template: str) -> bool:
    """Return whether answers are split: ``environment.reasoning_parser``, where "auto" asks the chat template."""
    return name == "think" or (name == "auto" and CLOSE in template)
