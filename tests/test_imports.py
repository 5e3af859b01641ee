"""Imports point downwards only, and everything below the experiments needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import continuous_attention

PACKAGE = "continuous_attention"
ROOT = Path(continuous_attention.__file__).parent
# From the bottom to the top: a file may import from the layers below its own, and in a package from its neighbours.
LAYERS = [
    "segment",
    "intervals",
    "checks",
    "dates",
    "ranks",
    "reference",
    "quadrature",
    "kernels",
    "ops",
    "path",
    "functional",
    "nn",
    "transformer",
    "context_parallel",
    "integrations",
    "",
    "experiments",
    "info",
    "bench",
    "cli",
]
PACKAGES = {"kernels", "integrations", "experiments"}
FILES = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py"))
CORE = [file for file in FILES if not file.startswith(("experiments", "info", "bench", "cli"))]


def parse(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def layer_of(file: str) -> str:
    """The first part of the path; "" is the package itself with its public names."""
    return file.split("/")[0].removesuffix(".py").replace("__init__", "")


def imports(tree: ast.AST) -> set[str]:
    """The full names of everything imported anywhere in the tree, functions included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import doesn't say where it points"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layers(tree: ast.AST) -> set[str]:
    """The layers of this package that the tree imports from."""
    parts = [name.split(".") for name in imports(tree)]
    names = {own[1] if len(own) > 1 else "" for own in parts if own[0] == PACKAGE}
    return {name if name in LAYERS else "" for name in names}


class AtImport(ast.NodeTransformer):
    """Leaves of a module what runs when it is imported."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        return None


@pytest.mark.parametrize("file", FILES)
def test_imports_point_downwards(file: str) -> None:
    layer = layer_of(file)
    assert layer in LAYERS, "a new file needs a place in the order"
    rank = LAYERS.index(layer)
    wrong = [x for x in layers(parse(file)) if LAYERS.index(x) >= rank and not (x == layer and x in PACKAGES)]
    assert not wrong, f"{file} imports upwards from {wrong}"


def test_every_layer_below_the_experiments_is_there() -> None:
    assert {layer_of(file) for file in CORE} == set(LAYERS) - {"experiments", "info", "bench", "cli"}


def test_the_package_itself_only_reexports() -> None:
    docstring, *statements = parse("__init__.py").body
    assert isinstance(docstring, ast.Expr)
    reexported: set[str] = set()
    for statement in statements:
        if isinstance(statement, ast.Assign):
            assert ast.unparse(statement.targets[0]) in ("__all__", "__version__")
        else:
            assert isinstance(statement, ast.ImportFrom)
            reexported |= {alias.asname or alias.name for alias in statement.names}
    assert reexported == set(continuous_attention.__all__)


@pytest.mark.parametrize("file", CORE)
def test_the_core_imports_torch_and_the_standard_library_only(file: str) -> None:
    """But for the kernels in Triton, which their package imports when they are needed."""
    names = {name.split(".")[0] for name in imports(AtImport().visit(parse(file)))}
    allowed = {"triton"} if file.startswith("kernels/triton/") and not file.endswith("__init__.py") else set()
    assert names <= {PACKAGE, "torch"} | allowed | sys.stdlib_module_names


def test_importing_it_imports_torch_only() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import continuous_attention;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) - sys.stdlib_module_names <= {PACKAGE, "torch"}
