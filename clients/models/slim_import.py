# pyright: basic, reportMissingImports=false
"""Keep scikit-learn and scipy out of the processes that compute with models.

Where they are installed (the extra ``ranker``), transformers imports them, and pandas with them, for assisted
generation and for losses of object detection. That is 3 of the 7 CPU seconds of its import, in each process of a run.
"""

import sys

PACKAGES = ("sklearn", "scipy")


def hide_unused_packages() -> None:
    """Let transformers conclude that ``PACKAGES`` are not installed. Call it before the first import of a model class.

    Afterwards, code of the user can import them as usual. No effect on packages that are imported already.
    """
    hidden = [name for name in PACKAGES if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # Python's way to make an import fail
    try:
        from transformers.utils.import_utils import is_scipy_available, is_sklearn_available

        is_scipy_available()  # transformers keeps these answers
        is_sklearn_available()
    finally:
        for name in hidden:
            del sys.modules[name]
