"""``python -m docs.generate docs`` writes every generated page and picture."""

import sys
from pathlib import Path

from docs.generate.pages import generated_files


def main() -> int:
    for name, text in generated_files().items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


sys.exit(main())
