"""No received byte becomes code: the source has no way to do it. tests/process checks live, with an audit hook."""

import ast
from collections.abc import Iterator

import pytest

from tests.test_architecture import modules

CALLS = frozenset({"eval", "exec", "compile", "__import__"})
LOADS = frozenset({"torch.load", "pickle.loads", "pickle.load", "joblib.load", "yaml.load", "yaml.unsafe_load"})
SHELLS = frozenset({"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"})
ARRAYS = frozenset({"np.load", "numpy.load", "np.loads", "numpy.fromstring"})
"""Loaders of arrays with objects inside, which are pickles."""
MODULES = frozenset(
    {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
)


def dotted(node: ast.expr) -> str:
    """Return ``torch.load`` for ``torch.load(...)``; return the empty string for a call without a plain name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            before = dotted(value)
            return f"{before}.{name}" if before else ""
        case _:
            return ""


def dangers(tree: ast.AST) -> Iterator[str]:
    """Yield each call that turns data into code, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in CALLS | LOADS | SHELLS | ARRAYS:
                yield f"{node.lineno}: {name}"
            if any(key.arg in ("allow_pickle", "shell", "trust_remote_code") and _true(key) for key in node.keywords):
                yield f"{node.lineno}: {name} with a dangerous option"
        elif isinstance(node, ast.Import):
            yield from (f"{node.lineno}: {a.name}" for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield f"{node.lineno}: {node.module}"


def _true(key: ast.keyword) -> bool:
    return not (isinstance(key.value, ast.Constant) and key.value.value in (False, None))


def test_nothing_in_the_source_turns_data_into_code() -> None:
    found = [f"{path}:{danger}" for _, path in modules() for danger in dangers(ast.parse(path.read_text()))]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import dill as d",
        "eval(x)",
        "exec(x)",
        "compile(x, '', 'exec')",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "np.load(path)",
        "np.memmap(path, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(x, trust_remote_code=flag)",
        "os.system(x)",
    ],
)
def test_the_gate_sees_what_it_is_there_for(code: str) -> None:
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize("code", ["re.compile(x)", "model.eval()", "subprocess.run(x, shell=False)", "json.loads(x)"])
def test_the_gate_lets_the_harmless_pass(code: str) -> None:
    assert not list(dangers(ast.parse(code)))
