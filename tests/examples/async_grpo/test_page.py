"""docs/tutorials/trl.md shows the shipped function."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent.parent


def test_the_page_shows_the_function_of_the_configuration() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorials" / "trl.md").read_text(), re.DOTALL)
    _, _, shipped = (ROOT / "staleflow" / "examples" / "async_grpo" / "train.py").read_text().partition('"""\n\n')
    assert code == shipped
